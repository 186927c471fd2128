"""Adapters in vLLM's workers: checked before vLLM sees them, kept in memory, compared with what its kernels read.

vLLM loads adapters from directories. Its manager's loader is replaced for paths that begin with
:data:`~actors.rollout.messages.IN_MEMORY`; others go to its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from vllm.lora.layers import MergedColumnParallelLinearWithLoRA, VocabParallelEmbeddingWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.worker_manager import WorkerLoRAManager

from actors.rollout.messages import IN_MEMORY
from rl_backend.contracts.lora import PEFT_PREFIX, peft_name
from rl_backend.weights.digest import same_bytes

_kept: dict[str, tuple[int, dict[str, Tensor]]] = {}
"""Path -> rank and factors, in the dtype of the engine."""
_from_directory = WorkerLoRAManager._load_adapter
_MERGED = "push base and adapter as one model with WeightSync(..., merged=True)"


def _load_adapter(manager: Any, request: Any) -> Any:
    if not request.lora_path.startswith(IN_MEMORY):
        return _from_directory(manager, request)
    rank, tensors = _kept[request.lora_path]
    # With alpha = rank vLLM multiplies B by 1; by anything else it would do so in place, and again at the next load.
    helper = PEFTHelper(r=rank, lora_alpha=rank, target_modules=[])
    mapper = _renames(manager._adapter_manager.model)
    dtype = manager.lora_config.lora_dtype
    adapter = LoRAModel.from_lora_tensors(
        request.lora_int_id, tensors, helper, device="cpu", dtype=dtype, weights_mapper=mapper
    )
    adapter.is_3d_lora_weight = request.is_3d_lora_weight
    return adapter


def _renames(model: Any) -> Any:
    """What changes Hugging Face names of modules into vLLM's; None where they are the same."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    return mapper and mapper.get_rename_mapper()


WorkerLoRAManager._load_adapter = _load_adapter


class _Slots(NamedTuple):
    """What the kernels read for one Hugging Face module.

    Attributes:
        module: its name.
        a, b: for each slice of its outputs (slots, largest rank, inputs) and (slots, outputs, largest rank), views. Every
            slice has a copy of A.
        names: of A and B in peft's files.
        before: name of the module without which vLLM finds no place for this one; empty where there is none.
    """

    module: str
    a: tuple[Tensor, ...]
    b: tuple[Tensor, ...]
    names: tuple[str, str]
    before: str = ""

    @property
    def sizes(self) -> tuple[int, int]:
        """Inputs and outputs."""
        return self.a[0].shape[2], sum(part.shape[1] for part in self.b)

    def held(self, index: int, rank: int) -> Iterator[tuple[str, slice, Tensor]]:
        """The factors of the adapter in a slot: name, and rows that are held; A as often as there are copies."""
        for part in self.a:
            yield self.names[0], slice(0, rank), part[index, :rank]
        start = 0
        for part in self.b:
            stop = start + part.shape[1]
            yield self.names[1], slice(start, stop), part[index, :, :rank]
            start = stop


class AdapterSlots:
    """Methods added to vLLM's worker."""

    model_runner: Any
    _modules_of_checkpoint: Mapping[str, str] = {}
    _found_slots: Sequence[_Slots] = ()

    @property
    def _manager(self) -> Any:
        return self.model_runner.lora_manager._adapter_manager

    def learn_names(self, checkpoint: Sequence[str]) -> None:
        """Tells what the checkpoint calls its tensors, which is how tenants name the modules that they adapt."""
        mapper = _renames(self.model_runner.get_model())
        modules = [name.removesuffix(".weight") for name in checkpoint]
        self._found_slots = ()
        self._modules_of_checkpoint = {mapper._map_name(module) if mapper else module: module for module in modules}

    def keep_adapter(self, path: str, rank: int, tensors: Mapping[str, Tensor]) -> str:
        """Keeps factors by peft's names for a later load. Returns why they cannot be loaded; empty when they can.

        vLLM itself accepts unknown modules, lone factors and other shapes without a word.
        """
        largest = int(self._manager.lora_config.max_lora_rank)
        if rank > largest:
            return f"rank {rank} is more than the {largest} that this engine was started with; raise max_adapter_rank"
        found = dict(tensors)
        for slots in self._slots():
            a, b = (found.pop(name, None) for name in slots.names)
            if a is None and b is None:
                continue
            inputs, outputs = slots.sizes
            for name, tensor, shape in zip(slots.names, (a, b), ((rank, inputs), (outputs, rank)), strict=True):
                if tensor is None:
                    return f"{name} is missing"
                if tuple(tensor.shape) != shape:
                    return f"{name} has shape {tuple(tensor.shape)}, expected {shape}"
            if slots.before and peft_name(slots.before, is_a=True) not in tensors:
                return f"{slots.module} takes an adapter beside {slots.before} only: target both; or {_MERGED}"
        if found:
            module = min(found).removeprefix(PEFT_PREFIX).rpartition(".lora_")[0]
            why = "of a mixture on a CPU attention, gated DeltaNet and the shared expert do; kernels of experts need Triton"
            return f"{module} takes no adapters in this engine ({why}); {_MERGED}"
        dtype = self._manager.lora_config.lora_dtype
        _kept[path] = rank, {name: tensor.to(dtype) for name, tensor in tensors.items()}
        return ""

    def forget_adapter(self, path: str) -> None:
        """Frees what :meth:`keep_adapter` kept."""
        _kept.pop(path, None)

    def adapter_difference(self, path: str, number: int) -> str:
        """Where the memory that the kernels read for adapter ``number`` is not what was kept; empty where it is."""
        rank, tensors = _kept[path]
        index = self._manager.lora_index_to_id.index(number)
        for slots in self._slots():
            for name, rows, held in slots.held(index, rank):
                kept = tensors.get(name)
                if bool(held.any()) if kept is None else not same_bytes(held.cpu(), kept[rows]):
                    return name
        return ""

    def _slots(self) -> Sequence[_Slots]:
        """Of every module that takes adapters. vLLM makes their memory once, when it loads the model."""
        if not self._found_slots:
            self._found_slots = tuple(self._find_slots())
        return self._found_slots

    def _find_slots(self) -> Iterator[_Slots]:
        """Without those that vLLM fuses in parts of its own."""
        for name, module in self._manager.modules.items():
            a, b = module.lora_a_stacked, module.lora_b_stacked
            if isinstance(module, VocabParallelEmbeddingWithLoRA):
                own = self._modules_of_checkpoint.get(name, name)
                names = f"{PEFT_PREFIX}{own}.lora_embedding_A", f"{PEFT_PREFIX}{own}.lora_embedding_B"
                yield _Slots(own, (a.transpose(1, 2),), (b[:, 0],), names)
                continue
            of_a, of_b = ((a,), (b,)) if isinstance(a, Tensor) else (a, b)
            parts = [self._modules_of_checkpoint.get(part, part) for part in self._manager.packed_modules.get(name, [name])]
            # Of three kinds of outputs and one, as gated DeltaNet has them, the first part has the three.
            more = len(of_a) - len(parts) if isinstance(module, MergedColumnParallelLinearWithLoRA) else 0
            if len(parts) + more != len(of_a) or more < 0 or of_a[0].dim() != 4:
                continue
            for place, part in enumerate(parts):
                own_slices = slice(0, more + 1) if place == 0 else slice(place + more, place + more + 1)
                yield _Slots(
                    part,
                    tuple(each[:, 0] for each in of_a[own_slices]),
                    tuple(each[:, 0] for each in of_b[own_slices]),
                    (peft_name(part, is_a=True), peft_name(part, is_a=False)),
                    before=parts[0] if more and place else "",
                )
