"""Layout of a model over ranks: its description, stages, checks, and the place of each parameter."""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rl_backend.checkpoint.hf_reader import HFReader, read_hf_config
from rl_backend.checkpoint.hf_weights import check_tensors, with_stored_copies
from rl_backend.contracts import (
    VALUE_HEAD_WEIGHTS,
    ConfigError,
    Head,
    NativeConfig,
    ParallelConfig,
    RuntimeConfig,
    UnsupportedError,
    WeightName,
    stored_names,
)
from rl_backend.model import BuildSettings, ModelFamily, ModelStage, find_model
from rl_backend.model.decoder_spec import DecoderSpec
from rl_backend.parallel.collectives import gather_objects
from rl_backend.parallel.groups import ParallelGroups
from rl_backend.parallel.shards import ShardLayout, layout_of
from rl_backend.pipeline.catalog import Algorithm, require_stages
from rl_backend.pipeline.schedule import split_layers


class ModelDescription(NamedTuple):
    """A model of a family: its ``architecture``, ``config.json``, and the settings that build all of it."""

    family: ModelFamily
    architecture: Any
    hf_config: Mapping[str, Any]
    settings: BuildSettings

    @property
    def weight_names(self) -> Mapping[str, WeightName]:
        return self.family.weight_names(self.architecture, self.settings.head)


def describe_model(hf_path: Path | str, native: NativeConfig, head: Head) -> ModelDescription:
    """Reads ``config.json`` alone.

    Raises:
        CheckpointError: no directory with a ``config.json``.
        UnsupportedError: the model family, a head that it does not have, or a feature that its configuration asks for.
    """
    hf_config = read_hf_config(hf_path)
    family = find_model(native.model, hf_config)
    family.require_head(head)
    options = native.model_cfg if native.model_cfg is not None else family.options_type()
    layer_dtype = getattr(torch, native.param_dtype) if native.head_in_float32 else None
    settings = BuildSettings(options, head, native.log_prob_chunk_tokens, layer_dtype=layer_dtype)
    return ModelDescription(family, family.architecture(hf_config, options), hf_config, settings)


def schedule_name(config: NativeConfig) -> str | None:
    """The schedule of a pipeline; None where there is none: one rank with one stage, and no schedule asked for."""
    parallel = config.parallel
    if config.pipeline_schedule != "auto":
        return config.pipeline_schedule
    if parallel.vpp > 1:
        return "interleaved-1f1b"
    return "1f1b" if parallel.pp > 1 else None


def algorithm(config: NativeConfig) -> Algorithm | None:
    """How the schedule is made, or None without one; raises :class:`ConfigError` for stages per rank that it cannot have."""
    name = schedule_name(config)
    return None if name is None else require_stages(name, config.parallel.pp, config.parallel.vpp)


def splits_backward(config: NativeConfig) -> bool:
    """Whether the schedule runs a pass for the gradients of inputs and a later one for those of weights."""
    found = algorithm(config)
    return found is not None and found.splits_backward


def micro_batch_multiple(config: NativeConfig) -> int:
    """The number of micro-batches must be a multiple of this."""
    found = algorithm(config)
    if found is None:
        return 1
    return max(found.micro_batches_per_rank, int(found.whole_groups)) * config.parallel.pp or 1


def why_unshared(family: ModelFamily, architecture: Any, config: NativeConfig) -> str:
    """What keeps a model from computing shared prefixes once; empty where nothing does."""
    reasons = {
        f"share_prefixes={config.share_prefixes!r}": config.share_prefixes == "off",
        f"cp={config.parallel.cp}": config.parallel.cp > 1,
        f"model={family.name!r}": family.why_unshared is None,
    }
    found = [reason for reason, holds in reasons.items() if holds]
    if family.why_unshared is not None and (why := family.why_unshared(architecture, config.model_cfg)):
        found.append(why)
    return ", ".join(found)


def has_last_stage(config: NativeConfig, pp_rank: int) -> bool:
    """Whether the loss is computed on ``pp_rank``."""
    found = algorithm(config)
    # With stages in the shape of a V that is the first rank.
    return found is None or found.placement(config.parallel.pp, config.parallel.vpp)[-1] == pp_rank


def model_stages(family: ModelFamily, architecture: Any, config: NativeConfig, pp_rank: int) -> dict[int, ModelStage]:
    """Number -> what is in it, of the stages that ``pp_rank`` has; raises :class:`ConfigError` for layers that do not fit
    them.
    """
    parallel = config.parallel
    found = algorithm(config)
    if found is None or family.num_layers is None:
        if config.pipeline_layers is not None:
            raise ConfigError.of(
                "NativeConfig.pipeline_layers", config.pipeline_layers, "without a pipeline there are no stages"
            )
        return {}
    placement = found.placement(parallel.pp, parallel.vpp)
    layers = split_layers(family.num_layers(architecture), len(placement), config.pipeline_layers)
    last = len(placement) - 1
    return {
        stage: ModelStage(first=stage == 0, layers=layers[stage], last=stage == last)
        for stage, rank in enumerate(placement)
        if rank == pp_rank
    }


def check_config(config: RuntimeConfig) -> None:
    """:func:`check_model_layout` of the directory ``config.hf_path``."""
    native = config.options(NativeConfig)
    hf_config = read_hf_config(config.hf_path)
    family = find_model(native.model, hf_config)
    check_model_layout(family, family.architecture(hf_config, native.model_cfg), native)


def check_weights(config: RuntimeConfig, head: Head) -> None:
    """Refuses a directory whose weight files a model cannot be filled from, by their headers.

    Raises:
        CheckpointError: files that are missing or damaged, or tensors that are missing, surplus or of another shape.
        UnsupportedError: the model, or the head.
    """
    model = describe_model(config.hf_path, config.options(NativeConfig), head)
    with torch.device("meta"):
        module = model.family.build(model.architecture, model.settings)
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    in_directory = with_stored_copies(config.hf_path, model.weight_names)
    names = {name: stored for name, stored in in_directory.items() if name in shapes}
    reader = HFReader(config.hf_path)
    absent = set(VALUE_HEAD_WEIGHTS) - reader.infos.keys() if head == "values" else set()
    shapes = {name: shapes[name] for name in names}
    kept = model.family.kept_prefixes(model.architecture)
    check_tensors(reader, shapes, names, absent, model.family.stored_buffers, frozenset(stored_names(names)), kept)


def check_model_layout(family: ModelFamily, architecture: Any, native: NativeConfig) -> None:
    """Raises :class:`ConfigError` for a layout or a head in float32 that the family does not have, whose sizes do not divide
    the model, or with a stage that cannot begin where it does; for layers that cannot be compiled, and gradients that
    cannot be reduced in every backward pass.
    """
    splits = splits_backward(native)
    if native.compile:
        _check_compiled(family, native, splits_backward=splits)
    if native.reduce_gradients == "per_micro_batch" and splits:
        raise ConfigError.of(
            "NativeConfig.reduce_gradients",
            native.reduce_gradients,
            f"pipeline_schedule={native.pipeline_schedule!r} computes all gradients of a stage's weights at one time; "
            "use 'once', or a schedule that does not split backward passes: '1f1b' or 'interleaved-1f1b'",
        )
    if native.head_in_float32 and not family.float32_head:
        raise ConfigError.of(
            "NativeConfig.head_in_float32",
            native.head_in_float32,
            f"model family {family.name!r} computes its head in param_dtype; use False, or keep its ends in float32 and say "
            "so with ModelFamily.float32_head",
        )
    if family.check_layout is None:
        _require_one(family, native.parallel, native.parallel.model_dump(), "check_layout")
    else:
        family.check_layout(architecture, native.parallel)
    if family.num_layers is None:
        _require_one(family, native.parallel, ("pp", "vpp"), "num_layers")
        if native.pipeline_schedule != "auto":
            raise ConfigError.of(
                "NativeConfig.pipeline_schedule",
                native.pipeline_schedule,
                f"model family {family.name!r} has no stages; use 'auto', or build them and say so with "
                "ModelFamily.num_layers",
            )
    # Of every rank, so that all refuse the same.
    for pp_rank in range(native.parallel.pp):
        for stage in model_stages(family, architecture, native, pp_rank).values():
            if isinstance(architecture, DecoderSpec):
                architecture.require_stage(stage.layers)


def _check_compiled(family: ModelFamily, native: NativeConfig, *, splits_backward: bool) -> None:
    reasons = {
        f"pipeline_schedule={native.pipeline_schedule!r} puts gradients of weights off, which compiled code "
        "computes together with those of inputs": splits_backward,
        f"model family {family.name!r} does not say ModelFamily.compiles": not family.compiles,
        "activation_checkpointing='selective' chooses among operations, and a compiled layer is one": (
            native.activation_checkpointing == "selective"
        ),
    }
    if found := [reason for reason, holds in reasons.items() if holds]:
        raise ConfigError.of("NativeConfig.compile", True, f"{', and '.join(found)}; change that, or leave it out")


def _require_one(family: ModelFamily, parallel: ParallelConfig, names: Iterable[str], missing: str) -> None:
    instead = f"use 1, or do it in its parallelize and build, and say so with ModelFamily.{missing}"
    problem, sizes = f"model family {family.name!r} is not laid out like that; {instead}", parallel.model_dump()
    ConfigError.refuse_all((f"ParallelConfig.{name}", sizes[name], problem) for name in names if sizes[name] != 1)


class TensorLayout(NamedTuple):
    """The layout of a parameter, which every rank knows, even of one of another pipeline stage."""

    shards: ShardLayout
    dtype: torch.dtype
    in_float32: bool = False  # it is computed with in float32, whatever the dtype of the rest


def model_layouts(
    parameters: Mapping[str, Tensor], groups: ParallelGroups, in_float32: Collection[str] = ()
) -> dict[str, TensorLayout]:
    """The layout of every parameter of the model. With a pipeline a collective over its stages.

    Args:
        parameters: name in the module -> parameter of this rank.
        in_float32: names of those that are computed with in float32.

    Raises:
        UnsupportedError: a parameter that is not laid out over all ranks of its stage.
    """
    ranks = groups.mesh.mesh.flatten().tolist()
    layouts = {name: TensorLayout(layout_of(value), value.dtype, name in in_float32) for name, value in parameters.items()}
    for name, layout in layouts.items():
        if sorted(layout.shards.ranks) != sorted(ranks):
            raise UnsupportedError(
                f"{name} is laid out over the ranks {layout.shards.ranks} of {tuple(ranks)}; parallelize must lay it out "
                "over all of them, as copies where it is not cut, so that every rank knows where it is",
                parameter=name,
            )
    return {name: layout for stage in gather_objects(layouts, groups.pp_group) for name, layout in stage.items()}
