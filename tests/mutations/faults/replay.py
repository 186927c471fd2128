"""Routes: recorded, checked, replayed."""

from __future__ import annotations

from tests.mutations.fault import Fault

FAULTS = [
    Fault(
        "masked-tokens-are-replayed",
        "rl_backend.runtime.recording:routes_to_replay",
        "return signed if mask is None else signed.masked_fill(~mask.view(-1, 1, 1), -1)",
        "return signed",
        ("test_routes_matter_and_masked_tokens_follow_their_router",),
        "the last token would go to expert 0",
    ),
    Fault(
        "layers-recorded-in-reverse",
        "rl_backend.runtime.native.routers:PassRouters.forward.keep",
        "chosen.append(routing.experts.to(recorded.dtype))",
        "chosen.insert(0, routing.experts.to(recorded.dtype))",
        ("test_one_rank_replays_what_every_layout_recorded[native dp2]",),
        "layers would have each other's routes",
    ),
    Fault(
        "stages-in-the-order-of-the-ranks",
        "rl_backend.runtime.recording:gather_stages",
        "routes[:, torch.tensor(layers, dtype=torch.int64, device=device)] = of_ranks[rank, :, : len(layers)]",
        "routes[:, len(layers) * rank : len(layers) * (rank + 1)] = of_ranks[rank, :, : len(layers)]",
        ("test_one_rank_replays_what_every_layout_recorded[native zbv, recomputed]",),
        "layers of a V would have each other's routes",
    ),
    Fault(
        "routes-of-other-weights-accepted",
        "rl_backend.contracts.replay:_require_same_version",
        "if differ:",
        "if False:",
        ("test_routes_that_are_not_of_this_model_are_refused",),
        "a replay would follow a router that no longer exists",
    ),
    Fault(
        "experts-that-do-not-exist-accepted",
        "rl_backend.contracts.replay:_require_experts",
        "if least < 0 or most >= num_experts:",
        "if least < 0 or most > num_experts:",
        ("test_routes_that_are_not_of_this_model_are_refused",),
        "a route one beyond the last expert would reach a kernel",
    ),
    Fault(
        "an-expert-twice-accepted",
        "rl_backend.contracts.replay:_require_experts",
        "if repeats and bool(torch.stack(repeats).any()):",
        "if repeats and bool(torch.stack(repeats).all()):",
        ("test_an_expert_is_found_twice_wherever_it_stands",),
        "one expert would count twice",
    ),
    Fault(
        "dense-layers-count-as-sparse",
        "rl_backend.contracts.replay:RoutedLayers.routes_of",
        "routes = routes[:, torch.tensor(self.layers, device=routes.device)]",
        "routes = routes[:, : len(self.layers)]",
        ("test_layers_may_be_counted_with_or_without_dense_ones",),
        "vLLM's rows would be taken by the wrong layers",
    ),
    Fault(
        "a-rollouts-last-row-counts",
        "rl_backend.contracts.replay:route_fields",
        "ROUTES_MASK: torch.arange(num_tokens, device=routes.device) < routes.shape[0],",
        "ROUTES_MASK: torch.arange(num_tokens, device=routes.device) <= routes.shape[0],",
        ("test_a_rollouts_routes_lack_the_last_token",),
        "the last token would be replayed with zeros",
    ),
    Fault(
        "replica-not-compared",
        "rl_backend.runtime.passes:problem_in_replica",
        "largest == -smallest",
        "True",
        (
            "test_other_data_on_a_rank_of_the_same_replica_is_refused[{'tp': 2}]",
            "test_ranks_with_different_routes_are_refused_before_they_compute[native]",
        ),
        "ranks of one model would compute with different data",
    ),
    Fault(
        "checksum-without-routes",
        "rl_backend.runtime.passes:checksum",
        "for tensor in (batch.seq_lens, batch.input_ids, *recorded):",
        "for tensor in (batch.seq_lens, batch.input_ids):",
        ("test_ranks_with_different_routes_are_refused_before_they_compute[native]",),
        "ranks of one model would route differently",
    ),
    Fault(
        "numbers-of-micro-batches-not-compared",
        "rl_backend.runtime.passes:problem_between_ranks",
        "if most_count != -least_count:",
        "if False:",
        ("test_data_that_one_rank_gets_wrong_is_refused_on_all_within_seconds",),
        "ranks would wait for each other until the collective's time-out",
    ),
    Fault(
        "refusals-of-other-ranks-not-heard",
        "rl_backend.runtime.passes:problem_between_ranks",
        "if last_refusing:",
        "if last_refusing == group.rank() + 1:",
        ("test_data_that_one_rank_gets_wrong_is_refused_on_all_within_seconds",),
        "ranks with right data would wait for one that refused its own",
    ),
    Fault(
        "routes-of-dense-layers-sent",
        "actors.rollout.messages:routes_of",
        "routes[:, list(moe_layers)]",
        "routes[:, : len(moe_layers)]",
        ("test_routes_of_a_response_are_those_of_the_layers_with_experts",),
        "sparse layers would be replayed with a dense layer's zeros",
    ),
    Fault(
        "tenants-do-not-replay-routes",
        "rl_backend.runtime.tenants.tenants:Tenants.run_passes",
        "request = request._replace(adapters=own)",
        'request = request._replace(adapters=own, router_replay="off")',
        ("test_a_tenant_records_and_replays_routes_as_its_base_does",),
        "a tenant would be trained with other experts than it was sampled with",
    ),
    Fault(
        "routes-of-neighbouring-layers-only",
        "rl_backend.runtime.recording:gather_stages",
        "routes[:, torch.tensor(layers, dtype=torch.int64, device=device)] = of_ranks[rank, :, : len(layers)]",
        """
        first = min(layers, default=0)
        routes[:, first : first + len(layers)] = of_ranks[rank, :, : len(layers)]
        """,
        ("test_a_layer_has_its_own_routes_whichever_stages_a_rank_has",),
        "with several stages a rank, layers would have each other's routes",
    ),
    Fault(
        "balancing-by-sequence-is-not-seen",
        "rl_backend.runtime.bridge.passes.routers:require_routing_by_scores",
        'any("aux_loss" in kind for kind in kinds)',
        '"aux_loss" in kinds',
        ("test_what_megatron_routes_differently_with_is_refused_by_name",),
        "Megatron would balance experts that replayed tokens do not go to",
    ),
]
