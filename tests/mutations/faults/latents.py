"""Latent attention, routers with groups, and biases of routers that move."""

from __future__ import annotations

from tests.mutations.fault import Fault

_MIXER = "rl_backend/model/mixers/mla.py"
_ROUTER = "rl_backend/primitive/router.py"
_BALANCE = "rl_backend/runtime/native/balance.py"
_MODEL_TESTS = "tests/unit/rl_backend/model/test_deepseek.py"
_EQUAL = (f"{_MODEL_TESTS}::test_log_probs_and_gradients_equal_transformers_packed_and_alone[deepseek_v3]",)
_GROUPS = ("tests/unit/rl_backend/model/test_router_groups.py::test_routes_and_weights_are_those_of_transformers",)
_MOVES = "tests/unit/rl_backend/runtime/test_expert_balance.py"
_SEQUENCES = (
    "tests/unit/rl_backend/model/test_sequence_loss.py::test_the_loss_is_the_mean_over_sequences_of_the_papers[sigmoid]",
)

FAULTS = [
    Fault(
        "latent-rotation-half-split",
        _MIXER,
        "        if self.spec.interleaved:\n",
        "        if not self.spec.interleaved:\n",
        _EQUAL,
        "other pairs of features would be rotated than those that the model was trained with",
    ),
    Fault(
        "latent-scale-of-keys-without-rotation",
        _MIXER,
        "spec.scale * spec.key_dim**0.5",
        "spec.scale * spec.plain_dim**0.5",
        _EQUAL,
        "the softmax would be sharper or flatter",
    ),
    Fault(
        "latent-norm-left-out",
        _MIXER,
        "torch.cat((self.kv_a_layernorm(latent), rotated), dim=-1)",
        "torch.cat((latent, rotated), dim=-1)",
        _EQUAL,
        "keys and values would be made of latents as they come",
    ),
    Fault(
        "groups-by-their-best-expert",
        _ROUTER,
        "grouped.topk(2, dim=-1).values.sum(-1)",
        "grouped.amax(-1)",
        _GROUPS,
        "the groups would be those of DeepSeek-V2",
    ),
    Fault(
        "outside-of-groups-is-zero",
        _ROUTER,
        "grouped.masked_fill(outside[..., None], -torch.inf)",
        "grouped.masked_fill(outside[..., None], 0.0)",
        (
            "tests/unit/rl_backend/model/test_router_groups.py::"
            "test_experts_are_chosen_within_the_groups_with_the_best_pairs[0]",
        ),
        "where biases make sums negative, experts outside of the groups would win",
    ),
    Fault(
        "refused-step-moves-biases",
        "rl_backend/runtime/native/optimizer.py",
        "            bad = [name for name",
        "            for move in moves:\n                move.bias.add_(move.step)\n            bad = [name for name",
        (f"{_MOVES}::test_a_refused_step_moves_no_bias",),
        "routes would change with a step that changes nothing else",
    ),
    Fault(
        "choices-of-earlier-steps-count",
        _BALANCE,
        "        self.drop()\n        moves = []",
        "        moves = []",
        (f"{_MOVES}::test_a_step_uses_up_the_choices_that_it_counted",),
        "biases would follow the load of all steps together",
    ),
    Fault(
        "loads-of-one-rank",
        _BALANCE,
        "            sum_over(group)(counts)\n",
        "            pass\n",
        ("tests/distributed/test_expert_balance.py::test_biases_move_as_on_one_rank[dp2 ep2]",),
        "ranks would move their copies of a bias apart",
    ),
    Fault(
        "dropped-gradients-still-count",
        "rl_backend/runtime/native/handle.py",
        "            self.optimizer.balance.drop()\n",
        "            pass\n",
        (f"{_MOVES}::test_forward_only_passes_recomputation_and_dropped_gradients_do_not_count",),
        "tokens that the step does not learn from would move biases",
    ),
    Fault(
        "sequences-counted-together",
        "rl_backend/primitive/router_losses.py",
        "rows = sequences.of_rows.clamp(0, sequences.number - 1)",
        "rows = sequences.of_rows.clamp(0, 0)",
        _SEQUENCES,
        "experts that one sequence overloads would be excused by another",
    ),
]
