"""What a pass gives Megatron and watches, and the gradients of several passes."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rl_backend.contracts import PackedBatch
from rl_backend.primitive.adapters import AdapterRun
from rl_backend.runtime.bridge.engine import forward_backward
from rl_backend.runtime.bridge.passes import gradients
from rl_backend.runtime.bridge.passes.batch import (
    LaidOut,
    lay_out_padded,
)
from rl_backend.runtime.passes import PassRequest

LENGTHS = (3, 1, 4)


def packed(**meta: Any) -> PackedBatch:
    return PackedBatch(torch.arange(10, 18), torch.tensor(LENGTHS), meta=meta)


def groups(rank: int = 0, size: int = 1) -> Any:
    return SimpleNamespace(pg=SimpleNamespace(tp=SimpleNamespace(rank=lambda: rank, size=lambda: size)))


def handle_of(**changes: Any) -> Any:
    provider = SimpleNamespace(
        sequence_parallel=False, num_moe_experts=None, moe_router_load_balancing_type="none", moe_z_loss_coeff=None
    )
    parallel = SimpleNamespace(tp=5, pp=1, vpp=1)
    made = {
        "groups": SimpleNamespace(parallel=parallel, device=torch.device("cpu")),
        "head": "values",
        "packs_sequences": False,
    }
    for name, value in changes.items():
        if hasattr(provider, name):
            setattr(provider, name, value)
        else:
            made[name] = value
    return SimpleNamespace(provider=provider, **made)


@pytest.mark.parametrize(
    ("changes", "marked", "columns"),
    [
        ({}, False, 4),
        ({"sequence_parallel": True}, False, 5),
        ({"num_moe_experts": 8}, False, 4),
        ({"num_moe_experts": 8, "moe_z_loss_coeff": 0.0}, True, 4),
        ({"num_moe_experts": 8, "moe_router_load_balancing_type": "aux_loss"}, True, 4),
        ({"moe_router_load_balancing_type": "aux_loss", "moe_z_loss_coeff": 0.1}, False, 4),
        ({"packs_sequences": True, "sequence_parallel": True}, False, 10),
    ],
    ids=str,
)
def test_padding_is_marked_for_what_balances_experts_and_columns_divide(
    changes: dict[str, Any], marked: bool, columns: int
) -> None:
    (found,) = forward_backward.lay_out(handle_of(**changes), PassRequest([packed()], None, forward_only=True))
    assert ("padding_mask" in found.inputs) is marked
    assert found.shape == ((1, columns) if changes.get("packs_sequences") else (3, columns))
    assert found.heads == ("values",) and found.segments is None


def test_adapters_of_a_pass_decide_its_heads_and_come_with_its_sequences() -> None:
    asked: list[Any] = []

    def runs(index: int, batch: PackedBatch, rows: Any) -> tuple[AdapterRun, ...]:
        asked.append((index, rows))
        return (AdapterRun(index, 3, {}),)

    adapters: Any = SimpleNamespace(heads=("log_probs", "values"), runs=runs)
    request = PassRequest([packed(), packed()], None, forward_only=True, adapters=adapters)
    found = forward_backward.lay_out(handle_of(), request)
    assert asked == [(0, [3, 1, 4]), (1, [3, 1, 4])]
    assert [each.adapters[0].start for each in found] == [0, 1]
    for each in found:
        assert each.heads == ("log_probs", "values") and each.segments is not None
        assert each.segments.query_lens == LENGTHS and each.segments.cu_queries.tolist() == [0, 3, 4, 8]


def test_a_padding_mask_is_split_for_chunks_behind_the_first_stage() -> None:
    mask = torch.arange(12).view(2, 6)
    laid_out: Any = SimpleNamespace(inputs={"padding_mask": mask, "input_ids": "ids"})
    handle: Any = SimpleNamespace(groups=groups(1, 3))
    first, later = (SimpleNamespace(pre_process=is_first) for is_first in (True, False))
    assert forward_backward._chunk_inputs(handle, first, laid_out) is laid_out.inputs
    found = forward_backward._chunk_inputs(handle, later, laid_out)
    assert found["input_ids"] == "ids" and found["padding_mask"].tolist() == [[2, 3], [8, 9]]
    assert laid_out.inputs["padding_mask"] is mask
    without: Any = SimpleNamespace(inputs={"input_ids": "ids"})
    assert forward_backward._chunk_inputs(handle, later, without) is without.inputs


@pytest.mark.parametrize("adapted", [True, False])
def test_a_step_runs_the_chunk_it_is_given_inside_of_everything_that_watches(
    adapted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Any] = []

    @contextmanager
    def watched(*what: Any) -> Any:
        events.append(("in", *what))
        yield
        events.append(("out", what[0]))

    def chunk(number: int) -> Any:
        def run(**inputs: Any) -> Tensor:
            events.append(("run", number, sorted(inputs), inputs["output_processor_context"]))
            return torch.full((2,), float(number))

        return run

    chunks = [chunk(0), chunk(1)]
    for each in chunks:
        each.pre_process = True
    adapters = [
        SimpleNamespace(
            forward=lambda laid_out, number=number: watched("adapters", number),
            before_backward=lambda laid_out, output, number=number: events.append(("adapters back", number)),
        )
        for number in range(2)
    ]
    handle: Any = SimpleNamespace(
        chunks=chunks,
        processor="processor",
        adapters=adapters if adapted else (),
        groups=SimpleNamespace(device=torch.device("cpu"), pg=SimpleNamespace(tp="tp")),
    )
    losses = iter([torch.tensor(3.0), None])
    results: Any = SimpleNamespace(add=lambda index, batch, output: (events.append(("add", index)), next(losses))[1])
    routes: Any = SimpleNamespace(
        forward=lambda index, number, laid_out: watched("routes", index, number),
        before_backward=lambda number, output: events.append(("routes back", number)),
    )
    loads: Any = "loads"
    monkeypatch.setattr(forward_backward, "counted", lambda loads, number, laid_out, tp: watched(loads, number))
    step = forward_backward._forward_step(
        handle, 4, results, lambda index, number, laid_out: watched("observe", index, number), routes, loads
    )
    runs = (AdapterRun(0, 8, {}),) if adapted else ()
    laid_out = LaidOut(packed(), {"input_ids": "ids"}, (3, 4), torch.arange(8), ("values",), runs)
    output, compute_loss = step(iter([(6, laid_out)]), chunks[1])
    assert output.tolist() == [1.0, 1.0]
    inside = [("in", "observe", 6, 1), ("in", "routes", 6, 1), ("in", "loads", 1)]
    inside += [("in", "adapters", 1)] if adapted else []
    assert events[: len(inside)] == inside
    assert events[len(inside)] == ("run", 1, ["input_ids", "output_processor", "output_processor_context"], laid_out)
    back = [("routes back", 1), ("adapters back", 1)] if adapted else [("routes back", 1)]
    assert events[len(inside) + 1 : len(inside) + 1 + len(back)] == back
    assert [each[1] for each in events if each[0] == "out"] == [each[1] for each in reversed(inside)]
    # Megatron divides the sum by the four micro-batches of the pass; without a loss there is nothing to add.
    assert compute_loss(torch.ones(1, 8))[0].item() == 12.0 and events[-1] == ("add", 6)
    nothing, metrics = compute_loss(torch.ones(1, 8, dtype=torch.float64))
    assert (nothing.shape, nothing.dtype, nothing.item(), metrics) == ((), torch.float64, 0.0, {})


def bucket(data: Tensor, rank: int, size: int) -> Any:
    group = SimpleNamespace(rank=lambda: rank, size=lambda: size)
    return SimpleNamespace(intra_distributed_optimizer_instance_group=group, buckets=[SimpleNamespace(grad_data=data)])


def chunk_of(dense: list[Any], experts: list[Any]) -> Any:
    made = SimpleNamespace(bucket_groups=dense, expert_parallel_bucket_groups=experts)
    every = [each.buckets[0].grad_data for each in (*dense, *experts)]
    made.zero_grad_buffer = lambda: [data.zero_() for data in every]
    return made


def test_gradients_of_earlier_passes_are_set_aside_and_added_to_this_ranks_parts() -> None:
    first, second, experts = torch.arange(6.0), torch.arange(4.0) + 10, torch.arange(2.0) + 20
    chunks = [chunk_of([bucket(first, 1, 3)], []), chunk_of([bucket(second, 0, 2)], [bucket(experts, 0, 1)])]
    with gradients.accumulated_gradients(chunks, has_gradients=False):
        assert first.tolist() == [0, 1, 2, 3, 4, 5]
    assert first.tolist() == [0, 1, 2, 3, 4, 5] and second.tolist() == [10, 11, 12, 13]
    with gradients.accumulated_gradients(chunks, has_gradients=True):
        assert not any(data.any() for data in (first, second, experts))
        for data in (first, second, experts):
            data += 100
    assert first.tolist() == [100, 100, 102, 103, 100, 100]
    assert second.tolist() == [110, 111, 100, 100] and experts.tolist() == [120, 121]


def test_whole_gradients_are_gathered_into_the_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered: list[Any] = []

    def gather(whole: Tensor, part: Tensor, group: Any) -> None:
        gathered.append((part.tolist(), group.size()))
        assert part.data_ptr() != whole.data_ptr()
        whole.copy_(torch.cat([part + 10 * rank for rank in range(group.size())]))

    monkeypatch.setattr(gradients, "all_gather_into", gather)
    data, alone = torch.arange(4.0), torch.arange(2.0)
    models = [nn.Linear(2, 1, bias=False), nn.Linear(2, 1)]
    for model in models:
        for parameter in model.parameters():
            parameter.main_grad = torch.full_like(parameter, len(gathered))  # type: ignore[attr-defined]
    monkeypatch.setattr(gradients, "unwrap_model", lambda chunks: models)
    chunks = [chunk_of([bucket(data, 1, 2)], []), chunk_of([bucket(alone, 0, 1)], [])]
    found = gradients.gather_gradients(chunks)
    assert gathered == [([2.0, 3.0], 2)] and data.tolist() == [2, 3, 12, 13] and alone.tolist() == [0, 1]
    assert list(found) == ["0.weight", "1.weight", "1.bias"]
    assert found["1.bias"] is models[1].bias.main_grad  # type: ignore[attr-defined]


def test_outputs_of_modules_are_packed_where_their_rows_are_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    laid_out = lay_out_padded(packed(), 1, mark_padding=False)
    whole = torch.arange(4 * 3 * 2).view(4, 3, 2).to(torch.float64)
    monkeypatch.setattr(forward_backward, "gather_rows", lambda rows, group: torch.cat((rows, rows + 1)))
    tp: Any = groups(0, 2).pg.tp
    found = forward_backward._pack_output(whole, laid_out, tp)
    assert found is not None and found.dtype == torch.float32 and torch.equal(found, laid_out.pack(whole).float())
    half = forward_backward._pack_output(whole[:2], laid_out, tp)
    assert half is not None and torch.equal(half, laid_out.pack(torch.cat((whole[:2], whole[:2] + 1))).float())
    for other in (whole[:, :2], whole[:3], whole[0], whole[None], whole[:1]):
        assert forward_backward._pack_output(other, laid_out, tp) is None


@pytest.mark.parametrize(("tp", "sequence_parallel", "columns"), [(1, False, 4), (2, True, 2), (2, False, 4), (4, True, 1)])
def test_between_stages_a_rank_sends_its_part_of_the_columns(
    monkeypatch: pytest.MonkeyPatch, tp: int, sequence_parallel: bool, columns: int
) -> None:
    monkeypatch.setattr(forward_backward, "KnownShapes", lambda *given: given)
    monkeypatch.setattr(forward_backward, "get_model_config", lambda chunk: f"config of {chunk}")
    handle: Any = SimpleNamespace(
        groups=SimpleNamespace(parallel=SimpleNamespace(tp=tp), pg=SimpleNamespace(pp="stages")),
        provider=SimpleNamespace(sequence_parallel=sequence_parallel, hidden_size=6),
        chunks=["first", "second"],
    )
    laid_out: list[Any] = [SimpleNamespace(shape=(3, 4)), SimpleNamespace(shape=(1, 8))]
    found: Any = forward_backward._transfers(handle, laid_out)
    assert found == ("stages", "config of first", [(columns, 3, 6), (2 * columns, 1, 6)], 2)
