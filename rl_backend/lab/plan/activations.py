"""Activation memory of micro-batches per pipeline stage, counted while a stage runs on the meta device."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from rl_backend.contracts import PackedBatch
from rl_backend.lab.plan.memory import PassMemory
from rl_backend.lora.rows import TenantRows
from rl_backend.model import ModelInput
from rl_backend.parallel.fake_groups import META
from rl_backend.parallel.groups import ParallelGroups
from rl_backend.pipeline import Action, Kind
from rl_backend.primitive.adapters import AdapterRun
from rl_backend.primitive.backward import put_off_weight_gradients
from rl_backend.runtime.native.forward_backward import RankBatch, lay_out


class StageMemory(NamedTuple):
    """Bytes of one micro-batch on one stage, without parameters and their gradients.

    Attributes:
        kept: from the forward pass until the backward pass.
        put_off: from a backward pass for the inputs until that for the weights; 0 where the two are one.
        forward_peak, backward_peak: the most at one time in each pass, what is kept included.
        evaluation_peak: the most in a forward pass that no backward pass follows.
        flops: floating-point operations of both passes, as :class:`LiveBytes` counts them.
    """

    kept: int
    put_off: int
    forward_peak: int
    backward_peak: int
    evaluation_peak: int
    flops: int = 0


def measure_stage(
    module: nn.Module,
    batch: PackedBatch,
    groups: ParallelGroups,
    hidden_size: int | None,
    *,
    splits_backward: bool,
    tenant: TenantRows | None = None,
) -> StageMemory:
    """Runs ``batch``, which is on the CPU, forward and backward on this rank of ``groups``.

    A weight's gradient is dropped as soon as it is complete, as FSDP does that reduces it. Where experts choose tokens, all
    choose as many.

    Args:
        module: on the meta device, in the dtype that it computes in, not sharded by FSDP; keeps no gradients from here on.
        hidden_size: of what the stage before puts out; None for the first stage.
        splits_backward: into a pass for the inputs and one for the weights.
        tenant: on the meta device, a LoRA tenant that all tokens belong to; parameters are frozen then.
    """

    def runs(sequence_rows: Sequence[int]) -> tuple[AdapterRun, ...]:
        return () if tenant is None else (tenant.run(0, sum(sequence_rows), None),)

    on_cpu = lay_out(batch, replace(groups, device=torch.device("cpu")), 1, runs=runs, trains_second=True)
    layout = on_cpu.layout
    rank_batch = RankBatch(
        tree_map_only(Tensor, lambda tensor: tensor.to(META), on_cpu.inputs),
        None if layout is None else replace(layout, places=layout.places.to(META)),
    )
    parameters = list(module.parameters())
    trained = [each for each in parameters if each.requires_grad]
    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(_drop_gradient)
    of_tenant = [] if tenant is None else [tenant.weights, tenant.gradients]
    known = [*parameters, *of_tenant, *(value for value in rank_batch.inputs if isinstance(value, Tensor))]
    with torch.no_grad(), LiveBytes(known) as live:
        _forward(module, hidden_size, rank_batch, groups)
        evaluation_peak = live.peak
    if not trained and tenant is None:
        return StageMemory(0, 0, 0, 0, evaluation_peak)
    with LiveBytes(known) as live:
        inputs, outputs = _forward(module, hidden_size, rank_batch, groups)
        kept, forward_peak = live.live, live.peak
        live.peak = live.live
        put_off = 0
        with put_off_weight_gradients() if splits_backward else nullcontext() as gradients:
            torch.autograd.backward(outputs, [torch.empty_like(output) for output in outputs])
        if gradients is not None:
            del inputs, outputs
            put_off = live.live
            gradients.compute()
        return StageMemory(kept, put_off, forward_peak, live.peak, evaluation_peak, live.flops)


def _forward(
    module: nn.Module, hidden_size: int | None, rank_batch: RankBatch, groups: ParallelGroups
) -> tuple[ModelInput, list[Tensor]]:
    """What the stage takes, and what a backward pass starts from."""
    inputs = rank_batch.inputs
    if hidden_size is not None:
        rows = inputs.input_ids.shape[0] // groups.tp_group.size()
        hidden = torch.empty(rows, hidden_size, dtype=next(module.parameters()).dtype, device=META)
        inputs = inputs._replace(hidden=hidden.requires_grad_(torch.is_grad_enabled()))
    output = module(inputs)
    if isinstance(output, Tensor):
        return inputs, [output]
    return inputs, [value for value in rank_batch.outputs(output, groups) if value is not None]


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def most_in_flight(actions: Iterable[Action], stages: Mapping[int, StageMemory]) -> PassMemory:
    """Follows the actions of one rank to the moment when the most is needed, and to the end for what is computed."""
    kept = flops = 0
    # What is kept for backward passes, and what the pass that runs then takes beyond what it keeps.
    most = (0, 0)
    for action in actions:
        memory = stages.get(action.stage)
        if memory is None:
            continue
        if action.kind is Kind.FORWARD:
            flops += memory.flops
            most = max(most, (kept + memory.kept, memory.forward_peak - memory.kept), key=sum)
            kept += memory.kept
        elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            most = max(most, (kept, memory.backward_peak - memory.kept), key=sum)
            kept += (memory.put_off if action.kind is Kind.BACKWARD_INPUT else 0) - memory.kept
        elif action.kind is Kind.BACKWARD_WEIGHT:
            kept -= memory.put_off
    return PassMemory(
        activations=most[0],
        workspace=most[1],
        evaluation_workspace=max(memory.evaluation_peak for memory in stages.values()),
        kept_per_micro_batch={number: memory.kept for number, memory in stages.items()},
        flops=flops,
    )


def _triangular_flops(matrix: Tensor, right: Tensor, *args: Any, out_val: Tensor, **kwargs: Any) -> int:
    """Of (..., N, N) and (..., N, M): a multiplication and an addition for each element below or on the diagonal."""
    return out_val.numel() * matrix.shape[-1]


_FLOPS: Mapping[Any, Callable[..., int]] = {**flop_registry, torch.ops.aten.linalg_solve_triangular: _triangular_flops}


class LiveBytes(TorchDispatchMode):
    """Inside, storages that operations make are counted from then until nothing refers to them any more.

    Args:
        known: tensors whose storages are not counted.

    Attributes:
        live: bytes that exist now.
        peak: the most that existed at one time, since the start or since this was set to ``live``.
        flops: floating-point operations so far, two for a multiplication and an addition, of what
            ``torch.utils.flop_counter`` knows (products of matrices, convolutions, attention kernels) and of triangular
            systems.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self.flops = 0
        self._known = [_storage(tensor) for tensor in known]
        self._held = {storage._cdata for storage in self._known}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(_storage(leaf))
        formula = _FLOPS.get(getattr(func, "overloadpacket", None))
        if formula is not None:
            self.flops += int(formula(*args, **(kwargs or {}), out_val=result))
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._held:
            return
        nbytes = storage.nbytes()
        self._held.add(key)
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key, nbytes)

    def _forget(self, key: int, nbytes: int) -> None:
        self._held.discard(key)
        self.live -= nbytes


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()
