"""Checks that a run fits into the memory of this machine, by :mod:`rl_backend.lab.plan`."""

from __future__ import annotations

import torch
import torch.distributed as dist

from actors.checks.machine import OF_A_CLUSTER, is_on_cluster
from actors.checks.model import find_layout, runtime_of
from actors.options.config import RunModel
from actors.options.policy_options import tenant_config
from actors.options.sampled_config import RunConfig, SampledConfig
from actors.rollout.config import positions_of
from rl_backend.contracts import BatchError, ConfigError, NativeConfig, RLBackendError, UnsupportedError
from rl_backend.lab.doctor.machine import read_memory
from rl_backend.lab.plan.make import GIB, Plan, make_plan
from rl_backend.lab.plan.memory import Workload
from rl_backend.options.option_set import has
from rl_backend.runtime.native.layout import micro_batch_multiple


def find_memory(config: RunConfig) -> str:
    """Estimates what ranks and engines take; refuses what is held at all times and more than this machine has."""
    if is_on_cluster():
        return f"memory and devices {OF_A_CLUSTER}"
    if dist.is_initialized():
        return "is not estimated in a process that has a process group"
    gpus = torch.cuda.device_count()
    # The check of the layout says what is wrong with it.
    try:
        find_layout(config)
    except RLBackendError:
        return "is not estimated of a layout that does not fit the model"
    try:
        plans = {model: _plan(config, model, gpus) for model in config.models()}
    except (UnsupportedError, BatchError) as error:
        return f"is not estimated: {error}"
    device = torch.cuda.get_device_properties(0).total_memory if gpus else read_memory()[0]
    held, most = _bytes(config, plans, gpus, held=True), _bytes(config, plans, gpus, held=False)
    has = f"{'a GPU' if gpus else 'this machine'} has {device / GIB:.2f} GiB"
    if held > device:
        raise ConfigError.of(
            f"{type(config).__name__}.model",
            config.model,
            f"parameters, gradients, moments{'' if gpus else ' and engines'} take {held / GIB:.2f} GiB, and {has}; use a "
            f"smaller model, more {'ranks' if gpus else 'memory'}, or lora.rank=16 (rl-backend plan shows what takes it)",
        )
    return f"training takes up to {most / GIB:.2f} GiB in full micro-batches, {has}"


def _plan(config: RunConfig, model: RunModel, gpus: int) -> Plan:
    runtime, options = runtime_of(config, model), config.train.backend_cfg
    dtype = config.dtype if config.dtype != "auto" else "bfloat16" if gpus else "float32"
    changes: dict[str, object] = {} if gpus else {"device": "cpu"}
    if has(options, "param_dtype") and not options.is_set("param_dtype"):
        changes["param_dtype"] = dtype
    runtime = runtime.replace(
        backend_cfg=options.replace(**{name: to for name, to in changes.items() if has(options, name)})
    )
    tokens = runtime.max_tokens_per_micro_batch
    multiple = micro_batch_multiple(options) if isinstance(options, NativeConfig) else 1
    lora = {"tenants": 1, "lora": tenant_config(config.lora)} if config.lora.rank else {}
    work = Workload(
        sequence_length=min(filter(None, (config.longest_sequence, positions_of(model.path), tokens))),
        micro_batch_tokens=tokens,
        num_micro_batches=max(multiple, config.parallel.pp),
        head="log_probs" if lora else model.head,
        sync_dtype=dtype,
        **lora,
    )
    return make_plan(runtime, config.ranks, work)


def _bytes(config: RunConfig, plans: dict[RunModel, Plan], gpus: int, *, held: bool) -> int:
    """Of the GPU that has most, or of all processes; ``held`` without what the work of a step takes."""
    # Models of a group hold memory together, but run one after the other.
    groups = [0] * config.training_groups
    passes = [0] * config.training_groups
    for model, plan in plans.items():
        group, copies = min(model.group, len(groups) - 1), plan.num_ranks // len(plan.ranks)
        sizes = [(rank.weights if model.forward_only else rank.total("optimizer_step", ()), rank) for rank in plan.ranks]
        peaks = [rank.total("training", ()) - rank.total("rollout", ()) for _, rank in sizes]
        groups[group] += max(size for size, _ in sizes) if gpus else copies * sum(size for size, _ in sizes)
        passes[group] = max(passes[group], max(peaks) if gpus else copies * sum(peaks))
    if not held:
        groups = [size + work for size, work in zip(groups, passes, strict=True)]
    if gpus:
        return max(groups)
    if not isinstance(config, SampledConfig):
        return sum(groups)
    engine = next(iter(plans.values())).sync_bytes + int((config.rollout.kv_cache_gib or 1.0) * GIB)
    return sum(groups) + config.num_engines * engine
