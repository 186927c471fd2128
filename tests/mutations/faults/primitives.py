"""Log-probs, routers, experts and attention."""

from __future__ import annotations

from tests.mutations.fault import Fault

_LOG_PROB = "rl_backend/primitive/log_prob.py"
_TILES = "rl_backend/primitive/tiles.py"
_LOG_PROB_TESTS = "tests/unit/rl_backend/primitive/test_log_prob.py"
_MOE_TESTS = "tests/unit/rl_backend/model/test_moe.py"

FAULTS = [
    Fault(
        "log-probs-without-temperature",
        _TILES,
        "return out if self.temperature is None else out.div_(self.temperature)",
        "return out",
        (f"{_LOG_PROB_TESTS}::test_values_and_gradients_equal_a_full_softmax",),
        "log-probs would not be those that were sampled from",
    ),
    Fault(
        "gradient-without-temperature",
        _TILES,
        "return result if tile.temperature is None else result.div_(tile.temperature)",
        "return result",
        (f"{_LOG_PROB_TESTS}::test_values_and_gradients_equal_a_full_softmax",),
        "the gradient would be too large by the temperature",
    ),
    Fault(
        "entropy-without-its-value-in-the-gradient",
        _TILES,
        "sub_(grad + grad_entropy * self.entropy_value[chunk])",
        "sub_(grad)",
        (f"{_LOG_PROB_TESTS}::test_gradcheck_passes_for_log_probs_and_entropy",),
        "the entropy bonus would push logits up together",
    ),
    Fault(
        "softmax-over-the-last-slice",
        _LOG_PROB,
        "total = (total * scale).add_(weights.sum(1, keepdim=True))",
        "total = total.add_(weights.sum(1, keepdim=True))",
        (
            f"{_LOG_PROB_TESTS}::test_values_and_gradients_equal_a_full_softmax",
            f"{_LOG_PROB_TESTS}::test_extreme_logits_stay_finite",
        ),
        "sums of slices with different maxima would be added as they are",
    ),
    Fault(
        "ignored-positions-take-a-gradient",
        _LOG_PROB,
        "        active &= labels != IGNORE_LABEL\n",
        "",
        (f"{_LOG_PROB_TESTS}::test_ignored_positions_give_zero_and_take_no_gradient",),
        "last positions would be trained",
    ),
    Fault(
        "weight-gradient-of-the-last-chunk",
        _TILES,
        "beta=0 if chunk.start == 0 else 1)",
        "beta=0)",
        (f"{_LOG_PROB_TESTS}::test_values_and_gradients_equal_a_full_softmax",),
        "all but the last tokens would be left out of the head's gradient",
    ),
    Fault(
        "vocabulary-shards-not-summed",
        _LOG_PROB,
        "        shard.sum_over_ranks(sums)\n",
        "",
        ("tests/distributed/test_native_layouts.py::test_dense_layouts_train_as_one_rank[2-ranks-tp2]",),
        "each tensor-parallel rank would normalise over its own words",
    ),
    Fault(
        "vocabulary-shards-not-shifted",
        _LOG_PROB,
        "sums = torch.stack([total * scale, ",
        "sums = torch.stack([total, ",
        ("tests/distributed/test_native_layouts.py::test_dense_layouts_train_as_one_rank[2-ranks-tp2]",),
        "sums of ranks with different maxima would be added as they are",
    ),
    Fault(
        "router-choice-weighted-before-the-choice",
        "rl_backend/primitive/router.py",
        "weights = _scores(logits.gather(1, experts), settings.score)",
        "weights = _scores(logits, settings.score).gather(1, experts)",
        (f"{_MOE_TESTS}::test_softmax_before_or_after_the_choice_normalised_or_not",),
        "Mixtral's weights would not add up to one",
    ),
    Fault(
        "router-weights-not-normalised",
        "rl_backend/primitive/router.py",
        "weights = weights / (weights.sum(-1, keepdim=True) + _TINY)",
        "weights = weights / 1.0",
        (f"{_MOE_TESTS}::test_softmax_before_or_after_the_choice_normalised_or_not",),
        "norm_topk_prob would be ignored",
    ),
    Fault(
        "expert-bias-fills-full-experts",
        "rl_backend/primitive/expert_use.py",
        "torch.sign(counts.sum() - counts.numel() * counts)",
        "torch.sign(counts.numel() * counts - counts.sum())",
        (f"{_MOE_TESTS}::test_loss_free_balancing_lowers_the_bias_of_experts_with_more_than_the_mean",),
        "full experts would be filled further",
    ),
    Fault(
        "balancing-loss-counts-padding",
        "rl_backend/primitive/router_losses.py",
        "torch.dot(fractions, _without(padding, scores).sum(0) / use.num_tokens)",
        "torch.dot(fractions, scores.sum(0) / use.num_tokens)",
        (f"{_MOE_TESTS}::test_padding_does_not_count_in_the_losses",),
        "padding would pull on the router",
    ),
    Fault(
        "balancing-loss-of-one-ranks-tokens",
        "rl_backend/primitive/expert_use.py",
        "        sum_over_ranks(use)\n",
        "        pass\n",
        (
            "tests/distributed/test_expert_parallel.py::test_router_losses_are_those_of_all_tokens_and_of_no_padding[2]",
            "tests/distributed/test_router_losses.py::test_router_losses_do_not_depend_on_the_layout[2-ranks-cp2]",
        ),
        "the loss would depend on the layout",
    ),
    Fault(
        "router-losses-not-in-the-gradient",
        "rl_backend/primitive/router_losses.py",
        "return grad, grad.new_ones(())",
        "return grad, grad.new_zeros(())",
        (f"{_MOE_TESTS}::test_router_losses_enter_the_gradients_and_not_the_output",),
        "the coefficients would be accepted and ignored",
    ),
    Fault(
        "copies-of-a-token-not-summed",
        "rl_backend/primitive/experts.py",
        "copies.view(*places.shape, *rows.shape[1:]).sum(1)",
        "copies.view(*places.shape, *rows.shape[1:])[:, 0]",
        (f"{_MOE_TESTS}::test_every_copy_reaches_its_expert_and_comes_back",),
        "only a token's first expert would count",
    ),
    Fault(
        "experts-weights-without-a-gradient",
        "rl_backend/primitive/experts.py",
        "grad_weights = (grad_up * up).sum(-1)",
        "grad_weights = torch.zeros_like(weights)",
        (f"{_MOE_TESTS}::test_gradients_of_a_mixture_are_those_of_finite_differences",),
        "the router would never learn",
    ),
    Fault(
        "shared-expert-without-its-gate",
        "rl_backend/model/feedforward/moe.py",
        "shared = sigmoid(self.shared_expert_gate(x)) * shared",
        "shared = 1.0 * shared",
        (f"{_MOE_TESTS}::test_a_shared_expert_with_a_gate_equals_qwen2_moe",),
        "Qwen2-MoE would compute another model",
    ),
    Fault(
        "window-one-token-short",
        "rl_backend/primitive/attention.py",
        "windowed_attention(q, k, v, q_lens, k_lens, window, sinks)",
        "windowed_attention(q, k, v, q_lens, k_lens, max(window - 1, 1), sinks)",
        ("tests/unit/rl_backend/primitive/test_attention.py::test_a_window_hides_all_but_the_last_tokens",),
        "Mistral would forget its oldest token",
    ),
    Fault(
        "put-off-gradient-of-the-first-product-alone",
        "rl_backend/primitive/deferred.py",
        "        for weight, compute in self:\n",
        "        for weight, compute in self[:1]:\n",
        ("tests/distributed/test_native_pipelines.py::test_one_rank_is_the_trivial_pipeline[zb-h1-1]",),
        "zero-bubble schedules would train one matrix of each stage",
    ),
]
