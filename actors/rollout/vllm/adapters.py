"""Adapters in vLLM's workers: checked before vLLM sees them, kept in memory, compared with what its kernels read.

vLLM loads adapters from directories. For paths that begin with :data:`~actors.rollout.messages.IN_MEMORY` its managers are
given what is kept here, and slots are written from that; the order of slots, and which adapter gives way, stay vLLM's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from vllm.lora.layers import (
    ColumnParallelLinearWithLoRA,
    FusedMoEWithLoRA,
    MergedColumnParallelLinearWithLoRA,
    RowParallelLinearWithLoRA,
    VocabParallelEmbeddingWithLoRA,
)
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LoRAModelManager
from vllm.lora.worker_manager import WorkerLoRAManager

from actors.rollout.messages import IN_MEMORY
from actors.rollout.vllm.slots import Cut, ModuleSlots, SlotTable
from rl_backend.contracts.lora import PEFT_PREFIX, peft_name
from rl_backend.primitive.adapters import HEAD

_MERGED = "push base and adapter as one model with WeightSync(..., merged=True)"
_load_of_vllm = WorkerLoRAManager._load_adapter
_add_of_vllm = LoRAModelManager._add_adapter
_activate_of_vllm = LoRAModelManager.activate_adapter


class _Kept(NamedTuple):
    rank: int
    factors: Mapping[str, Tensor]
    digest: str
    table: SlotTable


# By path. Of the process and not of a manager: vLLM's methods that are replaced below find them by the request alone.
_kept: dict[str, _Kept] = {}


class _LoadedFromMemory(LoRAModel):
    def __init__(self, number: int, path: str) -> None:
        super().__init__(number, _kept[path].rank, {})
        self.path = path


def _load_adapter(manager: Any, request: Any) -> Any:
    if not request.lora_path.startswith(IN_MEMORY):
        return _load_of_vllm(manager, request)
    return _LoadedFromMemory(request.lora_int_id, request.lora_path)


def _add_adapter(manager: Any, adapter: Any) -> None:
    if isinstance(adapter, _LoadedFromMemory):
        manager._registered_adapters[adapter.id] = adapter
    else:
        _add_of_vllm(manager, adapter)


def _activate_adapter(manager: Any, number: int) -> bool:
    adapter = manager._registered_adapters[number]
    if not isinstance(adapter, _LoadedFromMemory):
        return bool(_activate_of_vllm(manager, number))
    if number in manager._active_adapters:
        return False
    index = manager.lora_index_to_id.index(None)
    manager._active_adapters[number] = None
    manager.lora_index_to_id[index] = number
    kept = _kept[adapter.path]
    kept.table.write(index, kept.rank, kept.factors)
    return True


def _renames(model: Any) -> Any:
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    return mapper and mapper.get_rename_mapper()


WorkerLoRAManager._load_adapter = _load_adapter
LoRAModelManager._add_adapter = _add_adapter
LoRAModelManager.activate_adapter = _activate_adapter


class AdapterSlots:
    def __init__(self, model_runner: Any) -> None:
        self._model_runner = model_runner
        self._modules_of_checkpoint: Mapping[str, str] = {}
        self._table: SlotTable | None = None
        # Rank and shapes of the adapter that was kept last: the next version of a tenant has the same.
        self._fitted: tuple[int, Mapping[str, tuple[int, ...]]] = 0, {}

    @property
    def _manager(self) -> Any:
        return self._model_runner.lora_manager._adapter_manager

    def learn_names(self, checkpoint: Sequence[str]) -> None:
        """Tells what the checkpoint calls its tensors, which is how tenants name the modules that they adapt."""
        mapper = _renames(self._model_runner.get_model())
        # A checkpoint with tied embeddings has no weight of its head.
        modules = [*(name.removesuffix(".weight") for name in checkpoint), HEAD]
        self._table, self._fitted = None, (0, {})
        self._modules_of_checkpoint = {mapper._map_name(module) if mapper else module: module for module in modules}

    def keep(self, path: str, rank: int, tensors: Mapping[str, Tensor], digest: str) -> str:
        """Keeps factors by peft's names for a later load. Returns why they cannot be loaded; empty when they can."""
        largest = int(self._manager.lora_config.max_lora_rank)
        if rank > largest:
            return f"rank {rank} is more than the {largest} that this engine was started with; raise max_adapter_rank"
        if self._table is None:
            self._table = _find_slots(self._manager, self._modules_of_checkpoint)
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        # vLLM itself accepts unknown modules, lone factors and other shapes without a word.
        if (rank, shapes) != self._fitted:
            if problem := _misfit(self._table, rank, shapes):
                return problem
            self._fitted = rank, shapes
        _kept[path] = _Kept(rank, tensors, digest, self._table)
        return ""

    def own(self, path: str) -> None:
        """Copies the factors that :meth:`keep` kept, whose memory will be written to."""
        kept = _kept[path]
        _kept[path] = kept._replace(factors={name: factor.clone() for name, factor in kept.factors.items()})

    def forget(self, path: str) -> None:
        _kept.pop(path, None)

    def problem(self, path: str, number: int) -> str:
        """Why the memory that the kernels read for adapter ``number`` is not what was sent; empty where it is."""
        kept = _kept[path]
        index = self._manager.lora_index_to_id.index(number)
        if kept.table.digest(index, kept.rank, kept.factors) == kept.digest:
            return ""
        name = kept.table.difference(index, kept.rank, kept.factors)
        return f"vLLM's kernels read another {name} than was sent" if name else "it was damaged on its way"


def _misfit(table: SlotTable, rank: int, shapes: Mapping[str, tuple[int, ...]]) -> str:
    left = dict(shapes)
    for slots in table.modules:
        found = [left.pop(name, None) for name in slots.names]
        if found == [None, None]:
            continue
        for name, shape, expected in zip(slots.names, found, slots.shapes(rank), strict=True):
            if shape is None:
                return f"{name} is missing"
            if shape != expected:
                return f"{name} has shape {shape}, expected {expected}"
        if slots.before and peft_name(slots.before, is_a=True) not in shapes:
            return f"{slots.module} takes an adapter beside {slots.before} only: target both; or {_MERGED}"
    if left:
        module = min(left).removeprefix(PEFT_PREFIX).rpartition(".lora_")[0]
        return f"{module} takes no adapters in this engine (those that do: {table.kinds}); {_MERGED}"
    return ""


def _find_slots(manager: Any, modules_of_checkpoint: Mapping[str, str]) -> SlotTable:
    modules, others, mixtures = list[ModuleSlots](), list[Any](), list[Any]()
    for name, layer in manager.modules.items():
        parts = [modules_of_checkpoint.get(part, part) for part in manager.packed_modules.get(name, [name])]
        found = list(_slots_of(layer, parts))
        modules += found
        others += [] if found else [layer]
        mixtures += [layer] if found and isinstance(layer, FusedMoEWithLoRA) else []
    return SlotTable(modules, others, mixtures)


def _slots_of(layer: Any, parts: Sequence[str]) -> Iterator[ModuleSlots]:
    a, b = layer.lora_a_stacked, layer.lora_b_stacked
    if isinstance(layer, VocabParallelEmbeddingWithLoRA):
        names = f"{PEFT_PREFIX}{parts[0]}.lora_embedding_A", f"{PEFT_PREFIX}{parts[0]}.lora_embedding_B"
        yield ModuleSlots(parts[0], (a.transpose(1, 2),), (b[:, 0],), names)
        return
    if type(layer) is FusedMoEWithLoRA:
        yield from _slots_of_experts(layer, parts)
        return
    of_a, of_b = ((a,), (b,)) if isinstance(a, Tensor) else (a, b)
    # Of three kinds of outputs and one, as gated DeltaNet has them, the first part has the three.
    more = len(of_a) - len(parts) if isinstance(layer, MergedColumnParallelLinearWithLoRA) else 0
    if len(parts) + more != len(of_a) or more < 0 or of_a[0].dim() != 4:
        return
    shared = getattr(layer, "tp_size", 1) > 1
    if shared and len(of_b) == 1 and hasattr(layer.base_layer, "output_sizes"):
        # Several outputs that one module of the checkpoint has.
        return
    cuts = _cuts(layer, of_a, of_b) if shared else []
    for place, part in enumerate(parts):
        own_slices = slice(0, more + 1) if place == 0 else slice(place + more, place + more + 1)
        yield ModuleSlots(
            part,
            tuple(each[:, 0] for each in of_a[own_slices]),
            tuple(each[:, 0] for each in of_b[own_slices]),
            (peft_name(part, is_a=True), peft_name(part, is_a=False)),
            before=parts[0] if more and place else "",
            cuts=(cuts[0], *cuts[1:][own_slices]) if cuts else (),
        )


def _cuts(layer: Any, of_a: Sequence[Tensor], of_b: Sequence[Tensor]) -> list[Cut]:
    """As vLLM's ``slice_lora_a`` and ``slice_lora_b`` cut: of the inputs, and of the outputs of each slice."""
    inputs, outputs = of_a[0].shape[-1], [each.shape[-2] for each in of_b]
    if isinstance(layer, RowParallelLinearWithLoRA):
        return [_part(layer, inputs), *(Cut(0, size) for size in outputs)]
    if not isinstance(layer, ColumnParallelLinearWithLoRA):
        return [Cut(0, size) for size in (inputs, *outputs)]
    # Workers share the heads of keys and values where there are fewer of them.
    copies = getattr(layer.base_layer, "num_kv_head_replicas", 1)
    numbers = getattr(layer, "output_ids", (layer.tp_rank,))
    return [
        Cut(0, inputs),
        *(
            Cut(number * size, size * layer.tp_size // (copies if place else 1))
            for place, (number, size) in enumerate(zip(numbers, outputs, strict=True))
        ),
    ]


def _part(layer: Any, size: int) -> Cut:
    return Cut(layer.tp_rank * size, layer.tp_size * size)


def _slots_of_experts(layer: Any, parts: Sequence[str]) -> Iterator[ModuleSlots]:
    """Those of experts that share a factor, which every worker has a part of each of; not tried, it needs CUDA."""
    if not layer.enable_moe_shared_loras or layer.use_ep or len(parts) != 3:
        return
    (gate_a, up_a), (gate_b, up_b) = layer.w13_lora_a_stacked, layer.w13_lora_b_stacked
    (down_a,), (down_b,) = layer.w2_lora_a_stacked, layer.w2_lora_b_stacked
    for part, a, b in zip(parts, (gate_a, down_a, up_a), (gate_b, down_b, up_b), strict=True):
        inputs, outputs = a.shape[-1], b.shape[-2]
        cuts = (_part(layer, inputs), Cut(0, outputs)) if a is down_a else (Cut(0, inputs), _part(layer, outputs))
        names = peft_name(part, is_a=True), peft_name(part, is_a=False)
        yield ModuleSlots(part, (a,), (b,), names, cuts=cuts if layer.tp_size > 1 else ())
