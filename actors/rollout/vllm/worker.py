"""The receiving end of staged weights in vLLM's worker processes, in vLLM's own weight-transfer interface.

vLLM imports this module before it makes a model, because its configuration names :class:`WorkerExtension`; the import
registers the engines and the loader and applies patches.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import RoutedExpertsCaptureSource
from vllm.model_executor.layers.mamba.gdn.base import GatedDeltaNetAttention
from vllm.model_executor.model_loader import DefaultModelLoader, register_model_loader
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.utils.import_utils import resolve_obj_by_qualname

from actors.cluster.processes import Process
from actors.rollout.vllm.adapters import AdapterSlots
from actors.rollout.vllm.deltanet import serve_every_deltanet
from actors.rollout.vllm.expected import EngineParameters
from actors.rollout.vllm.patches import (
    bind_stores_to_their_address,
    draw_one_number_for_a_token,
    keep_adapters_from_experts,
    load_through_loaders,
    meet_in_shared_memory,
    multiply_adapters_once_for_all_rows,
    name_weight_loaders,
    normalise_in_a_kernel,
    normalise_log_probs_again,
    packing_embeddings_again,
    packing_experts_again,
    rotate_views_outside_the_kernel,
    route_by_sigmoid_without_groups,
    take_the_first_blocks_again,
    turn_generators_back,
)
from actors.rollout.vllm.reads import record_reads, stand_ins
from actors.wire.segment import map_segment
from rl_backend.checkpoint.hf_reader import HFReader
from rl_backend.contracts import TensorInfo, WeightManifest, name_of_dtype
from rl_backend.contracts.weights import Box
from rl_backend.weights.staging import read_tensor

BACKEND = "rl_backend"
"""Name under which vLLM's ``WeightTransferConfig`` finds :class:`SwitchingWeightTransferEngine`."""

LOAD_FORMAT = "rl_backend"
"""Name under which vLLM finds :class:`ReaderFilesLoader`."""

# By name: the engines of GPUs are imported only where they receive.
_KINDS = {
    "nccl": "actors.rollout.vllm.streaming.CheckedNcclWeightTransferEngine",
    "cuda_ipc": "actors.rollout.vllm.streaming.CheckedIpcWeightTransferEngine",
    "staged": "actors.rollout.vllm.worker.StagedWeightTransferEngine",
}


_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


@dataclass
class StagedInitInfo(WeightTransferInitInfo):
    path: str
    nbytes: int


@dataclass
class StagedUpdateInfo(WeightTransferUpdateInfo):
    """The staged tensors, as the JSON of a :class:`~rl_backend.contracts.WeightManifest` that the engine has verified."""

    manifest: str


class StagedWeightTransferEngine(WeightTransferEngine[StagedInitInfo, StagedUpdateInfo]):
    """Loads a verified staging segment: views of the mapping go straight into vLLM's own loaders."""

    init_info_cls = StagedInitInfo
    update_info_cls = StagedUpdateInfo
    _buffer: Tensor | None = None

    def init_transfer_engine(self, init_info: StagedInitInfo) -> None:
        self._buffer = map_segment(init_info.path, init_info.nbytes)

    def start_weight_update(self) -> None:
        self._update = ExitStack()
        self._update.enter_context(packing_embeddings_again(self.model))
        self._update.enter_context(packing_experts_again(self.model))
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: StagedUpdateInfo) -> None:
        assert self._buffer is not None, "init_transfer_engine() comes before"
        buffer, manifest = self._buffer, WeightManifest.model_validate_json(update_info.manifest)
        self.model.load_weights(
            stand_ins(manifest.tiles, buffer, get_tensor_model_parallel_rank())
            if manifest.tiles
            else ((info.name, read_tensor(buffer, info)) for info in manifest.tensors)
        )

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        self._update.close()

    def shutdown(self) -> None:
        self._buffer = None


class SwitchingWeightTransferEngine(WeightTransferEngine[WeightTransferInitInfo, WeightTransferUpdateInfo]):
    """Hands everything to the engine that the last ``init_weight_transfer_engine`` message chose by its ``kind``."""

    init_info_cls = WeightTransferInitInfo
    update_info_cls = WeightTransferUpdateInfo
    # vLLM fixes its transfer engine when it starts; a transport is chosen when weights are pushed.
    _active: WeightTransferEngine[Any, Any] | None = None

    def parse_init_info(self, init_dict: dict[str, Any]) -> WeightTransferInitInfo:
        settings = dict(init_dict)
        engine_class = resolve_obj_by_qualname(_KINDS[settings.pop("kind")])
        if self._active is not None:
            self._active.shutdown()
        self._active = engine_class(self.config, self.vllm_config, self.device, self.model)
        return self._engine.parse_init_info(settings)

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        self._engine.init_transfer_engine(init_info)

    def start_weight_update(self) -> None:
        name_weight_loaders(self.model)
        self._engine.start_weight_update()

    def parse_update_info(self, update_dict: dict[str, Any]) -> WeightTransferUpdateInfo:
        return self._engine.parse_update_info(update_dict)

    def receive_weights(self, update_info: WeightTransferUpdateInfo) -> None:
        self._engine.receive_weights(update_info)

    def finish_weight_update(self) -> None:
        self._engine.finish_weight_update()

    def shutdown(self) -> None:
        if self._active is not None:
            self._active.shutdown()

    @property
    def _engine(self) -> WeightTransferEngine[Any, Any]:
        assert self._active is not None, "init_weight_transfer_engine() comes before any weight update"
        return self._active


class ReaderFilesLoader(DefaultModelLoader):
    """vLLM's loader of the files that :class:`HFReader` reads."""

    # vLLM alone reads every *.safetensors file of a directory without an index, also those beside model.safetensors, and
    # nothing but consolidated*.safetensors where there is one.
    def _prepare_weights(self, model_name_or_path: str, *_: object, **__: object) -> Any:
        files = [str(file) for file in HFReader(model_name_or_path).files]
        # From 0.32 vLLM asks for the name of an index too, which it reads where a part of a model is left out.
        found = (model_name_or_path, files, True, "model.safetensors.index.json")
        return found[: len(get_args(get_type_hints(DefaultModelLoader._prepare_weights)["return"]))]


class WorkerExtension:
    model_runner: Any
    weight_transfer_engine: Any

    @cached_property
    def adapter_slots(self) -> AdapterSlots:
        return AdapterSlots(self.model_runner)

    def keep_adapter(self, path: str, rank: int, tensors: Mapping[str, Tensor], digest: str) -> str:
        return self.adapter_slots.keep(path, rank, tensors, digest)

    def own_adapter(self, path: str) -> None:
        self.adapter_slots.own(path)

    def forget_adapter(self, path: str) -> None:
        self.adapter_slots.forget(path)

    def adapter_problem(self, path: str, number: int) -> str:
        return self.adapter_slots.problem(path, number)

    def describe_parameters(self, checkpoint: Sequence[str]) -> EngineParameters:
        model: torch.nn.Module = self.model_runner.get_model()
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        self.adapter_slots.learn_names(checkpoint)
        return EngineParameters(
            {name: name_of_dtype(parameter.dtype) for name, parameter in model.named_parameters()},
            dict(getattr(model, "packed_modules_mapping", {})),
            {name: mapper._map_name(name) if mapper else name for name in checkpoint},
        )

    def weight_reads(self, infos: Sequence[TensorInfo]) -> dict[str, tuple[Box, ...]]:
        return record_reads(self.model_runner.get_model(), infos)

    def process(self) -> Process:
        return Process.of(os.getpid())

    def forget_staged(self) -> None:
        self.weight_transfer_engine.shutdown()

    @cached_property
    def _freed(self) -> list[tuple[torch.UntypedStorage, int]]:
        """Of keys and values that are freed: their storages, and how large they were."""
        return []

    def free_cache(self) -> None:
        """Gives the memory of keys and values back to the system; on a CPU, where vLLM keeps it."""
        for cache in tree_leaves(self.model_runner.kv_caches):
            storage = cache.untyped_storage()
            if storage.nbytes():
                self._freed.append((storage, storage.nbytes()))
                storage.resize_(0)

    def clear_cache(self) -> None:
        """Zeros in the place of keys and values, which take no memory until tokens are written to them; on a CPU."""
        for cache in tree_leaves(self.model_runner.kv_caches):
            _clear(cache.untyped_storage())

    def take_cache(self) -> None:
        """Takes it again. Nothing is in it."""
        while self._freed:
            storage, nbytes = self._freed.pop()
            storage.resize_(nbytes)
            _clear(storage)

    def state_dtypes(self) -> list[str]:
        modules = self.model_runner.get_model().modules()
        return [name_of_dtype(each.kv_cache[1].dtype) for each in modules if isinstance(each, GatedDeltaNetAttention)]

    def moe_layers(self) -> list[int]:
        model: torch.nn.Module = self.model_runner.get_model()
        routed = (MoERunner, RoutedExpertsCaptureSource)
        return sorted({int(module.layer_id) for module in model.modules() if isinstance(module, routed)})


def _clear(storage: torch.UntypedStorage) -> None:
    # Attention multiplies places that no token has by 0, which leaves a NaN one.
    torch.tensor([], dtype=torch.uint8).set_(storage).zero_()
    start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if first < last:
        # Linux gives pages that are wanted again zeros, and takes memory for them then.
        _madvise(first, last - first, mmap.MADV_DONTNEED)


# Once in a process, and before vLLM makes a model: layers keep the functions that they find.
if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, SwitchingWeightTransferEngine)
    register_model_loader(LOAD_FORMAT)(ReaderFilesLoader)
    bind_stores_to_their_address()
    meet_in_shared_memory()
    serve_every_deltanet()
    rotate_views_outside_the_kernel()
    route_by_sigmoid_without_groups()
    load_through_loaders()
    keep_adapters_from_experts()
    multiply_adapters_once_for_all_rows()
    turn_generators_back()
    draw_one_number_for_a_token()
    normalise_log_probs_again()
    normalise_in_a_kernel()
    take_the_first_blocks_again()
