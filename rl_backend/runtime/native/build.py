"""Building a model for one rank: on the meta device, sharded, then filled from the rank's own part of the files."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from rl_backend.checkpoint.hf_weights import load_weights, with_stored_copies
from rl_backend.contracts import (
    VALUE_HEAD_WEIGHTS,
    ConfigError,
    Head,
    NativeConfig,
    PackedWeight,
    RuntimeConfig,
    UnsupportedError,
    WeightName,
    stored_names,
    text_config,
)
from rl_backend.model import BuildSettings, ModelFamily, ModelStage
from rl_backend.model.options import DecoderOptions
from rl_backend.parallel.groups import ParallelGroups
from rl_backend.primitive.backward import put_off_in_linear_layers
from rl_backend.primitive.float32 import parameters_in_float32, round_parameters
from rl_backend.runtime.native import layout
from rl_backend.runtime.native.adapters import adaptable_modules, attach_adapters
from rl_backend.runtime.native.handle import NativeHandle
from rl_backend.runtime.native.optimizer import NativeOptimizer
from rl_backend.runtime.native.routers import expert_balance


def build_handle(
    config: RuntimeConfig,
    groups: ParallelGroups,
    *,
    forward_only: bool,
    adaptable: bool,
    name: str,
    head: Head,
    has_outputs: bool,
) -> NativeHandle:
    """Builds the model of ``config.hf_path``."""
    native = config.options(NativeConfig)
    family, architecture, hf_config, settings = described = layout.describe_model(config.hf_path, native, head)
    layout.check_model_layout(family, architecture, native)
    if adaptable and native.compile:
        raise ConfigError.of(
            "NativeConfig.compile",
            True,
            f"{name!r} is for LoRA tenants, whose updates must be the same to the bit alone and beside others, which "
            "compiled code does not promise; leave it out",
        )
    parts = layout.model_stages(family, architecture, native, groups.pp_group.rank())

    whole_names = with_stored_copies(config.hf_path, described.weight_names)

    def build(stage: ModelStage | None) -> nn.Module:
        own = settings._replace(stage=stage)
        return build_module(family, architecture, own, groups, native, forward_only, whole_names if adaptable else None)

    stages = {number: build(stage) for number, stage in parts.items()}
    modules = list(stages.values()) or [build(None)]
    # One module for FSDP's root and for offloading, however many stages.
    model = nn.ModuleList(modules) if stages else modules[0]
    model.train(not forward_only)
    # Copies last: checkpoints and exports fill them from their originals.
    parameters = _parameters(modules, family, whole_names)
    in_float32 = frozenset(chain.from_iterable(map(parameters_in_float32, modules)))
    layouts = layout.model_layouts(parameters, groups, in_float32)
    if absent := sorted(whole_names.keys() - layouts.keys()):
        raise UnsupportedError(
            f"weight_names of model family {family.name!r} names {absent[:4]}, which are not in the model", parameters=absent
        )
    stage_copies = {copy: original for copy, original in family.stage_copies.items() if copy in layouts}
    names = {name: whole_names[stage_copies.get(name, name)] for name in parameters}
    kept = load_weights(
        config.hf_path,
        parameters,
        names,
        zero_if_absent=VALUE_HEAD_WEIGHTS if head == "values" else (),
        stored_buffers=family.stored_buffers,
        elsewhere=stored_names(whole_names),
        kept=family.kept_prefixes(architecture),
    )
    by_stage = stages or {0: model}
    optimizer, offered = None, None
    if not forward_only:
        # After the weights: its masters are the parameters.
        rate = DecoderOptions.of(settings.options).expert_bias_rate
        balance = expert_balance(by_stage, rate, groups) if rate else None
        optimizer = NativeOptimizer(native.optimizer, parameters, names, groups, copies=stage_copies, balance=balance)
    if adaptable:
        hidden_size = text_config(hf_config)["hidden_size"]
        offered = adaptable_modules(by_stage, whole_names, groups, native.model_cfg, hidden_size)
    return NativeHandle(
        name=name,
        forward_only=forward_only,
        head=head,
        config=config,
        groups=groups,
        family=family,
        architecture=architecture,
        hf_config=hf_config,
        kept=kept,
        vocab_size=text_config(hf_config)["vocab_size"],
        max_length=family.positions(architecture, hf_config),
        model=model,
        stages=stages,
        micro_batch_multiple=layout.micro_batch_multiple(native),
        shares_prefixes=not layout.why_unshared(family, architecture, native),
        has_outputs=has_outputs,
        stage_copies=stage_copies,
        parameters=parameters,
        weight_names=whole_names,
        layouts={name: layouts[name] for name in whole_names},
        adaptable=offered,
        optimizer=optimizer,
    )


def build_module(
    family: ModelFamily,
    architecture: Any,
    settings: BuildSettings,
    groups: ParallelGroups,
    native: NativeConfig,
    forward_only: bool,
    adapted_names: Mapping[str, WeightName] | None = None,
) -> nn.Module:
    """A stage, or the whole model, laid out on ``groups.device``, with storage that is not filled.

    ``adapted_names`` are the family's ``weight_names``, to let adapters work beside linear layers.
    """
    with torch.device("meta"):
        module = family.build(architecture, settings)
    if adapted_names is not None:
        attach_adapters(module, adapted_names)
    schedule = layout.algorithm(native)
    if forward_only:
        # What a trained model computes with after each gather: both give the same outputs from the same weights.
        round_parameters(module, getattr(torch, native.param_dtype))
        module.requires_grad_(False)
    elif schedule is not None and schedule.splits_backward:
        # Before the layout: FSDP2 and tensor parallelism wrap what forward is then.
        put_off_in_linear_layers(module)
    family.parallelize(module, groups, native)
    return module.to_empty(device=groups.device)


def _parameters(
    modules: Sequence[nn.Module], family: ModelFamily, weight_names: Mapping[str, WeightName]
) -> dict[str, nn.Parameter]:
    found = {name: parameter for module in modules for name, parameter in module.named_parameters()}
    problems = []
    # Models are built on the meta device, where buffers have no contents.
    if buffers := sorted(name for module in modules for name, _ in module.named_buffers()):
        problems.append(f"it has the buffers {', '.join(buffers[:4])}; compute them in forward")
    if unnamed := found.keys() - weight_names.keys() - family.stage_copies.keys():
        problems.append(f"its weight_names does not cover its parameters: without a name {sorted(unnamed)[:4]}")
    problems += [
        f"its weight_names packs {packed.shape} tensors into {name}, which has shape {tuple(found[name].shape)}; the first "
        "dimensions must be the same"
        for name, packed in weight_names.items()
        if isinstance(packed, PackedWeight)
        and name in found
        and tuple(found[name].shape[: len(packed.shape)]) != packed.shape
    ]
    if problems:
        raise UnsupportedError(f"model family {family.name!r}: {'; '.join(problems)}")
    order = (*weight_names, *family.stage_copies)
    return {name: found[name] for name in order if name in found}
