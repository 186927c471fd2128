"""Options of sampling: the tokens that they keep, the log-probs that come with them, what they cannot be combined with."""

from __future__ import annotations

from tests.mutations.fault import Fault

_KEPT = "test_log_probs_of_kept_tokens_are_renormalised"
_SETTINGS = "test_sampling_settings_that_cannot_work_are_refused"
_REFUSED = "test_grpo_options_that_cannot_work_are_refused"

FAULTS = [
    Fault(
        "top-p-not-passed-on",
        "actors.rollout.engine.stepper:sampling_params",
        "top_p=sampling.top_p, top_k=sampling.top_k,",
        "top_k=sampling.top_k,",
        (_KEPT,),
        "top_p would be accepted and ignored",
    ),
    Fault(
        "min-p-not-passed-on",
        "actors.rollout.engine.stepper:sampling_params",
        "min_p=sampling.min_p, max_tokens=sampling.max_new_tokens,",
        "max_tokens=sampling.max_new_tokens,",
        (_KEPT,),
        "min_p would be accepted and ignored",
    ),
    Fault(
        "engines-sample-at-temperature-1",
        "actors.rollout.engine.stepper:sampling_params",
        "temperature=sampling.temperature, top_p=sampling.top_p,",
        "top_p=sampling.top_p,",
        ("test_log_probs_are_those_of_the_distribution_sampled_from",),
        "training would compare log-probs of two temperatures",
    ),
    Fault(
        "log-probs-before-temperature-and-cuts",
        "actors.rollout.vllm.process:start_vllm",
        '"logprobs_mode": "processed_logprobs",',
        '"logprobs_mode": "raw_logprobs",',
        (
            "test_log_probs_are_those_of_the_distribution_sampled_from",
            _KEPT,
        ),
        "log-probs would not be those of the distribution that was sampled from",
    ),
    Fault(
        "stop-tokens-not-passed-on",
        "actors.rollout.engine.stepper:sampling_params",
        "stop_token_ids=list(sampling.stop_token_ids),",
        "",
        ("test_a_stop_token_ends_a_response_and_belongs_to_it",),
        "every response would be as long as the limit",
    ),
    Fault(
        "cuts-of-samples-alone",
        "actors.options.sampled_config:SampledOptions.meta",
        "meta |= {name: getattr(self.sampling, name) for name in self.sampling.cuts}",
        "pass",
        ("test_cuts_of_sampling_are_those_of_the_trainers_log_probs",),
        "importance weights would be shares of probability that were kept, and tokens that are never sampled never fall",
    ),
    Fault(
        "cuts-of-greedy-responses-taken",
        "actors.rollout.config:",
        "lambda config: config.temperature,",
        "lambda config: True,",
        (
            "test_sets_that_cannot_work_are_refused",
            _SETTINGS,
        ),
        "an option would be accepted that changes nothing",
    ),
    Fault(
        "an-option-that-the-run-decides-taken",
        "rl_backend.options.option_set:read_options",
        "if has(given, path) and found not in (default, wanted):",
        "if False:",
        (_REFUSED,),
        "rollout.model_path and the like would be accepted and overwritten",
    ),
    Fault(
        "stop-strings-of-held-out-sets-without-a-tokenizer",
        "actors.options.sampled_config:SampledOptions.stops_at_strings",
        "return any(each.stop_strings for each in (self.sampling, *self.eval_sampling.values()))",
        "return any(each.stop_strings for each in (self.sampling,))",
        ("test_one_response_is_greedy_and_several_are_sampled_as_in_training",),
        "a run would end at its first evaluation, after its engines have started",
    ),
    Fault(
        "empty-stop-strings-taken",
        "actors.rollout.config:SamplingConfig._check",
        'if "" in self.stop_strings:',
        'if self.stop_strings == "":',
        (_SETTINGS,),
        "every response would end at once",
    ),
    Fault(
        "temperatures-that-vllm-raises-taken",
        "actors.rollout.config:SamplingConfig._check",
        "if 0 < self.temperature < 0.01:",
        "if self.temperature < 0:",
        (_SETTINGS,),
        "engines would sample at another temperature than training divides by",
    ),
    Fault(
        "drawn-samples-keep-one-version-span",
        "actors.collect.stream:_from_dict",
        """
        return Sample(
            **{
                **values,
                "version_spans": tuple(VersionSpan(*span) for span in values["version_spans"]),
                "routes": None if routes is None else Routes(routes["experts"].numpy(), routes["weight_version"]),
            }
        )
        """,
        """
        return Sample(
            **{
                **values,
                "version_spans": tuple(VersionSpan(*span) for span in values["version_spans"][:1]),
                "routes": None if routes is None else Routes(routes["experts"].numpy(), routes["weight_version"]),
            }
        )
        """,
        ("test_samples_are_read_back_as_they_were_drawn",),
        "samples of two versions would be as old as the first after a resumption",
    ),
    Fault(
        "prompt-without-room-for-an-answer",
        "actors.rollout.messages:prompt_problem",
        "0 < len(prompt) < max_model_len",
        "0 < len(prompt) <= max_model_len",
        ("test_a_prompt_leaves_room_for_a_response_and_has_tokens_of_the_vocabulary",),
        "a prompt as long as the model would reach the engine",
    ),
    Fault(
        "samples-by-the-number-of-the-prompt",
        "actors.rollout.group.calls:PendingSamples.result",
        "_sample(prompt, index, self._prompts[prompt], answer.result())",
        "_sample(index, index, self._prompts[prompt], answer.result())",
        ("test_samples_are_in_the_callers_order_each_with_its_own_version_and_routes",),
        "samples would count as those of other prompts",
    ),
    Fault(
        "a-slow-engine-gets-as-much-as-the-others",
        "actors.rollout.group.turns:GroupTurns._assigned",
        "if in_flight[engine] >= infos[engine].room:",
        "if False:",
        ("test_prompts_go_to_engines_as_they_become_free_and_a_slow_one_gets_fewer",),
        "every batch would wait for its slowest engine",
    ),
    Fault(
        "updates-do-not-wait-for-calls",
        "actors.rollout.group.engines:EngineSet.updating",
        "self.wait_for_calls()",
        "pass",
        ("test_an_update_waits_for_calls_made_before_it_and_for_no_turn",),
        "after a push a part of a batch would be of newer weights than the rest",
    ),
    Fault(
        "calls-wait-for-engines-that-sleep",
        "actors.rollout.engine.engine:TurnQueue.start",
        "request.waits or self._accepts(turn)",
        "True",
        ("test_requests_of_calls_are_refused_where_turns_wait",),
        "a call of sleeping engines would stand still without a word",
    ),
    Fault(
        "keys-wake-beside-what-trains",
        "actors.rollout.engine.in_process:ServingState.tags_to_wake",
        'if self.state == "asleep" and part == "kv_cache" and not self._weights_are_awake:',
        "if False:",
        ("test_an_engine_whose_weights_alone_are_awake_takes_an_update_and_sleeps_on",),
        "a GPU would hold keys and values beside all that trains",
    ),
    Fault(
        "a-push-wakes-an-engine",
        "actors.rollout.engine.in_process:ServingState.resume",
        "self.state = self._before_update",
        'self.state = "serving"',
        ("test_an_engine_on_gpus_that_train_takes_a_push_between_its_weights_and_its_keys",),
        "an engine without keys and values would sample",
    ),
]
