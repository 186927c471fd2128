"""Held-out sets: how they are answered, what their rewards come to, and the errors of both."""

from __future__ import annotations

from tests.mutations.fault import Fault

_MEANS = "test_results_are_means_over_prompts_with_their_errors"
_SEEDS = "test_seeds_are_the_same_at_every_step_differ_between_sets_and_greedy_answers_have_none"
_SAMPLED = "test_one_response_is_greedy_and_several_are_sampled_as_in_training"
_ERROR = "test_the_error_is_that_of_the_mean_over_prompts"

FAULTS = [
    Fault(
        "pass-at-k-by-the-share-that-passes",
        "actors.collect.held_out:pass_at_k",
        "return 1.0 - math.comb(responses - passed, k) / math.comb(responses, k)",
        "return 1.0 - (1.0 - passed / responses) ** k",
        ("test_pass_at_k_is_the_share_of_all_draws_of_k_responses_in_which_one_passes",),
        "pass@k would be too small, the more so the fewer responses there are",
    ),
    Fault(
        "error-of-one-prompt",
        "actors.collect.held_out:mean_over_prompts",
        "error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None",
        "error = statistics.stdev(values) if len(values) > 1 else None",
        (_ERROR,),
        "error bars would not shrink with the number of prompts",
    ),
    Fault(
        "error-of-a-whole-population",
        "actors.collect.held_out:mean_over_prompts",
        "error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None",
        "error = statistics.pstdev(values) / math.sqrt(len(values)) if len(values) > 1 else None",
        (_ERROR,),
        "error bars of few prompts would be too short",
    ),
    Fault(
        "responses-counted-as-independent",
        "actors.collect.held_out:HeldOutResult.estimates",
        'found = {f"mean@{n}": mean_over_prompts([statistics.fmean(rewards) for rewards in of_prompts])}',
        'found = {f"mean@{n}": mean_over_prompts(self.rewards)}',
        (_MEANS,),
        "error bars would shrink with the number of responses to the same prompts",
    ),
    Fault(
        "every-reward-passes",
        "actors.collect.held_out:HeldOutResult.estimates",
        "passed = [sum(reward >= sampled.pass_threshold for reward in rewards) for rewards in of_prompts]",
        "passed = [sum(reward > 0 for reward in rewards) for rewards in of_prompts]",
        (_MEANS,),
        "pass_threshold would be accepted and ignored",
    ),
    Fault(
        "responses-dealt-to-prompts-in-turn",
        "actors.collect.held_out:HeldOutResult.estimates",
        "list(batched(self.rewards, n))",
        "[self.rewards[prompt :: len(self.rewards) // n] for prompt in range(len(self.rewards) // n)]",
        (_MEANS,),
        "pass@k would be of responses to different prompts",
    ),
    Fault(
        "sets-share-their-seeds",
        "actors.collect.held_out:answer",
        "-1 - index,",
        "-1,",
        (_SEEDS,),
        "the chance of one set would be that of all",
    ),
    Fault(
        "held-out-seeds-of-training-steps",
        "actors.collect.held_out:answer",
        "-1 - index,",
        "index,",
        (_SEEDS,),
        "held-out responses would be drawn with the random numbers of a training step",
    ),
    Fault(
        "held-out-answers-without-seeds",
        "actors.collect.held_out:answer",
        "sampling.temperature",
        "False",
        (_SEEDS,),
        "two evaluations of the same weights would differ",
    ),
    Fault(
        "one-response-is-sampled",
        "actors.collect.eval_sets:EvalSet.sampling",
        'if given.get("temperature", 0.0 if greedy and n == 1 else 1.0) == 0:',
        'if given.get("temperature", 1.0) == 0:',
        (_SAMPLED,),
        "the held-out reward would be that of a draw, not of the likeliest response",
    ),
    Fault(
        "longer-held-out-responses-do-not-count",
        "actors.options.sampled_config:RLConfig.longest_sampled",
        "longest = (each.max_new_tokens for each in (self.sampling, *self.eval_sampling.values()))",
        "longest = (each.max_new_tokens for each in (self.sampling,))",
        (_SAMPLED,),
        "engines would cut off the responses to a held-out set",
    ),
    Fault(
        "held-out-responses-do-not-end",
        "actors.collect.eval_sets:load_held_out",
        "how = ends.added_to(sampling[name])",
        "how = sampling[name]",
        ("test_inputs_have_every_set_with_the_tokens_that_end_a_response",),
        "held-out responses would go on behind their end-of-text token",
    ),
    Fault(
        "the-first-row-says-what-ends-responses",
        "rl_backend.data.examples:Examples.__init__",
        "see(example, rows.where(index))",
        "see(example, rows.where(index)) if index == 0 else None",
        ("test_a_response_to_messages_ends_where_the_chat_template_ends_a_turn",),
        "chats behind a text would go on behind the end of their turn",
    ),
    Fault(
        "the-first-chat-says-what-ends-responses",
        "actors.collect.stop_tokens:Ends.see",
        "if form in self._of_turns:",
        "if self._of_turns:",
        ("test_a_response_to_messages_ends_where_the_chat_template_ends_a_turn",),
        "chats of another form, which a template ends otherwise, would not end",
    ),
    Fault(
        "more-passes-than-responses",
        "actors.collect.eval_sets:EvalSet._check_pass_at",
        "if n is not None and k > n:",
        "if n is not None and k > 2 * n:",
        ("test_sets_that_cannot_work_are_refused",),
        "an evaluation would fail after its responses have been sampled",
    ),
    Fault(
        "only-the-first-of-several-held-out-files",
        "actors.collect.eval_sets:_as_given",
        "isinstance(value, list | tuple) and len(value) == 1",
        "isinstance(value, list | tuple) and value",
        ("test_sets_are_a_path_several_or_a_mapping",),
        "the others would never be evaluated",
    ),
]
