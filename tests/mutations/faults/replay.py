"""Routes: recorded, checked, replayed."""

from __future__ import annotations

from tests.mutations.fault import Fault

_REPLAY = "tests/distributed/test_router_replay.py"
_ROUTED = "tests/unit/rl_backend/runtime/test_routed_experts.py"

FAULTS = [
    Fault(
        "masked-tokens-are-replayed",
        "rl_backend/runtime/router_replay.py",
        "return signed if mask is None else signed.masked_fill(~mask.view(-1, 1, 1), -1)",
        "return signed",
        (f"{_ROUTED}::test_routes_matter_and_masked_tokens_follow_their_router",),
        "the last token would go to expert 0",
    ),
    Fault(
        "layers-recorded-in-reverse",
        "rl_backend/runtime/native/routes.py",
        "            chosen.append(routing.experts.to(recorded.dtype))\n",
        "            chosen.insert(0, routing.experts.to(recorded.dtype))\n",
        (f"{_REPLAY}::test_one_rank_replays_what_every_layout_recorded[native dp2]",),
        "layers would have each other's routes",
    ),
    Fault(
        "stages-in-the-order-of-the-ranks",
        "rl_backend/runtime/router_replay.py",
        "routes[:, torch.tensor(layers, dtype=torch.int64, device=device)] = of_ranks[rank, :, : len(layers)]",
        "routes[:, len(layers) * rank : len(layers) * (rank + 1)] = of_ranks[rank, :, : len(layers)]",
        (f"{_REPLAY}::test_one_rank_replays_what_every_layout_recorded[native zbv, recomputed]",),
        "layers of a V would have each other's routes",
    ),
    Fault(
        "routes-of-other-weights-accepted",
        "rl_backend/contracts/routed_experts.py",
        "    if differ:\n        first = differ[0]\n",
        "    if False:\n        first = differ[0]\n",
        (f"{_ROUTED}::test_routes_that_are_not_of_this_model_are_refused",),
        "a replay would follow a router that no longer exists",
    ),
    Fault(
        "experts-that-do-not-exist-accepted",
        "rl_backend/contracts/routed_experts.py",
        "    if least < 0 or most >= num_experts:\n",
        "    if least < 0 or most > num_experts:\n",
        (f"{_ROUTED}::test_routes_that_are_not_of_this_model_are_refused",),
        "a route one beyond the last expert would reach a kernel",
    ),
    Fault(
        "an-expert-twice-accepted",
        "rl_backend/contracts/routed_experts.py",
        "    if repeats and bool(torch.stack(repeats).any()):\n",
        "    if repeats and bool(torch.stack(repeats).all()):\n",
        (f"{_ROUTED}::test_an_expert_is_found_twice_wherever_it_stands",),
        "one expert would count twice",
    ),
    Fault(
        "dense-layers-count-as-sparse",
        "rl_backend/contracts/routed_experts.py",
        "            routes = routes[:, torch.tensor(self.layers, device=routes.device)]\n",
        "            routes = routes[:, : len(self.layers)]\n",
        (f"{_ROUTED}::test_layers_may_be_counted_with_or_without_dense_ones",),
        "vLLM's rows would be taken by the wrong layers",
    ),
    Fault(
        "a-rollouts-last-row-counts",
        "rl_backend/contracts/routed_experts.py",
        "torch.arange(num_tokens, device=routes.device) < routes.shape[0]}",
        "torch.arange(num_tokens, device=routes.device) <= routes.shape[0]}",
        (f"{_ROUTED}::test_a_rollouts_routes_lack_the_last_token",),
        "the last token would be replayed with zeros",
    ),
    Fault(
        "replica-not-compared",
        "rl_backend/runtime/batch_checks.py",
        "return None if largest == -smallest else different_in_replica()",
        "return None",
        (
            "tests/distributed/test_bridge_layouts.py::test_other_data_on_a_rank_of_the_same_replica_is_refused[{'tp': 2}]",
            f"{_REPLAY}::test_ranks_with_different_routes_are_refused_before_they_compute[native]",
        ),
        "ranks of one model would compute with different data",
    ),
    Fault(
        "checksum-without-routes",
        "rl_backend/runtime/batch_checks.py",
        "for tensor in (batch.seq_lens, batch.input_ids, *recorded):",
        "for tensor in (batch.seq_lens, batch.input_ids):",
        (f"{_REPLAY}::test_ranks_with_different_routes_are_refused_before_they_compute[native]",),
        "ranks of one model would route differently",
    ),
    Fault(
        "numbers-of-micro-batches-not-compared",
        "rl_backend/runtime/batch_checks.py",
        "    if most_count != -least_count:\n",
        "    if False:\n",
        ("tests/distributed/test_failures.py::test_data_that_one_rank_gets_wrong_is_refused_on_all_within_seconds",),
        "ranks would wait for each other until the collective's time-out",
    ),
    Fault(
        "refusals-of-other-ranks-not-heard",
        "rl_backend/runtime/batch_checks.py",
        "    if last_refusing:\n",
        "    if last_refusing == group.rank() + 1:\n",
        ("tests/distributed/test_failures.py::test_data_that_one_rank_gets_wrong_is_refused_on_all_within_seconds",),
        "ranks with right data would wait for one that refused its own",
    ),
    Fault(
        "routes-of-samples-begin-at-the-first-again",
        "actors/rollout/sample.py",
        "ends = np.cumsum([length - 1 for length in lengths])",
        "ends = np.cumsum([length for length in lengths])",
        (
            "tests/unit/actors/rollout/test_routes.py::test_routes_of_several_samples_travel_as_one_array_without_the_dense_layers",
        ),
        "samples would have the first rows of the next",
    ),
    Fault(
        "routes-of-dense-layers-sent",
        "actors/rollout/sample.py",
        "parts.append(routes[:, list(moe_layers)])",
        "parts.append(routes[:, : len(moe_layers)])",
        (
            "tests/unit/actors/rollout/test_routes.py::test_routes_of_several_samples_travel_as_one_array_without_the_dense_layers",
        ),
        "sparse layers would be replayed with a dense layer's zeros",
    ),
]
