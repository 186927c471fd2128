"""Options of sampling: the tokens that they keep, the log-probs that come with them, what they cannot be combined with."""

from __future__ import annotations

from tests.mutations.fault import Fault

_STEPPER = "actors/rollout/vllm/stepper.py"
_CONFIG = "actors/rollout/config.py"
_SAMPLED = "tests/e2e/test_rollout.py"
_KEPT = f"{_SAMPLED}::test_log_probs_of_kept_tokens_are_renormalised"
_SETTINGS = "tests/e2e/test_rollout_config.py::test_sampling_settings_that_cannot_work_are_refused"
_REFUSED = "tests/unit/examples/test_examples.py::test_grpo_options_that_cannot_work_are_refused"
_HELD_OUT = "tests/unit/actors/run/test_held_out.py"

FAULTS = [
    Fault(
        "top-p-not-passed-on",
        _STEPPER,
        "        top_p=sampling.top_p,\n",
        "",
        (_KEPT,),
        "top_p would be accepted and ignored",
    ),
    Fault(
        "min-p-not-passed-on",
        _STEPPER,
        "        min_p=sampling.min_p,\n",
        "",
        (_KEPT,),
        "min_p would be accepted and ignored",
    ),
    Fault(
        "engines-sample-at-temperature-1",
        _STEPPER,
        "        temperature=sampling.temperature,\n",
        "",
        (f"{_SAMPLED}::test_log_probs_are_those_of_the_distribution_sampled_from",),
        "training would compare log-probs of two temperatures",
    ),
    Fault(
        "log-probs-before-temperature-and-cuts",
        "actors/rollout/vllm/process.py",
        """"logprobs_mode": "processed_logprobs",""",
        """"logprobs_mode": "raw_logprobs",""",
        (f"{_SAMPLED}::test_log_probs_are_those_of_the_distribution_sampled_from", _KEPT),
        "log-probs would not be those of the distribution that was sampled from",
    ),
    Fault(
        "stop-tokens-not-passed-on",
        _STEPPER,
        "        stop_token_ids=list(sampling.stop_token_ids),\n",
        "",
        (f"{_SAMPLED}::test_a_stop_token_ends_a_response_and_belongs_to_it",),
        "every response would be as long as the limit",
    ),
    Fault(
        "cuts-weighed-by-importance",
        "actors/run/sampled_config.py",
        "        for cut in self.sampling.cuts if self.importance_options() else ():\n",
        "        for cut in ():\n",
        (_REFUSED,),
        "importance weights would be wrong for tokens that are never sampled",
    ),
    Fault(
        "cuts-of-greedy-responses-taken",
        _CONFIG,
        "    lambda config: config.temperature, ",
        "    lambda config: True, ",
        (f"{_HELD_OUT}::test_sets_that_cannot_work_are_refused", _SETTINGS),
        "an option would be accepted that changes nothing",
    ),
    Fault(
        "an-option-that-the-run-decides-taken",
        "actors/run/options.py",
        "                if has(given, path) and found not in (default, wanted):\n",
        "                if False:\n",
        (_REFUSED,),
        "rollout.model_path and the like would be accepted and overwritten",
    ),
    Fault(
        "stop-strings-of-held-out-sets-without-a-tokenizer",
        "actors/run/sampled_config.py",
        "any(each.stop_strings for each in (self.sampling, *self.eval_sampling.values()))",
        "any(each.stop_strings for each in (self.sampling,))",
        (f"{_HELD_OUT}::test_one_response_is_greedy_and_several_are_sampled_as_in_training",),
        "a run would end at its first evaluation, after its engines have started",
    ),
    Fault(
        "empty-stop-strings-taken",
        _CONFIG,
        """        if "" in self.stop_strings:\n""",
        """        if self.stop_strings == "":\n""",
        (_SETTINGS,),
        "every response would end at once",
    ),
    Fault(
        "temperatures-that-vllm-raises-taken",
        _CONFIG,
        "        if 0 < self.temperature < 0.01:\n",
        "        if self.temperature < 0:\n",
        (_SETTINGS,),
        "engines would sample at another temperature than training divides by",
    ),
]
