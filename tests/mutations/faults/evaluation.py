"""Held-out sets: how they are answered, what their rewards come to, and the errors of both."""

from __future__ import annotations

from tests.mutations.fault import Fault

_ESTIMATES = "rl_backend/algorithm/estimates.py"
_HELD_OUT = "actors/run/held_out.py"
_SETS = "actors/run/eval_sets.py"
_TESTS = "tests/unit/actors/run/test_held_out.py"
_MEANS = f"{_TESTS}::test_results_are_means_over_prompts_with_their_errors"
_SEEDS = f"{_TESTS}::test_seeds_are_the_same_at_every_step_differ_between_sets_and_greedy_answers_have_none"
_SAMPLED = f"{_TESTS}::test_one_response_is_greedy_and_several_are_sampled_as_in_training"
_ERROR = "tests/unit/rl_backend/algorithm/test_estimates.py::test_the_error_is_that_of_the_mean_over_prompts"

FAULTS = [
    Fault(
        "pass-at-k-by-the-share-that-passes",
        _ESTIMATES,
        "1.0 - math.comb(responses - passed, k) / math.comb(responses, k)",
        "1.0 - (1.0 - passed / responses) ** k",
        (
            "tests/unit/rl_backend/algorithm/test_estimates.py::"
            "test_pass_at_k_is_the_share_of_all_draws_of_k_responses_in_which_one_passes",
        ),
        "pass@k would be too small, the more so the fewer responses there are",
    ),
    Fault(
        "error-of-one-prompt",
        _ESTIMATES,
        "statistics.stdev(values) / math.sqrt(len(values))",
        "statistics.stdev(values)",
        (_ERROR,),
        "error bars would not shrink with the number of prompts",
    ),
    Fault(
        "error-of-a-whole-population",
        _ESTIMATES,
        "statistics.stdev(values) / math.sqrt(len(values))",
        "statistics.pstdev(values) / math.sqrt(len(values))",
        (_ERROR,),
        "error bars of few prompts would be too short",
    ),
    Fault(
        "responses-counted-as-independent",
        _HELD_OUT,
        "mean_over_prompts([statistics.fmean(rewards) for rewards in of_prompts])",
        "mean_over_prompts(self.rewards)",
        (_MEANS,),
        "error bars would shrink with the number of responses to the same prompts",
    ),
    Fault(
        "every-reward-passes",
        _HELD_OUT,
        "reward >= sampled.pass_threshold",
        "reward > 0",
        (_MEANS,),
        "pass_threshold would be accepted and ignored",
    ),
    Fault(
        "responses-dealt-to-prompts-in-turn",
        _HELD_OUT,
        "list(batched(self.rewards, n))",
        "[self.rewards[prompt :: len(self.rewards) // n] for prompt in range(len(self.rewards) // n)]",
        (_MEANS,),
        "pass@k would be of responses to different prompts",
    ),
    Fault(
        "sets-share-their-seeds",
        _HELD_OUT,
        "sample_seeds(seed, -1 - index,",
        "sample_seeds(seed, -1,",
        (_SEEDS,),
        "the chance of one set would be that of all",
    ),
    Fault(
        "held-out-seeds-of-training-steps",
        _HELD_OUT,
        "sample_seeds(seed, -1 - index,",
        "sample_seeds(seed, index,",
        (_SEEDS,),
        "held-out responses would be drawn with the random numbers of a training step",
    ),
    Fault(
        "held-out-answers-without-seeds",
        _HELD_OUT,
        "if sampling.temperature else None",
        "if False else None",
        (_SEEDS,),
        "two evaluations of the same weights would differ",
    ),
    Fault(
        "one-response-is-sampled",
        _SETS,
        "0.0 if greedy and n == 1 else 1.0",
        "1.0",
        (_SAMPLED,),
        "the held-out reward would be that of a draw, not of the likeliest response",
    ),
    Fault(
        "longer-held-out-responses-do-not-count",
        "actors/run/sampled_config.py",
        "for each in (self.sampling, *self.eval_sampling.values()))\n        return self.max_prompt_tokens",
        "for each in (self.sampling,))\n        return self.max_prompt_tokens",
        (_SAMPLED,),
        "engines would cut off the responses to a held-out set",
    ),
    Fault(
        "held-out-responses-do-not-end",
        _SETS,
        "how = ends(sampling[name], prompts[0], each.path)",
        "how = sampling[name]",
        (f"{_TESTS}::test_inputs_have_every_set_with_the_tokens_that_end_a_response",),
        "held-out responses would go on behind their end-of-text token",
    ),
    Fault(
        "more-passes-than-responses",
        _SETS,
        "            if k > n:\n",
        "            if k > 2 * n:\n",
        (f"{_TESTS}::test_sets_that_cannot_work_are_refused",),
        "an evaluation would fail after its responses have been sampled",
    ),
]
