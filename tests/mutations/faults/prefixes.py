"""Shared prefixes: who sees what, where a token stands, and what is added up."""

from __future__ import annotations

from tests.mutations.fault import Fault

_ATTENTION = "test_attention_over_a_tree_is_that_of_its_sequences[None-False]"
_TRAINS = "test_shared_prefixes_train_as_whole_sequences[qwen3]"
_ROWS = "test_rows_of_runs_paths_and_tokens"

FAULTS = [
    Fault(
        "a-child-sees-its-sibling",
        "rl_backend.primitive.prefix_tree:PrefixTree._rows_of_paths",
        "rows.append(own if parent < 0 else torch.cat((rows[parent], own)))",
        "rows.append(own if parent < 0 else torch.cat((rows[-1], own)))",
        (_ROWS,),
        "answers would be computed as if they followed each other",
    ),
    Fault(
        "gradient-of-a-shared-row-counted-once",
        "rl_backend.primitive.prefix_tree:take_rows",
        "return x[rows] if x.is_cuda else x.index_select(0, rows)",
        "return x.detach()[rows] + (x - x.detach())[rows] / rows.bincount()[rows].view(-1, *(1,) * (x.dim() - 1))",
        ("test_gradients_of_a_row_are_those_of_all_that_take_it",),
        "a prompt would be trained by the mean of its answers",
    ),
    Fault(
        "positions-begin-anew-behind-a-prefix",
        "rl_backend.primitive.prefix_tree:PrefixTree.position_ids",
        "places = [torch.arange(keys - own, keys) for own, keys in zip(self.lengths, self.key_lens, strict=True)]",
        "places = [torch.arange(own) for own, keys in zip(self.lengths, self.key_lens, strict=True)]",
        (_ROWS,),
        "answers would be rotated as if they began their sequence",
    ),
    Fault(
        "first-tokens-predicted-by-a-siblings-row",
        "rl_backend.runtime.native.forward_backward:_predictions",
        "return each_prediction_once(layout.places, labels, temperature)",
        "return each_prediction_once(layout.places.roll(1), labels, temperature)",
        (_TRAINS,),
        "an answer's first token would be predicted by what is not before it",
    ),
    Fault(
        "one-prediction-for-all-answers-of-a-prompt",
        "rl_backend.runtime.native.forward_backward:_predictions",
        "if shared:",
        "if shared and len(layout.places) < 0:",
        (_TRAINS,),
        "all answers would have the log-prob of the first one's first token",
    ),
    Fault(
        "one-temperature-of-a-shared-prompt",
        "rl_backend.model.input:each_prediction_once",
        "columns.append(temperature.view(torch.int32)[:, None].to(torch.int64))",
        "columns.append(temperature.view(torch.int32)[:1, None].to(torch.int64).expand(len(rows), 1))",
        ("test_a_row_predicts_once_for_each_label_and_temperature",),
        "log-probs would be at the temperature of another sequence",
    ),
    Fault(
        "another-plan-for-old-log-probs",
        "rl_backend.runtime.passes:PassRequest.prefix_tree",
        "if not handle.shares_prefixes:",
        "if not handle.shares_prefixes or self.forward_only:",
        ("test_old_log_probs_and_the_update_are_the_same_bits",),
        "ratios of a policy that has not changed would not be 1",
    ),
    Fault(
        "tenants-share-a-prefix",
        "rl_backend.runtime.tenants.passes:PassTenants.sharing",
        "found.append(BASE_ONLY - 1 - place if drops else key)",
        "found.append(0)",
        ("test_tenants_share_among_their_own_sequences_and_change_no_bit_of_others",),
        "a tenant would be computed with the adapter of another",
    ),
    Fault(
        "dropout-of-shared-tokens",
        "rl_backend.runtime.tenants.passes:PassTenants.sharing",
        "drops = key in self.by_id and self.by_id[key].lora.dropout > 0",
        "drops = False",
        ("test_tenants_share_among_their_own_sequences_and_change_no_bit_of_others",),
        "all answers would drop the same of their prompt",
    ),
    Fault(
        "adapters-of-heads-on-rows",
        "rl_backend.runtime.native.forward_backward:lay_out",
        "head_adapters=None if wanted.of_rows is None else _at_predictions(adapters, wanted.of_rows),",
        "head_adapters=None,",
        ("test_tenants_share_among_their_own_sequences_and_change_no_bit_of_others",),
        "log-probs of a critic's rows, and none of others'",
    ),
    Fault(
        "tokens-with-other-routes-shared",
        "rl_backend.data.prefixes:compared_tokens",
        "if not replays or ROUTES not in token_fields:",
        "if ROUTES not in token_fields or len(input_ids):",
        ("test_replayed_tokens_are_shared_where_their_routes_are_equal",),
        "a replay would take the routes of another sequence",
    ),
    Fault(
        "shared-tokens-dropped-from-a-routers-loss",
        "rl_backend.primitive.router:with_router_losses",
        "sequences.of_tokens(routing.experts)",
        "routing.experts",
        ("test_losses_of_routers_count_every_token[router_aux_loss_coef]",),
        "experts would be balanced as if a prompt came once",
    ),
    Fault(
        "shared-tokens-dropped-from-loads",
        "rl_backend.runtime.native.routers:PassRouters.forward.count",
        "sequences.of_tokens(routing.experts)",
        "routing.experts",
        ("test_loads_of_experts_count_every_token",),
        "biases would move by other counts than without sharing",
    ),
    Fault(
        "a-run-ends-one-token-late",
        "rl_backend.data.prefixes:_common",
        "length = int(differs.to(torch.uint8).argmax()) if bool(differs.any()) else length",
        "length = int(differs.to(torch.uint8).argmax()) + 1 if bool(differs.any()) else length",
        ("test_equal_beginnings_are_one_run_and_nothing_else_is",),
        "the first tokens of all answers would be that of one",
    ),
    Fault(
        "tokens-count-as-often-as-they-are-shared",
        "rl_backend.runtime.passes:_too_many_tokens",
        "num_tokens = tree.num_rows",
        "pass",
        ("test_only_computed_tokens_count_and_without_shared_ones_nothing_changes",),
        "a batch that was planned would be refused",
    ),
    Fault(
        "uneven-groups-not-cut",
        "rl_backend.data.prefixes:plan_shared",
        "if best is not None and cost >= best[0]:",
        "if best is not None:",
        ("test_a_group_is_cut_where_it_has_no_room_or_ranks_would_wait",),
        "a rank with one group would wait for one with two",
    ),
]
