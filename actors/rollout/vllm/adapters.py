"""Adapters in vLLM's workers: checked before vLLM sees them, kept in memory, compared with what its kernels read.

vLLM loads adapters from directories. Its manager's loader is replaced for paths that begin with
:data:`~actors.rollout.messages.IN_MEMORY`; others go to its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.lora.layers import VocabParallelEmbeddingWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.worker_manager import WorkerLoRAManager

from actors.rollout.messages import IN_MEMORY
from rl_backend.contracts.lora import PEFT_PREFIX, peft_name

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
    adapter = LoRAModel.from_lora_tensors(
        request.lora_int_id, tensors, helper, device="cpu", dtype=manager.lora_config.lora_dtype
    )
    adapter.is_3d_lora_weight = request.is_3d_lora_weight
    return adapter


WorkerLoRAManager._load_adapter = _load_adapter


class _Slots(NamedTuple):
    """What the kernels read for one Hugging Face module.

    Attributes:
        module: its name.
        a, b: (slots, largest rank, inputs) and (slots, outputs, largest rank), views.
        names: of A and B in peft's files.
    """

    module: str
    a: Tensor
    b: Tensor
    names: tuple[str, str]


class AdapterSlots:
    """Methods added to vLLM's worker."""

    model_runner: Any

    @property
    def _manager(self) -> Any:
        return self.model_runner.lora_manager._adapter_manager

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
            shapes = (rank, slots.a.shape[2]), (slots.b.shape[1], rank)
            for name, tensor, shape in zip(slots.names, (a, b), shapes, strict=True):
                if tensor is None:
                    return f"{name} is missing"
                if tuple(tensor.shape) != shape:
                    return f"{name} has shape {tuple(tensor.shape)}, expected {shape}"
        if found:
            module = min(found).removeprefix(PEFT_PREFIX).rpartition(".lora_")[0]
            return f"{module} takes no adapters in this engine (of a mixture on a CPU only attention does); {_MERGED}"
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
            read = slots.a[index, :rank], slots.b[index, :, :rank]
            for name, held in zip(slots.names, read, strict=True):
                kept = tensors.get(name)
                if not (torch.equal(held.cpu(), kept) if kept is not None else not bool(held.any())):
                    return name
        return ""

    def _slots(self) -> Iterator[_Slots]:
        """Of every module that takes adapters; without those that vLLM fuses in parts of its own."""
        for name, module in self._manager.modules.items():
            a, b = module.lora_a_stacked, module.lora_b_stacked
            if isinstance(module, VocabParallelEmbeddingWithLoRA):
                names = f"{PEFT_PREFIX}{name}.lora_embedding_A", f"{PEFT_PREFIX}{name}.lora_embedding_B"
                yield _Slots(name, a.transpose(1, 2), b[:, 0], names)
                continue
            stacked = ((a,), (b,)) if isinstance(a, Tensor) else (a, b)
            parts = self._manager.packed_modules.get(name, [name])
            if len(parts) == len(stacked[0]) and stacked[0][0].dim() == 4:
                for part, of_a, of_b in zip(parts, *stacked, strict=True):
                    yield _Slots(part, of_a[:, 0], of_b[:, 0], (peft_name(part, is_a=True), peft_name(part, is_a=False)))
