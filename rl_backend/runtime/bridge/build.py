"""Building a model for one rank and loading its part of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.utils import unwrap_model
from torch import nn

from rl_backend.checkpoint.hf_reader import HFReader, read_hf_config
from rl_backend.contracts import VALUE_HEAD_WEIGHTS, CheckpointError, Head, RuntimeConfig, UnsupportedError
from rl_backend.runtime.bridge.batch import CriticOutputLayer, OutputProcessor
from rl_backend.runtime.bridge.conversion import WeightConverter
from rl_backend.runtime.bridge.groups import BridgeGroups
from rl_backend.runtime.bridge.handle import BridgeHandle
from rl_backend.runtime.bridge.optimizer import BridgeOptimizer
from rl_backend.runtime.bridge.overrides import override
from rl_backend.runtime.bridge.provider import make_provider, open_bridge, takes_packed_sequences
from rl_backend.runtime.bridge.routes import connect_routers
from rl_backend.runtime.bridge_config import BridgeConfig
from rl_backend.runtime.interface import Runtime
from rl_backend.runtime.offload import Offload


def build_handle(
    owner: Runtime[Any], config: RuntimeConfig, groups: BridgeGroups, *, forward_only: bool, name: str, head: Head
) -> BridgeHandle:
    """Builds the model of ``config.hf_path``. A collective: Megatron spreads weights from one rank of each group."""
    options = config.options(BridgeConfig)
    hf_config = read_hf_config(config.hf_path)
    bridge = open_bridge(config.hf_path)
    provider = make_provider(bridge, config, groups, head)
    ddp_config = override(
        "BridgeConfig.override_ddp_config", DistributedDataParallelConfig, options.override_ddp_config, _ddp_settings()
    )
    model_bridge = bridge._model_bridge
    # It draws a bar for every load and export.
    model_bridge._with_progress_tracking = lambda tasks, *_, **__: iter(tasks)

    def load(chunks: list[nn.Module]) -> list[nn.Module]:
        if head == "values":
            _set_output_layers(chunks, lambda: None)
        _load_weights(config.hf_path, bridge, model_bridge, chunks, head, groups)
        if head == "values":
            _set_output_layers(chunks, lambda: CriticOutputLayer(provider.hidden_size, provider))
            _load_value_head(config.hf_path, chunks)
        if forward_only:
            for chunk in chunks:
                chunk.requires_grad_(False)
        return chunks

    chunks = provider.provide_distributed_model(
        ddp_config=ddp_config,
        wrap_with_ddp=not forward_only,
        use_cpu_initialization=groups.device.type == "cpu",
        init_model_with_meta_device=False,
        pre_wrap_hook=load,
        pg_collection=groups.pg,
    )
    for chunk in chunks:
        chunk.train(not forward_only)
    optimizer = None if forward_only else BridgeOptimizer(options, chunks, groups, vocab_size=provider.vocab_size)
    if optimizer is not None:
        _connect(provider, chunks, ddp_config)
    return BridgeHandle(
        name=name,
        forward_only=forward_only,
        weight_version=0,
        head=head,
        data_parallel_rank=groups.dp_rank,
        data_parallel_size=groups.dp_size,
        micro_batch_multiple=_micro_batch_multiple(provider, groups),
        owner=owner,
        config=config,
        groups=groups,
        bridge=bridge,
        model_bridge=model_bridge,
        provider=provider,
        hf_config=hf_config,
        chunks=chunks,
        processor=OutputProcessor(
            groups,
            vocab_size=provider.vocab_size,
            chunk_tokens=options.log_prob_chunk_tokens,
            sequence_parallel=provider.sequence_parallel,
        ),
        vocab_size=provider.vocab_size,
        max_length=hf_config.get("max_position_embeddings"),
        packs_sequences=takes_packed_sequences(options, groups.device),
        optimizer=optimizer,
        routers=connect_routers(unwrap_model(list(chunks)), provider, groups),
        converter=WeightConverter(
            unwrap_model(list(chunks)), bridge, model_bridge, groups.pg, head=head, hf_path=config.hf_path
        ),
        offload=Offload(name, groups.device),
    )


def _micro_batch_multiple(provider: Any, groups: BridgeGroups) -> int:
    """Megatron's interleaved schedule takes micro-batches in groups."""
    return (provider.microbatch_group_size_per_vp_stage or groups.parallel.pp) if groups.parallel.vpp > 1 else 1


def _ddp_settings() -> Mapping[str, Any]:
    return {
        "use_distributed_optimizer": True,
        "grad_reduce_in_fp32": True,
        "overlap_grad_reduce": False,
        "overlap_param_gather": False,
        "check_for_nan_in_grad": False,
    }


def _connect(provider: Any, chunks: Sequence[Any], ddp_config: Any) -> None:
    """What the pipeline schedules call, as Megatron's own training loop sets it."""
    provider.finalize_model_grads_func = finalize_model_grads
    if ddp_config.overlap_grad_reduce:
        functions = [chunk.no_sync for chunk in chunks]
        provider.no_sync_func = functions if len(functions) > 1 else functions[0]
    if ddp_config.overlap_param_gather and ddp_config.align_param_gather:
        gather = [chunk.start_param_sync for chunk in chunks]
        provider.param_sync_func = gather if len(gather) > 1 else gather[0]
    for chunk in chunks:
        assert isinstance(chunk, DistributedDataParallel), "trained chunks are wrapped"


def _set_output_layers(chunks: Sequence[Any], make: Callable[[], nn.Module | None]) -> None:
    """Megatron-Bridge cannot load a model with parameters that it has no name for, so a critic's head comes after it."""
    for chunk in chunks:
        if getattr(chunk, "post_process", False):
            chunk.output_layer = make()


def _load_weights(
    hf_path: str, bridge: Any, model_bridge: Any, chunks: list[nn.Module], head: Head, groups: BridgeGroups
) -> None:
    """Loads every parameter, once it is certain that each has its weights and that every weight has its parameter.

    Raises:
        CheckpointError: weights that the directory lacks.
        UnsupportedError: weights that Megatron's model has no place for.
    """
    stored = set(bridge.hf_pretrained.state.source.get_all_keys())
    tasks = [task for task in model_bridge.build_conversion_tasks(bridge.hf_pretrained, chunks) if task is not None]
    wanted = {name for task in tasks for name in hf_names(task)}
    missing = sorted(wanted - stored)
    if missing:
        raise CheckpointError(
            f"{hf_path} lacks {len(missing)} weights that Megatron's model needs: {', '.join(missing[:4])}", names=missing
        )
    loaded = {task.param_name for task in tasks if task.megatron_module is not None}
    unloaded = sorted(
        name for name, _ in _named_parameters(chunks) if name not in loaded and not _is_tied_copy(chunks, name)
    )
    if unloaded:
        raise UnsupportedError(
            f"Megatron-Bridge has no weights for the parameters {', '.join(unloaded[:4])}", names=unloaded
        )
    unread = sorted(
        name
        for name in stored - _of_all_ranks(wanted, groups)
        if not _may_be_unread(name, head, bridge.hf_pretrained.config)
    )
    if unread:
        raise UnsupportedError(
            f"{hf_path} has {len(unread)} weights that Megatron's model has no place for, so it would compute something "
            f"else: {', '.join(unread[:4])}",
            names=unread,
        )
    try:
        model_bridge.load_weights_hf_to_megatron(bridge.hf_pretrained, chunks)
    except ValueError as error:
        raise CheckpointError(f"{hf_path} has weights of other shapes than its config.json says: {error}") from error


def _of_all_ranks(names: set[str], groups: BridgeGroups) -> set[str]:
    """Names of this rank and all others: each knows its own experts only."""
    gathered: list[set[str]] = [set()] * groups.world_size
    dist.all_gather_object(gathered, names, group=groups.host_group)
    return set().union(*gathered)


def hf_names(task: Any) -> tuple[str, ...]:
    """Hugging Face names of the weights that one parameter of Megatron is made of."""
    names = task.mapping.hf_param
    return (names,) if isinstance(names, str) else tuple(names.values())


def _named_parameters(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    for chunk in unwrap_model(list(chunks)):
        yield from chunk.named_parameters()


def _is_tied_copy(chunks: Sequence[nn.Module], name: str) -> bool:
    tied = any(getattr(chunk, "share_embeddings_and_output_weights", False) for chunk in chunks)
    return tied and name == "output_layer.weight"


def _may_be_unread(name: str, head: Head, hf_config: Any) -> bool:
    if name.endswith("rotary_emb.inv_freq"):
        return True
    if name == "lm_head.weight":
        return head == "values" or bool(getattr(hf_config, "tie_word_embeddings", False))
    return head == "values" and name in VALUE_HEAD_WEIGHTS


def _load_value_head(hf_path: str, chunks: Sequence[nn.Module]) -> None:
    """``score.weight`` and ``score.bias``; what the directory lacks of them is 0."""
    reader = HFReader(hf_path)
    for chunk in chunks:
        layer = getattr(chunk, "output_layer", None)
        if not isinstance(layer, CriticOutputLayer):
            continue
        with torch.no_grad():
            for name, parameter in zip(VALUE_HEAD_WEIGHTS, (layer.value_head.weight, layer.value_head.bias), strict=True):
                if name in reader.infos:
                    parameter.copy_(reader.read(name))
                else:
                    parameter.zero_()
