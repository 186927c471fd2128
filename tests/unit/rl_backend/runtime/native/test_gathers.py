"""What ranks gather: weights out of parts, moments, outputs of stages, routes, and streams that end together."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rl_backend.checkpoint.training_state import TensorPieces
from rl_backend.contracts import (
    ConfigError,
    ExportInterruptedError,
    PackedBatch,
    PackedWeight,
    RoutedLayers,
    UnsupportedError,
)
from rl_backend.parallel.shards import ShardLayout
from rl_backend.runtime.backend_info import optimizer_state
from rl_backend.runtime.export_stream import start_stream
from rl_backend.runtime.native import export
from rl_backend.runtime.native.export import Part, ShardedWeight, gather_weights, sharded_weights
from rl_backend.runtime.native.layout import TensorLayout
from rl_backend.runtime.recording import gather_outputs_of_stages, gather_rows, gather_stages, routes_to_replay
from tests.support.rank_threads import run_ranks

CPU = torch.device("cpu")


def whole(*shape: int, first: float = 0.0) -> Tensor:
    return first + torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def rectangle(*edges: tuple[int, int]) -> tuple[slice, ...]:
    return tuple(slice(*edge) for edge in edges)


WEIGHTS: Mapping[str, tuple[Tensor, tuple[Part, ...]]] = {
    "rows": (
        whole(5, 4),
        (Part(0, rectangle((0, 2), (0, 4))), Part(1, rectangle((2, 4), (0, 4))), Part(2, rectangle((4, 5), (0, 4)))),
    ),
    "columns": (whole(2, 6, first=100), tuple(Part(rank, rectangle((0, 2), (2 * rank, 2 * rank + 2))) for rank in range(3))),
    "turned": (
        whole(6, 2, first=200),
        tuple(Part(rank, rectangle((4 - 2 * rank, 6 - 2 * rank), (0, 2))) for rank in range(3)),
    ),
    "one": (whole(3, 3, first=300), (Part(2, rectangle((0, 3), (0, 3))),)),
    "two": (whole(4, 3, first=400), (Part(0, rectangle((0, 3), (0, 3))), Part(2, rectangle((3, 4), (0, 3))))),
}


def held(name: str, rank: int, dtype: torch.dtype) -> ShardedWeight:
    full, parts = WEIGHTS[name]
    mine = next((full[part.region].clone() for part in parts if part.rank == rank), torch.zeros(0))
    return ShardedWeight(name, tuple(full.shape), dtype, parts, mine, ())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("small", [0, 1 << 16], ids=["by broadcasts", "by one gather"])
@pytest.mark.parametrize("names", [["rows"], ["columns", "rows"], ["one"], ["turned", "one", "two", "rows"]], ids=str)
def test_weights_are_put_together_from_whatever_parts_ranks_have(
    monkeypatch: pytest.MonkeyPatch, names: list[str], small: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(export, "_SMALL_BYTES", small)

    def of_rank(group: dist.ProcessGroup) -> list[tuple[str, Tensor]]:
        weights = [held(name, group.rank(), dtype) for name in names]
        return [(name, tensor.clone()) for name, tensor in gather_weights(weights, group, CPU)]

    for found in run_ranks(of_rank, 3):
        assert [name for name, _ in found] == names
        for name, tensor in found:
            assert tensor.dtype == dtype and torch.equal(tensor, WEIGHTS[name][0].to(dtype)), name


def test_a_tensor_that_is_packed_in_a_parameter_has_its_own_place_parts_and_dtype() -> None:
    # Two ranks have two of four experts each, and a vector that is the first's.
    packed = PackedWeight((4, 2), tuple(f"e{expert}.{part}" for expert in range(4) for part in ("gate", "up")))
    layouts = {
        "experts": TensorLayout(ShardLayout((4, 2, 3, 5), (2,), (0, 1), ((0, 0),)), torch.float32),
        "norm": TensorLayout(ShardLayout((7,), (2,), (0, 1), ()), torch.float32, in_float32=True),
    }
    names: Mapping[str, Any] = {"experts": packed, "norm": "norm.weight"}
    experts = torch.randn(4, 2, 3, 5)
    listed = sharded_weights({"experts": experts}, names, layouts, dtype=torch.bfloat16, only=None)
    assert [each.name for each in listed] == [*packed.names, "norm.weight"]
    up = listed[5]
    assert (up.name, up.shape, up.dtype, up.numel, up.nbytes) == ("e2.up", (3, 5), torch.bfloat16, 15, 30)
    assert up.parts == (Part(1, rectangle((0, 3), (0, 5))),) and torch.equal(up.held(), experts[2, 1])
    norm = listed[-1]
    assert (norm.shape, norm.dtype, norm.parts, norm.tensor) == ((7,), torch.float32, (Part(0, rectangle((0, 7))),), None)
    some = sharded_weights({}, names, layouts, dtype=None, only=["norm.weight", "e3.gate"])
    assert [(each.name, each.dtype) for each in some] == [("e3.gate", torch.float32), ("norm.weight", torch.float32)]
    assert sharded_weights({}, names, layouts, dtype=torch.float64, only=["norm.weight"])[0].dtype == torch.float64


@pytest.mark.parametrize(("first", "taken"), [(0, 0), (0, 1), (1, 2), (1, 5), (0, 6)])
def test_a_stream_that_one_rank_closes_ends_on_all_of_them(first: int, taken: int) -> None:
    def of_rank(group: dist.ProcessGroup) -> tuple[list[int], bool, list[int]]:
        gathered: list[int] = []

        def gather(bucket: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
            for each in bucket:
                x = torch.ones(1)
                dist.all_reduce(x, group=group)
                gathered.append(each)
                yield str(each), x

        stream = start_stream([[0, 1], [2], [3, 4, 5]], gather, group, CPU)
        seen: list[int] = []
        ended = False
        try:
            while group.rank() != first or len(seen) < taken:
                seen.append(int(next(stream)[0]))
        except StopIteration:
            ended = True
        except ExportInterruptedError as error:
            seen += [] if str(error).startswith("another rank closed export_weights before its end") else [-1]
        stream.close()
        return seen, ended, gathered

    found = run_ranks(of_rank)
    closing, other = found[first], found[1 - first]
    # The bucket that was begun is gathered to its end everywhere, and no other.
    begun = {0: [], 1: [0, 1], 2: [0, 1], 5: [0, 1, 2, 3, 4, 5], 6: [0, 1, 2, 3, 4, 5]}[taken]
    assert closing == (list(range(taken)), False, begun)
    assert other == (begun, False, begun)


def test_streams_that_nobody_closes_end_on_all_ranks() -> None:
    def of_rank(group: dist.ProcessGroup) -> list[str]:
        return [
            name for name, _ in start_stream([["a"], ["b"]], lambda bucket: iter([(bucket[0], torch.ones(1))]), group, CPU)
        ]

    assert run_ranks(of_rank, 3) == [["a", "b"]] * 3


def optimizer_of(pieces: Mapping[str, Any], group: dist.ProcessGroup) -> Any:
    shapes = {"b": (2, 3), "a": (4,), "frozen": (9,)}
    trained = SimpleNamespace(num_steps=5, learning_rate=0.25)
    handle: Any = SimpleNamespace(trainer=trained, groups=SimpleNamespace(host_group=group), saved_shapes=shapes)
    return optimizer_state(handle, pieces)


def test_moments_are_put_together_once_from_the_pieces_that_ranks_write() -> None:
    def of_rank(group: dist.ProcessGroup) -> Any:
        rank = group.rank()
        squares = TensorPieces(
            (2, 3), {(0, rank): whole(2, 3)[:, rank : rank + 1], (rank, 2): whole(2, 3)[rank : rank + 1, 2:]}
        )
        return optimizer_of(
            {
                "optimizer.exp_avg.a": TensorPieces((4,), {(0,): whole(4).to(torch.bfloat16)}, writes=rank == 1),
                "optimizer.exp_avg_sq.b": squares,
                "optimizer.step": torch.zeros(()),
                "model.a": TensorPieces((4,), {(0,): torch.full((4,), 7.0)}),
            },
            group,
        )

    for state in run_ranks(of_rank):
        assert (state.step, state.learning_rate) == (5, 0.25)
        assert list(state.exp_avg) == ["a"] and torch.equal(state.exp_avg["a"], whole(4))
        assert list(state.exp_avg_sq) == ["b"] and torch.equal(state.exp_avg_sq["b"], whole(2, 3))


def test_moments_of_parameters_that_are_no_tensors_of_the_model_are_refused_on_all_ranks() -> None:
    def of_rank(group: dist.ProcessGroup) -> str:
        names = [f"optimizer.exp_avg.flat{number}" for number in range(6)] if group.rank() else []
        with pytest.raises(UnsupportedError) as caught:
            optimizer_of({name: TensorPieces((1,), {}) for name in names}, group)
        return str(caught.value)

    first, second = run_ranks(of_rank)
    assert "(on other ranks); use backend='native'" in first
    assert "(optimizer.exp_avg.flat0, optimizer.exp_avg.flat1, optimizer.exp_avg.flat2, optimizer.exp_avg.flat3)" in second


def test_outputs_of_stages_come_by_micro_batch_in_the_order_of_the_stages() -> None:
    def of_rank(group: dist.ProcessGroup) -> list[list[tuple[str, float]]]:
        # Rank 0 has the stages 0 and 3, rank 1 those between.
        stages = (3, 0) if group.rank() == 0 else (1, 2)
        here = {
            (micro_batch, stage): {f"{stage}{part}": torch.tensor(10.0 * micro_batch + stage) for part in "ba"}
            for stage, micro_batch in itertools.product(stages, (1, 0))
        }
        found = gather_outputs_of_stages(here, 3, group)
        return [[(name, value.item()) for name, value in outputs.items()] for outputs in found]

    expected = [[(f"{stage}{part}", 10.0 * index + stage) for stage in range(4) for part in "ba"] for index in range(2)]
    assert run_ranks(of_rank) == [[*expected, []]] * 2
    alone: Any = SimpleNamespace(size=lambda: 1)
    assert gather_outputs_of_stages({(1, 0): {"x": torch.ones(1)}}, 2, alone) == [{}, {"x": torch.ones(1)}]


@pytest.mark.parametrize("num_experts", [9, 300, 40000])
def test_routes_of_ranks_and_of_stages_are_those_of_every_layer(num_experts: int) -> None:
    routers = RoutedLayers(num_experts=num_experts, top_k=2, sparse=(True, False, True, True))
    data = [PackedBatch(torch.arange(3), torch.tensor([2, 1])), PackedBatch(torch.arange(2), torch.tensor([2]))]
    full = (torch.arange(5 * 3 * 2).view(5, 3, 2) + num_experts - 30).to(routers.dtype)
    places = [[2], [0, 1]]

    def of_rank(group: dist.ProcessGroup) -> tuple[Tensor, list[Tensor]]:
        mine = full[:, places[group.rank()]]
        chosen = {(1, 7): mine[3:], (0, 7): mine[:3]}
        return gather_rows(full[group.rank() :: 2][:2], group), gather_stages(chosen, data, places, routers, group, CPU)

    for rows, stages in run_ranks(of_rank):
        assert torch.equal(rows, full[[0, 2, 1, 3]]) and rows.dtype == routers.dtype
        assert [len(each) for each in stages] == [2, 1, 2] and torch.equal(torch.cat(stages), full)


@pytest.mark.parametrize(("num_experts", "dtype"), [(256, torch.int16), (257, torch.int16), (40000, torch.int32)], ids=str)
def test_tokens_without_routes_are_marked_whatever_the_type_of_the_routes(num_experts: int, dtype: torch.dtype) -> None:
    routers = RoutedLayers(num_experts=num_experts, top_k=1, sparse=(True, True))
    routes = torch.full((3, 2, 1), num_experts - 1).to(routers.dtype)
    facts = {"routed_experts_layers": "moe"}
    masked = {"routed_experts": routes, "routed_experts_mask": torch.tensor([True, False, True])}
    found = routes_to_replay(PackedBatch(torch.arange(3), torch.tensor([3]), masked, meta=facts), routers)
    last = num_experts - 1
    assert found.dtype == dtype and found[..., 0].tolist() == [[last, last], [-1, -1], [last, last]]
    whole_batch = PackedBatch(torch.arange(3), torch.tensor([3]), {"routed_experts": routes}, meta=facts)
    assert bool((routes_to_replay(whole_batch, routers) == last).all()) and bool((routes == routes[0]).all())


def test_rows_of_which_a_rank_between_has_fewer_are_put_together_without_what_fills_its_buffer() -> None:
    full = whole(5, 4)
    parts = tuple(Part(rank, rectangle(rows, (0, 4))) for rank, rows in enumerate([(0, 2), (2, 3), (3, 5)]))

    def of_rank(group: dist.ProcessGroup) -> Tensor:
        mine = full[parts[group.rank()].region].clone()
        ((_, found),) = gather_weights([ShardedWeight("uneven", (5, 4), torch.float32, parts, mine, ())], group, CPU)
        return found.clone()

    assert all(torch.equal(found, full) for found in run_ranks(of_rank, 3))


def test_gradients_are_those_of_parameters_that_have_one_and_of_the_names_asked_for() -> None:
    packed = PackedWeight((2,), ("e.0", "e.1"))
    names: Mapping[str, Any] = {"experts": packed, "frozen": "frozen.weight", "late": "late.weight"}
    shapes = {"experts": (2, 3), "frozen": (4,), "late": (2, 2)}
    parameters = {name: torch.nn.Parameter(torch.ones(shape, dtype=torch.bfloat16)) for name, shape in shapes.items()}
    parameters["experts"].grad = whole(2, 3).to(torch.bfloat16)
    parameters["late"].grad = whole(2, 2, first=10).to(torch.bfloat16)
    alone: Any = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    required: list[str] = []
    handle: Any = SimpleNamespace(
        weight_names=names,
        parameters=parameters,
        layouts={name: TensorLayout(ShardLayout(shape, (), (0,), ()), torch.bfloat16) for name, shape in shapes.items()},
        groups=SimpleNamespace(device=CPU, world_size=1, world_group=alone),
        require_gradients=required.append,
    )

    def exported(only: Any = None) -> dict[str, Tensor]:
        found = dict(export.export_gradients(handle, only))
        assert all(gradient.dtype == torch.float32 for gradient in found.values())
        return found

    found = exported()
    assert list(found) == ["e.0", "e.1", "late.weight"] and required == []
    assert torch.equal(found["e.1"], whole(2, 3)[1]) and torch.equal(found["late.weight"], whole(2, 2, first=10))
    assert list(exported(["late.weight", "e.0"])) == ["e.0", "late.weight"]
    assert exported(["frozen.weight"]) == {} and exported([]) == {}
    with pytest.raises(ConfigError, match="export_gradients: the model has no weights called experts"):
        export.export_gradients(handle, ["experts"])
    for parameter in parameters.values():
        parameter.grad = None
    assert exported() == {} and required == ["export_gradients"]
