"""The memory of the bridge runtime: Megatron's buffers, and what its own layers keep, by arithmetic."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Mapping

import torch

from rl_backend.contracts import ConfigError, NativeConfig, PackedWeight, RuntimeConfig, UnsupportedError
from rl_backend.lab.plan.activations import most_in_flight
from rl_backend.lab.plan.megatron_layers import LocalLayers
from rl_backend.lab.plan.memory import RankMemory, Workload
from rl_backend.lab.plan.native import logits_chunk, rank_actions, rank_stages, whole_parameters
from rl_backend.lab.plan.shards import ParameterSize, weights_to_sync
from rl_backend.runtime.bridge_config import BridgeConfig
from rl_backend.runtime.native.layout import ModelDescription, check_model_layout, describe_model

PARAMETER_ALIGNMENT = 64
BUCKET_ALIGNMENT = 128
"""Elements. Megatron-Core 0.19, ``optimizer/param_layout.py``: where a parameter starts, and, as the least common multiple
with the number of ranks, what the end of a bucket is a multiple of."""

COPIES_OF_EXPORTED = 4
"""A parameter of Megatron, its parts from other ranks, what is put together of them, and the tensor in another dtype."""


def bridge_memory(config: RuntimeConfig, num_ranks: int, workload: Workload) -> tuple[list[RankMemory], int]:
    """Memory of each pipeline rank, and the bytes of a weight sync.

    Parameters and gradients lie in buffers that every data-parallel rank has whole; float32 masters, where parameters are
    not float32 themselves, and moments are shared out.

    Raises:
        ConfigError: a layout that does not fit the model.
        UnsupportedError: a model that the native runtime does not have, or options that change what is counted here.
        BatchError: a number of micro-batches that the pipeline schedule does not take.
    """
    options = config.options(BridgeConfig)
    _require_countable(options)
    native = _as_native(options)
    model = describe_model(config.hf_path, native, workload.head)
    _check_layout(options, native, model)
    layers = LocalLayers(model.architecture, options, workload)
    # Megatron's own attention takes a row per sequence.
    padded = _round_up(workload.micro_batch_tokens, workload.sequence_length)
    workload = workload.replace(micro_batch_tokens=padded)
    num_stages = options.parallel.pp * options.parallel.vpp
    layers_of_a_stage = int(model.architecture.num_layers) // num_stages
    actions = rank_actions(native, workload.num_micro_batches)
    ranks = [rank_stages(model, native, rank, num_ranks, workload) for rank in range(native.parallel.pp)]
    weights = weights_to_sync(model.weight_names, whole_parameters(ranks), getattr(torch, workload.sync_dtype))
    experts = {name for name, stored in model.weight_names.items() if isinstance(stored, PackedWeight)}
    found = []
    for pipeline_rank, stages in enumerate(ranks):
        held = _Buffers(options, num_ranks, experts)
        for stage in stages.sharded.values():
            held.add(stage.parameters)
        measured = {
            number: layers.stage(memory, layers_of_a_stage, last=number == num_stages - 1)
            for number, memory in stages.measured.items()
        }
        found.append(
            RankMemory(
                pipeline_rank=pipeline_rank,
                weights=held.weights,
                gradients=held.gradients,
                optimizer=held.optimizer,
                undo=0,
                unreduced_gradients=0,
                gathered_parameters=0,
                logits_chunk=logits_chunk(model, native, workload) if stages.has_head else 0,
                sync_bucket=COPIES_OF_EXPORTED * max(weight.nbytes for weight in weights),
                **most_in_flight(actions[pipeline_rank], measured)._asdict(),
            )
        )
    return found, sum(weight.nbytes for weight in weights)


class _Buffers:
    """Bytes of one rank's buffers and of its optimizer, chunk by chunk."""

    def __init__(self, options: BridgeConfig, num_ranks: int, experts: set[str]) -> None:
        parallel = options.parallel
        self._experts = experts
        self._itemsize = int(getattr(torch, options.param_dtype).itemsize)
        self._dense_ranks = parallel.data_parallel_size(num_ranks) * parallel.cp
        self._expert_ranks = num_ranks // (parallel.pp * parallel.ep * parallel.etp)
        self.weights = self.gradients = self.optimizer = 0

    def add(self, parameters: Mapping[str, ParameterSize]) -> None:
        for ranks, is_expert in ((self._dense_ranks, False), (self._expert_ranks, True)):
            sizes = [size.computed for name, size in parameters.items() if (name in self._experts) is is_expert]
            elements = _padded_elements(sizes, ranks)
            self.weights += elements * self._itemsize
            self.gradients += elements * torch.float32.itemsize
            masters = 0 if self._itemsize == torch.float32.itemsize else 1
            share = min(elements // ranks, sum(sizes))
            self.optimizer += share * (2 + masters) * torch.float32.itemsize + len(sizes) * torch.float32.itemsize


def _padded_elements(sizes: Iterable[int], ranks: int) -> int:
    elements = 0
    for size in sizes:
        elements = _round_up(elements, PARAMETER_ALIGNMENT) + size
    return _round_up(elements, math.lcm(ranks, BUCKET_ALIGNMENT))


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _as_native(options: BridgeConfig) -> NativeConfig:
    """The same layout, with Megatron's schedule."""
    return NativeConfig(
        parallel=options.parallel,
        param_dtype=options.param_dtype,
        activation_checkpointing="full" if options.recompute_granularity == "full" else "none",
        log_prob_chunk_tokens=options.log_prob_chunk_tokens,
    )


def _require_countable(options: BridgeConfig) -> None:
    _require_known_layers(options)
    for name in ("override_transformer_config", "override_ddp_config", "override_optimizer_config"):
        value = getattr(options, name)
        if value:
            raise UnsupportedError(f"BridgeConfig.{name}={value!r}: a plan does not know what it takes; leave it out")
    recompute = (options.recompute_method, options.recompute_num_layers)
    if options.recompute_granularity == "full" and recompute != ("uniform", 1):
        raise UnsupportedError(
            f"BridgeConfig.recompute_method={recompute[0]!r} with recompute_num_layers={recompute[1]}: a plan counts layers "
            "that are recomputed one by one; use 'uniform' with 1"
        )
    modules = options.recompute_modules
    if options.recompute_granularity == "selective" and modules not in (None, ("core_attn",)):
        raise UnsupportedError(
            f"BridgeConfig.recompute_modules={modules}: a plan counts ('core_attn',) alone, whose scores are never kept"
        )


def _require_known_layers(options: BridgeConfig) -> None:
    """What Transformer Engine's layers keep depends on its kernels."""
    has_cuda = torch.cuda.is_available()
    runs_on_cpu = options.device == "cpu" or (options.device == "auto" and not has_cuda)
    if runs_on_cpu or (has_cuda and importlib.util.find_spec("transformer_engine") is None):
        return
    raise UnsupportedError(
        f"BridgeConfig.device={options.device!r}: a plan knows what Megatron's own layers keep for backward passes, not "
        "what those of Transformer Engine do, which CUDA ranks have where it is installed; use device='cpu' to plan with "
        "Megatron's own, which keep more, or backend='native'"
    )


def _check_layout(options: BridgeConfig, native: NativeConfig, model: ModelDescription) -> None:
    parallel = options.parallel
    if parallel.cp > 1:
        raise ConfigError.of("BridgeConfig.parallel.cp", parallel.cp, "the bridge runtime has none; use 1")
    check_model_layout(model.family, model.architecture, native)
    layers = None if model.family.num_layers is None else model.family.num_layers(model.architecture)
    stages = parallel.pp * parallel.vpp
    if layers is not None and layers % stages:
        raise ConfigError.of(
            "BridgeConfig.parallel.pp",
            parallel.pp,
            f"{layers} layers do not divide into pp*vpp = {parallel.pp}*{parallel.vpp} = {stages} stages; use a divisor",
        )
