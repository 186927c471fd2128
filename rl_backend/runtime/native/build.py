"""Building a model for one rank: on meta, sharded, then each rank reads its own part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rl_backend.checkpoint.hf_reader import read_hf_config
from rl_backend.checkpoint.hf_weights import load_weights
from rl_backend.contracts import (
    VALUE_HEAD_WEIGHTS,
    ConfigError,
    Head,
    NativeConfig,
    PackedWeight,
    RuntimeConfig,
    UnsupportedError,
    WeightName,
)
from rl_backend.model import BuildSettings, ModelFamily, find_model
from rl_backend.parallel.groups import ParallelGroups
from rl_backend.runtime.native.handle import NativeHandle
from rl_backend.runtime.native.layout import check_model_layout
from rl_backend.runtime.native.optimizer import NativeOptimizer
from rl_backend.runtime.placement import Placement

if TYPE_CHECKING:
    from rl_backend.runtime.native.runtime import NativeRuntime


def build_handle(
    owner: NativeRuntime,
    config: RuntimeConfig,
    groups: ParallelGroups,
    *,
    forward_only: bool,
    name: str,
    head: Head,
) -> NativeHandle:
    """Builds the model of ``config.hf_path``.

    The parameters of a trained model are float32. A forward-only model keeps its parameters in ``param_dtype``, which is
    what a trained one computes with after each gather, so both give the same outputs from the same weights.
    """
    native = config.backend_cfg
    assert isinstance(native, NativeConfig), "RuntimeConfig resolves backend_cfg by backend"
    hf_config = read_hf_config(config.hf_path)
    family = find_model(native.model, hf_config)
    family.require_head(head)
    architecture = family.parse_config(hf_config)
    check_model_layout(family, architecture, native.parallel)
    options = native.model_cfg if native.model_cfg is not None else family.options_type()
    with torch.device("meta"):
        model = family.build(architecture, BuildSettings(options, head, native.log_prob_chunk_tokens))
    if forward_only:
        model.to(getattr(torch, native.param_dtype)).requires_grad_(False)
    family.parallelize(model, groups, native)
    model.to_empty(device=groups.device)
    model.train(not forward_only)
    weight_names = dict(family.weight_names(architecture, head))
    parameters = _parameters(model, family, weight_names, groups)
    zero_if_absent = VALUE_HEAD_WEIGHTS if head == "values" else ()
    load_weights(
        config.hf_path,
        parameters,
        weight_names,
        zero_if_absent=zero_if_absent,
        stored_buffers=family.stored_buffers,
    )
    return NativeHandle(
        name=name,
        forward_only=forward_only,
        weight_version=0,
        head=head,
        data_parallel_rank=groups.dp_rank,
        data_parallel_size=groups.dp_size,
        owner=owner,
        config=config,
        groups=groups,
        family=family,
        architecture=architecture,
        hf_config=hf_config,
        vocab_size=_vocab_size(hf_config),
        max_length=_max_length(family, architecture, hf_config),
        model=model,
        parameters=parameters,
        weight_names=weight_names,
        optimizer=None if forward_only else NativeOptimizer(native.optimizer, parameters, weight_names, groups),
        placement=Placement(name, groups.device),
    )


def _parameters(
    model: nn.Module, family: ModelFamily, weight_names: dict[str, WeightName], groups: ParallelGroups
) -> dict[str, nn.Parameter]:
    """Parameters in export order, after checks of what a family may have got wrong."""
    buffers = sorted(name for name, _ in model.named_buffers())
    if buffers:
        raise UnsupportedError(
            f"model family {family.name!r} has the buffers {', '.join(buffers[:4])}; models are built on the meta device, "
            "where buffers have no contents; compute them in forward",
            buffers=buffers,
        )
    found = dict(model.named_parameters())
    if set(found) != set(weight_names):
        raise UnsupportedError(
            f"weight_names of model family {family.name!r} does not cover its parameters: without a name "
            f"{sorted(set(found) - set(weight_names))[:4]}, not in the model {sorted(set(weight_names) - set(found))[:4]}"
        )
    for name, packed in weight_names.items():
        if isinstance(packed, PackedWeight) and tuple(found[name].shape[: len(packed.shape)]) != packed.shape:
            raise UnsupportedError(
                f"weight_names of model family {family.name!r} packs {packed.shape} tensors into {name}, which has shape "
                f"{tuple(found[name].shape)}; the first dimensions must be the same",
                parameter=name,
            )
    whole = [name for name, parameter in found.items() if not isinstance(parameter, DTensor)]
    if whole and groups.world_size > 1:
        raise UnsupportedError(
            f"parallelize of model family {family.name!r} left {whole[0]} and {len(whole) - 1} other parameters unsharded, "
            "so their gradients would not be averaged over the ranks",
            parameters=whole,
        )
    return {name: found[name] for name in weight_names}


def _max_length(family: ModelFamily, architecture: Any, hf_config: Mapping[str, Any]) -> int | None:
    if family.max_length is not None:
        return family.max_length(architecture)
    return hf_config.get("max_position_embeddings")


def _vocab_size(hf_config: Any) -> int:
    size = hf_config.get("vocab_size")
    if not isinstance(size, int) or size < 1:
        raise ConfigError.of("config.json vocab_size", size, "expected a positive whole number")
    return size
