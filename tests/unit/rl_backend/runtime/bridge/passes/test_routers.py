"""Routes and loads of Megatron's routers: bound to their chunk, taken from their rows, counted without padding."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from rl_backend.contracts import PackedBatch, RoutedLayers, UnsupportedError
from rl_backend.contracts.replay import ROUTES, ROUTES_LAYERS, ROUTES_MASK
from rl_backend.primitive.router import expert_bias_step
from rl_backend.runtime.balance import PassLoads
from rl_backend.runtime.bridge.passes import routers
from rl_backend.runtime.bridge.passes.batch import lay_out_padded
from rl_backend.runtime.bridge.passes.routers import (
    LayerRoutes,
    ModelRouters,
    PassRoutes,
    _sparse,
    connect_routers,
    counted,
    expert_balance,
    require_routing_by_scores,
)

LAYERS = RoutedLayers(num_experts=8, top_k=2, sparse=(True, False, True, True))


def group(rank: int = 0, size: int = 1) -> Any:
    return SimpleNamespace(rank=lambda: rank, size=lambda: size)


def groups(*, pp: Any = None, tp: Any = None, has_outputs: bool = True) -> Any:
    pg = SimpleNamespace(pp=pp or group(), tp=tp or group())
    return SimpleNamespace(pg=pg, device=torch.device("cpu"), has_outputs=has_outputs, dp_group="dp")


def highest(
    scores: Tensor, topk: int, num_groups: int | None = None, group_topk: int | None = None
) -> tuple[Tensor, Tensor]:
    assert (num_groups, group_topk) == (3, 1)
    values, experts = scores.topk(topk, dim=1)
    return values, experts


def test_a_router_takes_what_is_replayed_and_chooses_where_nothing_is() -> None:
    own, seen = LayerRoutes(5), list[Tensor]()
    scores = torch.tensor([[0.1, 0.9, 0.5], [0.7, 0.2, 0.4]])

    def choose() -> tuple[Tensor, Tensor]:
        return own.get_replay_topk(scores, 2, 3, 1, highest)

    values, experts = choose()
    assert experts.tolist() == [[1, 2], [0, 2]] and own.recorded is None and own.layer_number == 5
    own.recording, own.observe = True, seen.append
    own.replayed = torch.tensor([[0, 2], [-1, -1]])
    values, experts = choose()
    assert experts.tolist() == [[0, 2], [0, 2]]
    torch.testing.assert_close(values, torch.tensor([[0.1, 0.5], [0.7, 0.4]]))
    assert own.recorded is experts and seen == [experts]
    own.replayed, own.recording, own.observe = None, False, None
    assert choose()[1].tolist() == [[1, 2], [0, 2]] and own.recorded is experts and len(seen) == 1


class Router(TopKRouter):
    """A router of Megatron's without its weights."""

    def __init__(self, layer_number: int, bias: Tensor | None = None) -> None:
        nn.Module.__init__(self)
        self.layer_number, self.expert_bias = layer_number, bias
        self.enable_expert_bias, self.frozen_expert_bias = True, False


def test_every_router_gets_routes_of_its_own_and_its_place_among_layers_with_experts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    provider = SimpleNamespace(num_moe_experts=8, moe_router_topk=2, moe_layer_freq=[1, 0, 1, 1], num_layers=4)
    models = [nn.Sequential(Router(1), nn.Linear(1, 1)), nn.Sequential(nn.Linear(1, 1), Router(4))]

    def gather(mine: Any, group: Any) -> list[Any]:
        assert group.size() == 2
        return [mine, of_others[0]]

    monkeypatch.setattr(routers, "gather_objects", gather)
    of_others: list[tuple[int, ...]] = [(2,)]
    found = connect_routers(models, provider, groups(pp=group(0, 2)))
    assert found is not None and found.layers == LAYERS
    assert [[each.layer_number for each in chunk] for chunk in found.chunks] == [[1], [4]]
    assert found.places == ((0, 2), (1,))
    for model, chunk in zip(models, found.chunks, strict=True):
        modules: list[Any] = [module for module in model.modules() if isinstance(module, TopKRouter)]
        assert [router.router_replay for router in modules] == list(chunk)
        assert all(not router.enable_expert_bias and router.frozen_expert_bias for router in modules)
    for wrong in ((1,), ()):
        of_others[0] = wrong
        with pytest.raises(UnsupportedError, match=r"routers in the layers \[0.*3\]; moe_layer_freq names \[0, 2, 3\]: "):
            connect_routers(models, provider, groups(pp=group(0, 2)))
    provider.num_moe_experts = None
    assert connect_routers(models, provider, groups()) is None


LENGTHS = (3, 1, 2)
"""Of sequences: 3 rows of 4 columns where they are padded to a multiple of 4."""


def batch(*, mask: bool = False) -> PackedBatch:
    fields = {ROUTES: torch.arange(6 * 4 * 2).view(6, 4, 2) % 8}
    if mask:
        fields[ROUTES_MASK] = torch.tensor([True, True, False, True, True, True])
    return PackedBatch(torch.arange(6), torch.tensor(LENGTHS), meta={ROUTES_LAYERS: "all"}, token_fields=fields)


def routers_of(*chunks: int) -> tuple[LayerRoutes, ...]:
    return tuple(map(LayerRoutes, chunks))


@pytest.mark.parametrize("tp_rank", [0, 1])
def test_a_chunk_replays_the_routes_of_its_layers_in_its_ranks_rows(tp_rank: int) -> None:
    # This rank is the second of the pipeline; its chunks have the first, and the last two layers with experts.
    model = ModelRouters(LAYERS, (routers_of(1), routers_of(3, 4)), ((), (0, 1, 2)))
    given = batch(mask=True)
    laid_out = lay_out_padded(given, 4, mark_padding=False)
    expected = torch.full((4, 3, 3, 2), -1)
    for token, (row, column) in enumerate(((0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1))):
        if token != 2:
            expected[column, row] = given.token_fields[ROUTES][token, [0, 2, 3]]
    mine = expected.flatten(0, 1).chunk(2)[tp_rank]
    with PassRoutes(model, groups(pp=group(1, 2), tp=group(tp_rank, 2)), "replay") as found:
        first, last = [each for chunk in model.chunks for each in chunk][:2], model.chunks[1]
        with found.forward(0, 1, laid_out):
            assert [each.replayed.tolist() for each in last if each.replayed is not None] == [
                mine[:, 1].tolist(),
                mine[:, 2].tolist(),
            ]
            assert first[0].replayed is None and not any(each.recording for each in last)
        with found.forward(0, 0, laid_out):
            assert first[0].replayed is not None and torch.equal(first[0].replayed, mine[:, 0].to(torch.int16))
        output = torch.ones(2, requires_grad=True) * 2
        found.before_backward(1, output)
        # Another micro-batch comes through the chunk before the backward pass.
        found._bind(1, None)
        output.sum().backward()
        assert last[1].replayed is not None and torch.equal(last[1].replayed, mine[:, 2].to(torch.int16))
        assert found.outputs([given]) == {}
    assert all(each.replayed is None for chunk in model.chunks for each in chunk)


@pytest.mark.parametrize("has_outputs", [True, False])
def test_what_a_chunk_chose_is_recorded_once_for_the_tokens_of_each_micro_batch(
    monkeypatch: pytest.MonkeyPatch, has_outputs: bool
) -> None:
    model = ModelRouters(LAYERS, (routers_of(1), routers_of(3, 4)), ((0, 1, 2),))
    laid_out = lay_out_padded(batch(), 4, mark_padding=False)
    whole = torch.arange(3 * 12 * 2).view(3, 12, 2)
    gathered: dict[str, Any] = {}
    monkeypatch.setattr(routers, "gather_rows", lambda rows, tp: rows)
    monkeypatch.setattr(routers, "gather_stages", lambda *args: gathered.update(args=args) or "routes")  # type: ignore[func-returns-value]
    found = PassRoutes(model, groups(has_outputs=has_outputs), "record")
    for chunk, numbers in ((0, [0]), (1, [1, 2])):
        with found.forward(7, chunk, laid_out):
            for each, number in zip(model.chunks[chunk], numbers, strict=True):
                assert each.recording and each.replayed is None
                each.recorded = whole[number]
    with pytest.raises(KeyError), found.forward(8, 1, laid_out):
        raise KeyError
    assert not any(each.recording for chunk in model.chunks for each in chunk)
    assert all(each.recorded is None for each in model.chunks[0])
    output = torch.ones(1, requires_grad=True) * 2
    found.before_backward(0, output)
    assert output._backward_hooks is None
    assert found.outputs([batch()]) == ({"routed_experts": "routes"} if has_outputs else {})
    chosen, data, places, layers, *_ = gathered["args"]
    rows = torch.tensor([0, 3, 6, 1, 2, 5])
    assert chosen.keys() == {(7, 0), (7, 1)} and places is model.places and layers is LAYERS and len(data) == 1
    assert torch.equal(chosen[7, 0], whole[:1, rows].transpose(0, 1).to(torch.uint8))
    assert torch.equal(chosen[7, 1], whole[1:, rows].transpose(0, 1).to(torch.uint8))


def test_without_replay_or_routers_nothing_is_bound() -> None:
    model = ModelRouters(LAYERS, (routers_of(1),), ((0,),))
    laid_out = lay_out_padded(batch(), 4, mark_padding=False)
    for found_routers, mode in ((model, "off"), (None, "replay"), (None, "record")):
        with PassRoutes(found_routers, groups(), mode) as found:  # type: ignore[arg-type]
            with found.forward(0, 0, laid_out):
                assert model.chunks[0][0].replayed is None and not model.chunks[0][0].recording
            found.before_backward(0, torch.ones(1, requires_grad=True) * 2)
            assert found.outputs([]) == {}


def test_loads_are_counted_in_whole_passes_without_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, without = Router(1, torch.zeros(3)), Router(2, torch.zeros(3)), Router(3)
    models = [nn.Sequential(first, without), nn.Sequential(second)]
    for router in (first, second, without):
        router.router_replay = LayerRoutes(router.layer_number)
    added: list[Any] = []

    def sum_over(group: Any) -> Any:
        return lambda counts: added.append((group, counts.tolist()))

    monkeypatch.setattr("rl_backend.runtime.balance.sum_over", sum_over)
    loads = expert_balance(models, 0.25, groups(tp=group(1, 2)))
    assert loads.routers == {0: [first], 1: [second]}
    laid_out = lay_out_padded(batch(), 4, mark_padding=False)
    # This rank has the last two of four columns of three rows: one token, of the first sequence.
    experts = torch.tensor([[0, 1], [2, 2], [2, 2], [1, 1], [0, 0], [1, 1]])
    one = PassLoads(loads)
    for _ in range(2):
        with counted(one, 0, laid_out, group(1, 2)):
            assert second.router_replay.observe is None
            first.router_replay.observe(experts)
    assert first.router_replay.observe is None
    with pytest.raises(KeyError), counted(one, 1, laid_out, group(1, 2)):
        raise KeyError
    assert second.router_replay.observe is None and loads._counts == {}
    one.commit()
    assert {router: counts.tolist() for router, counts in loads._counts.items()} == {first: [2, 2, 0]}
    another = PassLoads(loads)
    with counted(another, 1, laid_out, group(1, 2)):
        second.router_replay.observe(experts + (experts == 0) * 2)
    another.commit()
    PassLoads(loads).commit()
    loads.add({first: torch.tensor([0, 0, 5])})
    loads.step(taken=True)
    # Of all routers at once: those of data-parallel and then those of tensor-parallel ranks.
    assert [counts for _, counts in added] == [[2, 2, 5, 0, 1, 1]] * 2
    assert [each if isinstance(each, str) else each.size() for each, _ in added] == ["dp", 2]
    torch.testing.assert_close(first.expert_bias, expert_bias_step(torch.tensor([2, 2, 5]), 0.25))
    assert first.expert_bias is not None and first.expert_bias.tolist() == [0.25, 0.25, -0.25]
    assert second.expert_bias is not None and second.expert_bias.tolist() == [0.25, -0.25, -0.25]
    # Counted anew; a step that was skipped drops what was counted, and moves nothing.
    loads.add({first: torch.tensor([9, 0, 0])})
    loads.step(taken=False)
    assert loads._counts == {} and len(added) == 2 and first.expert_bias.tolist() == [0.25, 0.25, -0.25]
    loads.add({first: torch.tensor([9, 0, 0])})
    loads.drop()
    loads.step(taken=True)
    assert first.expert_bias.tolist() == [0.25, 0.25, -0.25]
    nothing = PassLoads(None)
    with counted(nothing, 0, laid_out, group(1, 2)):
        assert first.router_replay.observe is None
    nothing.commit()
    expert_balance([nn.Sequential(without)], 0.25, groups()).step(taken=True)
    assert len(added) == 4


def routed(**changes: Any) -> Any:
    settings = {"moe_router_fusion": False, "moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0}
    return SimpleNamespace(**{**settings, **changes})


SEVERAL = {"moe_router_load_balancing_type": ["none", "seq_aux_loss"], "moe_aux_loss_coeff": [0.0, 0.1]}


@pytest.mark.parametrize(
    ("changes", "records", "replays"),
    [
        ({}, "", ""),
        ({"moe_router_load_balancing_type": "aux_loss"}, "", ""),
        ({"moe_aux_loss_coeff": 0.5}, "", ""),
        ({"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.5}, "", "moe_aux_loss_coeff=0.5: Megatron"),
        (SEVERAL, "", r"moe_aux_loss_coeff=\[0\.0, 0\.1\]: Megatron balances"),
        (
            {"moe_router_load_balancing_type": "sinkhorn"},
            "moe_router_load_balancing_type='sinkhorn': it does not",
            "moe_router_load_balancing_type='sinkhorn'",
        ),
        ({"moe_router_fusion": True}, "moe_router_fusion=True: its kernel", "moe_router_fusion=True"),
    ],
)
def test_routes_are_those_of_scores_where_they_are_recorded_or_replayed(
    changes: dict[str, Any], records: str, replays: str
) -> None:
    require_routing_by_scores(routed(**changes), "off")
    for replay, refused in (("record", records), ("replay", replays)):
        if not refused:
            require_routing_by_scores(routed(**changes), replay)  # type: ignore[arg-type]
            continue
        with pytest.raises(UnsupportedError, match=rf"^router_replay='{replay}' with BridgeConfig\..* {refused}") as failure:
            require_routing_by_scores(routed(**changes), replay)  # type: ignore[arg-type]
        assert failure.value.details["router_replay"] == replay
        assert failure.value.details["setting"] == refused.partition("=")[0]


def test_layers_with_experts_are_every_so_many_or_those_of_a_list() -> None:
    assert _sparse(SimpleNamespace(moe_layer_freq=1, num_layers=3)) == (True, True, True)
    assert _sparse(SimpleNamespace(moe_layer_freq=2, num_layers=5)) == (True, False, True, False, True)
    assert _sparse(SimpleNamespace(moe_layer_freq=[0, 1, 1], num_layers=3)) == (False, True, True)
