"""Latent attention, routers with groups, and biases of routers that move."""

from __future__ import annotations

from tests.mutations.fault import Fault

_EQUAL = ("test_deepseek.py::test_log_probs_and_gradients_equal_transformers_packed_and_alone[deepseek_v3]",)
_GROUPS = ("test_routes_and_weights_are_those_of_transformers",)
_SEQUENCES = ("test_the_loss_is_the_mean_over_sequences_of_the_papers[sigmoid]",)

FAULTS = [
    Fault(
        "latent-rotation-half-split",
        "rl_backend.model.mixers.mla:LatentAttention._rotate",
        "if self.spec.interleaved:",
        "if not self.spec.interleaved:",
        _EQUAL,
        "other pairs of features would be rotated than those that the model was trained with",
    ),
    Fault(
        "latent-scale-of-keys-without-rotation",
        "rl_backend.model.mixers.mla:LatentAttention._queries",
        "spec.key_dim**0.5",
        "spec.plain_dim**0.5",
        _EQUAL,
        "the softmax would be sharper or flatter",
    ),
    Fault(
        "latent-norm-left-out",
        "rl_backend.model.mixers.mla:LatentAttention._latents",
        "both = self._of_all_tokens(torch.cat((self.kv_a_layernorm(latent), rotated), dim=-1))",
        "both = self._of_all_tokens(torch.cat((latent, rotated), dim=-1))",
        _EQUAL,
        "keys and values would be made of latents as they come",
    ),
    Fault(
        "groups-by-their-best-expert",
        "rl_backend.primitive.router:_within_groups",
        "best = grouped.topk(2, dim=-1).values.sum(-1).topk(settings.chosen_groups, dim=-1).indices",
        "best = grouped.amax(-1).topk(settings.chosen_groups, dim=-1).indices",
        _GROUPS,
        "the groups would be those of DeepSeek-V2",
    ),
    Fault(
        "outside-of-groups-is-zero",
        "rl_backend.primitive.router:_within_groups",
        "within: Tensor = grouped.masked_fill(outside[..., None], -torch.inf)",
        "within: Tensor = grouped.masked_fill(outside[..., None], 0.0)",
        ("test_experts_are_chosen_within_the_groups_with_the_best_pairs[0]",),
        "where biases make sums negative, experts outside of the groups would win",
    ),
    Fault(
        "refused-step-moves-biases",
        "rl_backend.runtime.native.optimizer:NativeOptimizer.step",
        "self.balance.step(taken=result.ok)",
        "self.balance.step(taken=True)",
        ("test_a_refused_step_moves_no_bias",),
        "routes would change with a step that changes nothing else",
    ),
    Fault(
        "choices-of-earlier-steps-count",
        "rl_backend.runtime.balance:ExpertBalance.step",
        "self.drop()",
        "pass",
        ("test_a_step_uses_up_the_choices_that_it_counted",),
        "biases would follow the load of all steps together",
    ),
    Fault(
        "loads-of-one-rank",
        "rl_backend.runtime.balance:ExpertBalance.step",
        "sum_over(group)(counts)",
        "pass",
        ("test_expert_balance.py::test_biases_move_as_on_one_rank[dp2 ep2]",),
        "ranks would move their copies of a bias apart",
    ),
    Fault(
        "loads-of-a-pipeline-are-not-counted",
        "rl_backend.runtime.native.forward_backward:run_pipeline",
        "work.routers.loads.commit()",
        "pass",
        ("test_expert_balance.py::test_biases_move_as_on_one_rank[pp2 zbv]",),
        "with pipeline stages no bias would move",
    ),
    Fault(
        "dropped-gradients-still-count",
        "rl_backend.runtime.native.handle:NativeHandle.drop_gradients",
        "self.optimizer.balance.drop()",
        "pass",
        ("test_forward_only_passes_recomputation_and_dropped_gradients_do_not_count",),
        "tokens that the step does not learn from would move biases",
    ),
    Fault(
        "sequences-counted-together",
        "rl_backend.primitive.router:sequence_balancing_loss",
        "rows = sequences.of_rows.clamp(0, sequences.number - 1)",
        "rows = sequences.of_rows.clamp(0, 0)",
        _SEQUENCES,
        "experts that one sequence overloads would be excused by another",
    ),
    Fault(
        "padding-counts-as-use-of-experts",
        "rl_backend.runtime.native.routers:PassRouters.forward.count",
        "padding = rows.padding if sequences.rows is None else None",
        "padding = None",
        ("test_tokens_that_fill_up_a_ranks_share_count_as_no_use_of_experts",),
        "biases would move by tokens that are none",
    ),
]
