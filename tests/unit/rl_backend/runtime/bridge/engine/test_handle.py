"""What a bridge handle does with Megatron's chunks and optimizer, told by stand-ins that write everything down."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rl_backend.contracts import AdamParams, BatchError, StepResult
from rl_backend.runtime.bridge.engine import handle as module
from rl_backend.runtime.bridge.engine.handle import BridgeHandle
from rl_backend.runtime.bridge.passes.gradients import drop_reductions, gather_again, wait_for_gathers


class Chunk(nn.Module):
    """A chunk that writes down what it is told."""

    def __init__(self, told: list[Any], name: str, *, overlaps: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.ddp_config = SimpleNamespace(overlap_param_gather=overlaps)
        self.buffers_of = [SimpleNamespace(grad_data=torch.zeros(3)), SimpleNamespace(grad_data=torch.zeros(5))]
        self.bucket_groups: list[Any] = []
        self.expert_parallel_bucket_groups: list[Any] = []
        self.expert_parallel_buffers = [SimpleNamespace(grad_data=torch.zeros(7))]
        for call in ("zero_grad_buffer", "free_overlap_buffers", "reset_param_sync_dispatch_state", "start_param_sync"):
            setattr(self, call, lambda call=call, **options: told.append((name, call, options)))
        self.buffers = self.buffers_of  # type: ignore[assignment]


def handle_of(chunks: Any = (), **fields: Any) -> Any:
    made = object.__new__(BridgeHandle)
    settings = {"chunks": chunks, "name": "actor", "optimizer": None, "has_gradients": False, "base": None, **fields}
    for name, value in settings.items():
        setattr(made, name, value)
    return made


def reduction(finished: bool, *, handle: bool, waited: list[str], name: str) -> Any:
    work = SimpleNamespace(wait=lambda: waited.append(name)) if handle else None
    return SimpleNamespace(grad_reduce_finished=finished, grad_reduce_handle=work, per_param_grad_ready_counts={"a": 1})


def test_reductions_that_have_not_finished_are_ended_and_forgotten() -> None:
    waited: list[str] = []
    first, second = Chunk([], "0"), Chunk([], "1")
    first.bucket_groups = [
        reduction(True, handle=True, waited=waited, name="finished"),
        reduction(False, handle=True, waited=waited, name="running"),
    ]
    second.bucket_groups = [reduction(False, handle=False, waited=waited, name="not begun")]
    second.expert_parallel_bucket_groups = [reduction(False, handle=True, waited=waited, name="of experts")]
    drop_reductions([first, second])
    assert waited == ["running", "of experts"]
    finished, running = first.bucket_groups
    assert finished.grad_reduce_handle is not None and finished.per_param_grad_ready_counts == {"a": 1}
    for group in (running, *second.bucket_groups, *second.expert_parallel_bucket_groups):
        assert group.grad_reduce_handle is None and group.per_param_grad_ready_counts == {}


def test_only_chunks_that_overlap_their_gathers_wait_for_them_and_gather_again() -> None:
    told: list[Any] = []
    chunks = [Chunk(told, "plain"), Chunk(told, "first", overlaps=True), Chunk(told, "second", overlaps=True)]
    wait_for_gathers(chunks)
    gather_again(chunks)
    calls = ("free_overlap_buffers", "reset_param_sync_dispatch_state")
    assert told == [(name, call, {}) for call in calls for name in ("first", "second")]
    told.clear()
    handle_of(chunks).finish_parameter_gathers()
    assert told == []
    handle_of(chunks, optimizer="some").finish_parameter_gathers()
    assert told == [(name, "start_param_sync", {"force_sync": True}) for name in ("first", "second")]


@pytest.mark.parametrize("ok", [True, False])
def test_a_step_waits_before_it_writes_and_gathers_only_what_was_written(ok: bool) -> None:
    told: list[Any] = []
    result = StepResult(ok, 1.0, None)

    def step(name: str, adam: Any) -> StepResult:
        told.append((name, adam))
        return result

    chunks = [Chunk(told, name, overlaps=True) for name in "01"]
    made = handle_of(chunks, optimizer=SimpleNamespace(step=step), has_gradients=True)
    made.forward_only = False
    adam = AdamParams(lr=0.5)
    assert made.step(adam) is result
    waited, written = (
        [(name, call, {}) for name in "01"] for call in ("free_overlap_buffers", "reset_param_sync_dispatch_state")
    )
    assert told == [*waited, ("actor", adam), *(written if ok else [])]


def test_dropping_gradients_clears_buffers_masters_and_loads_of_every_chunk() -> None:
    told: list[Any] = []
    chunks = [Chunk(told, "0"), Chunk(told, "1")]
    waited: list[str] = []
    chunks[1].bucket_groups = [reduction(False, handle=True, waited=waited, name="running")]
    balance = SimpleNamespace(drop=lambda: told.append("balance"))
    trained = SimpleNamespace(megatron=SimpleNamespace(zero_grad=lambda: told.append("masters")), balance=balance)
    made = handle_of(chunks, optimizer=trained, has_gradients=True)
    made.offload = SimpleNamespace(clear=lambda part: told.append(part))
    made.forward_only = False
    made.drop_gradients()
    assert told == ["grad", ("0", "zero_grad_buffer", {}), ("1", "zero_grad_buffer", {}), "masters", "balance"]
    assert waited == ["running"] and made.has_gradients is False
    trained.balance = None
    made.drop_gradients()
    assert told.count("balance") == 1
    # A pass with gradients counts towards the biases of routers.
    trained.balance = balance
    assert made.pass_loads(forward_only=False)._balance is balance
    assert made.pass_loads(forward_only=True)._balance is None
    made.optimizer = None
    assert made.pass_loads(forward_only=False)._balance is None


def test_the_parts_of_a_handle_are_all_its_chunks_and_no_tensor_is_in_two() -> None:
    chunks = [Chunk([], "0"), Chunk([], "1")]
    views = [chunk.weight.detach().view(-1) for chunk in chunks]
    moments = [torch.zeros(2), torch.zeros(2, requires_grad=True)]
    trained = SimpleNamespace(held_tensors=lambda: iter([views[0], moments[0], views[1], moments[1]]))
    parts = handle_of(chunks, optimizer=trained).part_tensors()
    assert [tensor.data_ptr() for tensor in parts["model"]] == [chunk.weight.data_ptr() for chunk in chunks]
    assert [len(tensor) for tensor in parts["grad"]] == [3, 5, 7] * 2
    assert [tensor.data_ptr() for tensor in parts["optimizer"]] == [tensor.data_ptr() for tensor in moments]
    assert not any(tensor.requires_grad for tensors in parts.values() for tensor in tensors)
    assert handle_of(chunks).part_tensors().keys() == {"model"}


@pytest.mark.parametrize(
    ("multiple", "pp", "vpp", "taken", "refused"),
    [(1, 1, 1, (1, 2, 7), ()), (1, 4, 1, (1, 3), ()), (4, 4, 2, (4, 8), (1, 5, 7)), (6, 4, 2, (4, 5, 6, 10, 12), (1, 3, 9))],
)
def test_an_interleaved_schedule_takes_groups_whose_last_fills_the_pipeline(
    multiple: int, pp: int, vpp: int, taken: tuple[int, ...], refused: tuple[int, ...]
) -> None:
    parallel = SimpleNamespace(pp=pp, vpp=vpp)
    made = handle_of(micro_batch_multiple=multiple, groups=SimpleNamespace(parallel=parallel))
    for count in taken:
        made.require_schedulable(count, forward_only=False)
    for count in refused:
        with pytest.raises(
            BatchError, match=rf"^{count} micro-batches with pp={pp} and vpp={vpp}: .*groups of {multiple}, and"
        ):
            made.require_schedulable(count, forward_only=True)


def test_weights_of_all_conversions_are_listed_with_their_dtypes() -> None:
    first = SimpleNamespace(shapes={"q": (4, 2), "k": (2, 2)}, dtype=torch.bfloat16, in_float32=False)
    second = SimpleNamespace(shapes={"A_log": (3,)}, dtype=torch.float32, in_float32=True)
    made = handle_of(converter=SimpleNamespace(conversions=(first, second)))
    assert [(info.name, tuple(info.shape), info.dtype) for info in made.weights] == [
        ("q", (4, 2), "bfloat16"),
        ("k", (2, 2), "bfloat16"),
        ("A_log", (3,), "float32"),
    ]
    assert made.in_float32 == {"A_log"}


@pytest.mark.parametrize("count", [1, 2])
def test_overlap_gives_megatrons_schedules_what_every_chunk_offers(count: int) -> None:
    class Wrapped(nn.Module):
        no_sync, start_param_sync = "no sync", "gather"

    functions = {"no_sync_func": "no sync", "param_sync_func": "gather"}
    for reduces, gathers, aligned in ((False, False, False), (True, False, True), (True, True, False), (True, True, True)):
        provider, chunks = SimpleNamespace(qk_layernorm=True), [Wrapped() for _ in range(count)]
        config = SimpleNamespace(overlap_grad_reduce=reduces, overlap_param_gather=gathers, align_param_gather=aligned)
        module._connect(provider, chunks, config)
        expected = {"no_sync_func"} if reduces else set()
        expected |= {"param_sync_func"} if gathers and aligned else set()
        assert vars(provider) == {
            "qk_layernorm": True,
            "finalize_model_grads_func": module.finalize_model_grads,
            **{name: [functions[name]] * count if count > 1 else functions[name] for name in expected},
        }
    provider, chunk = SimpleNamespace(qk_layernorm=True), Wrapped()
    chunk.norm = object.__new__(module.NormOfAllHeads)
    nn.Module.__init__(chunk.norm)
    module._connect(provider, [Wrapped(), chunk], config)
    assert provider.qk_layernorm is False
