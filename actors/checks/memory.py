"""Memory of a run on this machine, by :mod:`rl_backend.lab.plan`: the micro-batch that fits, and whether a run fits."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from actors.checks.machine import OF_A_CLUSTER, is_on_cluster
from actors.checks.model import find_layout, runtime_of
from actors.cluster.placement import ClusterShare
from actors.options.config import CHECKPOINTING, MICRO_BATCH, MOST_TOKENS, REDUCTION, RunModel, with_options
from actors.options.policy_options import tenant_config
from actors.options.sampled_config import RLConfig, RunConfig, SampledConfig
from actors.rollout.config import positions_of
from actors.rollout.placement import with_share
from rl_backend.contracts import BatchError, ConfigError, NativeConfig, RLBackendError, RuntimeConfig, UnsupportedError
from rl_backend.data.prefixes import KEYS_OF_A_TOKEN
from rl_backend.lab.doctor.machine import read_memory
from rl_backend.lab.plan.make import GIB, Plan, make_plan
from rl_backend.lab.plan.memory import RankMemory, Workload
from rl_backend.options.option_set import get, gives, has
from rl_backend.runtime.native.layout import micro_batch_multiple, splits_backward

ALMOST_FULL = 0.8
"""Share of the free memory that a run takes without a warning."""

WARNING = "warning: "
"""Begins what a check finds, where the run may start all the same."""

# Micro-batches below this cost time: gradients are reduced more often and layers recomputed before they get smaller, unless
# sequences are shorter still.
# Larger ones gain nothing on CPUs but take memory.
_FEW_TOKENS = 2048

# Bytes of a process beside its tensors, measured: PyTorch and Ray in a rank, vLLM 0.30 in an engine on a CPU.
_RANK, _ENGINE = int(0.4 * GIB), int(1.2 * GIB)


@dataclass(frozen=True)
class Choice:
    """Options that a run takes from the memory that is free, and what it says of them in its first lines."""

    config: Any
    facts: tuple[str, ...] = ()


def choose_micro_batch(config: RunConfig, kept: Mapping[str, Any]) -> Choice:
    """The largest micro-batch, of at most ``MOST_TOKENS`` (2,048 on CPUs), for which ``ALMOST_FULL`` of the free memory is
    enough.

    A given value wins, then one that is ``kept``, as :func:`chosen_options` had it. Where micro-batches would otherwise
    become small, gradients are reduced after each, then layers are recomputed in part, and then as a whole. Where nothing
    can be estimated the options stay as they are.
    """
    if gives(config, MICRO_BATCH):
        return Choice(config)
    if kept:
        # The run may go on in the other runtime, or with a schedule that never reduces in between.
        fitting = {place: value for place, value in kept.items() if has(config, place) and not gives(config, place)}
        options = config.train.backend_cfg
        if isinstance(options, NativeConfig) and splits_backward(options):
            fitting.pop(REDUCTION, None)
        return Choice(with_options(config, fitting))
    try:
        return _choice(config)
    except RLBackendError:
        # The checks say what is wrong.
        return Choice(config)


def _choice(config: RunConfig) -> Choice:
    gpus = torch.cuda.device_count()
    if _why_not(config) or isinstance(plans := _plans(config, gpus), str):
        return Choice(config)
    room = ALMOST_FULL * _free(config, gpus)
    longest = config.longest_sequence or min(filter(None, (positions_of(config.model), MOST_TOKENS)))
    wanted = MOST_TOKENS if gpus else max(_FEW_TOKENS, longest)
    kinds = _kinds(config, plans)
    for changes in kinds:
        if changes:
            plans = _plans(with_options(config, changes), gpus)
            assert not isinstance(plans, str), "the same layout was planned before"
        fixed, most = (_bytes(config, plans, gpus, of_pass) for of_pass in (_of_any_tokens, _of_pass))
        planned = max(plan.workload.micro_batch_tokens for plan in plans.values())
        # The rest of what passes take grows with their tokens.
        tokens = wanted if most <= room else min(wanted, int((room - fixed) / (most - fixed) * planned))
        least = longest if changes is kinds[-1] else max(longest, min(_FEW_TOKENS, planned))
        if tokens >= least:
            break
    tokens = max(longest, 1 << max(tokens, 1).bit_length() - 1)
    config = with_options(config, {MICRO_BATCH: tokens, **changes})
    if tokens >= wanted and not changes:
        return Choice(config)
    done = "".join(f", {_SAID[each]}" for each in changes.items())
    return Choice(config, (f"micro-batches of {tokens} tokens{done} ({room / ALMOST_FULL / GIB:.1f} GiB are free)",))


_SAID = {
    (REDUCTION, "per_micro_batch"): "gradients reduced after each",
    (CHECKPOINTING, "selective"): "layers recomputed in part",
    (CHECKPOINTING, "full"): "layers recomputed",
}


def _kinds(config: RunConfig, plans: Mapping[RunModel, Plan]) -> list[dict[str, str]]:
    """Options that take less memory and more time, of what is not given: none first, and the most last."""
    kinds: list[dict[str, str]] = [{}]
    if not gives(config, REDUCTION) and _keeps_whole_gradients(config, plans):
        kinds.append({REDUCTION: "per_micro_batch"})
    if has(config, CHECKPOINTING) and not gives(config, CHECKPOINTING):
        # Within a compiled layer there is no choice among operations.
        compiled = getattr(config.train.backend_cfg, "compile", False)
        kinds += [{**kinds[-1], CHECKPOINTING: value} for value in (("full",) if compiled else ("selective", "full"))]
    return kinds


def _keeps_whole_gradients(config: RunConfig, plans: Mapping[RunModel, Plan]) -> bool:
    """Whether memory is free once gradients are reduced after every micro-batch, which not all schedules can."""
    options = config.train.backend_cfg
    if not isinstance(options, NativeConfig) or options.reduce_gradients != "once" or splits_backward(options):
        return False
    return any(rank.unreduced_gradients for plan in plans.values() for rank in plan.ranks)


def chosen_options(config: RunConfig) -> dict[str, Any]:
    """What a run that continues must keep of the choice: sums of other micro-batches are rounded differently."""
    return {place: get(config, place) for place in (MICRO_BATCH, REDUCTION, CHECKPOINTING) if has(config, place)}


def find_memory(config: RunConfig) -> str:
    """Estimates what ranks and engines take; refuses what will not fit into the memory that is free."""
    if reason := _why_not(config):
        return reason
    gpus = torch.cuda.device_count()
    plans = _plans(config, gpus)
    if isinstance(plans, str):
        return plans
    free = _free(config, gpus)
    held, fixed, most = (_bytes(config, plans, gpus, of_pass) for of_pass in (None, _of_any_tokens, _of_pass))
    whose = f"a GPU has {free / GIB:.2f} GiB" if gpus else f"this machine has {free / GIB:.2f} GiB free"
    name = type(config).__name__
    if held > free:
        raise ConfigError.of(
            f"{name}.model",
            config.model,
            f"parameters, gradients, moments{'' if gpus else ' and engines'} take {held / GIB:.2f} GiB, and {whose}; use a "
            f"smaller model, more {'ranks' if gpus else 'memory'}, or lora.rank=16 (rl-backend plan shows what takes it)",
        )
    tokens = max(plan.workload.micro_batch_tokens for plan in plans.values())
    takes = f"training takes up to {most / GIB:.2f} GiB in micro-batches of {tokens} tokens"
    if most <= ALMOST_FULL * free:
        return f"{takes}, {whose}"
    if most > free:
        fitting = (free - fixed) * tokens // (most - fixed)
        remedies = [f"use at most {fitting}"] if fitting >= (config.longest_sequence or 1) else []
        if _keeps_whole_gradients(config, plans):
            remedies.append("reduce_gradients=per_micro_batch")
        if has(config, CHECKPOINTING) and get(config, CHECKPOINTING) != "full":
            remedies.append("activation_checkpointing=full")
        remedy = ", or ".join([*remedies, "free memory" if not gpus else "more ranks"])
        problem = f"{takes}, and {whose}; {remedy} (rl-backend plan shows what takes it)"
        raise ConfigError.of(f"{name}.max_tokens_per_micro_batch", get(config, MICRO_BATCH), problem)
    advice = "lower max_tokens_per_micro_batch if others need memory too"
    return f"{WARNING}{takes}, which is {most / free:.0%} of it: {whose}; {advice}"


def _why_not(config: RunConfig) -> str:
    """Why nothing can be estimated; empty where it can."""
    if is_on_cluster():
        return f"memory and devices {OF_A_CLUSTER}"
    if dist.is_initialized():
        return "is not estimated in a process that has a process group"
    # The check of the layout says what is wrong with it.
    try:
        find_layout(config)
    except RLBackendError:
        return "is not estimated of a layout that does not fit the model"
    return ""


def _free(config: RunConfig, gpus: int) -> int:
    """Bytes for a run: on this machine, or on one GPU."""
    if not gpus:
        return read_memory()[1]
    total = int(torch.cuda.get_device_properties(0).total_memory)
    if not isinstance(config, SampledConfig) or config.colocates or gpus > 1 or config.rollout.kv_cache_gib is not None:
        return total
    # A rank and an engine share the only one.
    engine = with_share(config.rollout, ClusterShare(1, 1, 0.5))
    return int(total * (1 - engine.gpu_memory_utilization))


def _plans(config: RunConfig, gpus: int) -> dict[RunModel, Plan] | str:
    """Of each model; or why there is none."""
    try:
        return {model: _plan(config, model, gpus) for model in config.models()}
    except (UnsupportedError, BatchError) as error:
        return f"is not estimated: {error}"


def _plan(config: RunConfig, model: RunModel, gpus: int) -> Plan:
    runtime, options = runtime_of(config, model), config.train.backend_cfg
    dtype = config.dtype if config.dtype != "auto" else "bfloat16" if gpus else "float32"
    changes: dict[str, object] = {} if gpus else {"device": "cpu"}
    if has(options, "param_dtype") and not options.is_set("param_dtype"):
        changes["param_dtype"] = dtype
    options = options.replace(**{name: to for name, to in changes.items() if has(options, name)})
    runtime = runtime.replace(backend_cfg=options)
    tokens = min(filter(None, (runtime.max_tokens_per_micro_batch, _tokens_of_an_update(config))))
    multiple = micro_batch_multiple(options) if isinstance(options, NativeConfig) else 1
    lora = {"tenants": 1, "lora": tenant_config(config.lora)} if config.lora.rank else {}
    work = Workload(
        sequence_length=min(filter(None, (config.longest_sequence, positions_of(model.path), tokens))),
        micro_batch_tokens=tokens,
        # Two at least: gradients of more than one are kept between them.
        num_micro_batches=max(multiple, config.parallel.pp, 2),
        head="log_probs" if lora else model.head,
        sync_dtype=dtype,
        **lora,
    )
    if isinstance(config, RLConfig):
        # Attention keeps the keys and values of a prompt for each of its samples, most with answers so short that a
        # micro-batch has as many keys as it may.
        prompt, n = min(config.max_prompt_tokens, work.sequence_length - 1), config.sampling.n
        shares = isinstance(options, NativeConfig) and options.share_prefixes == "auto"
        if shares and (more := n + 1 - KEYS_OF_A_TOKEN) > 0:
            answer = max(prompt * more // (n * (KEYS_OF_A_TOKEN - 1)), 1)
            work = work.replace(sequence_length=min(work.sequence_length, prompt + answer))
        work = work.replace(prompt_length=prompt, samples_per_prompt=n, trains_prompts=True)
    return _make_plan(runtime, config.ranks, work)


def _tokens_of_an_update(config: RunConfig) -> int | None:
    """The most that a rank's micro-batches of one optimizer step can have together; None where data alone decide."""
    if not isinstance(config, SampledConfig):
        return None
    return -(-config.sequences_per_update // config.data_parallel_size) * config.longest_sequence


def _make_plan(runtime: RuntimeConfig, ranks: int, work: Workload) -> Plan:
    # The choice and the check ask for the same plans, which take seconds.
    key = runtime.model_dump_json(), ranks, work.model_dump_json()
    if key not in _known:
        _known[key] = make_plan(runtime, ranks, work)
    return _known[key]


_known: dict[tuple[str, int, str], Plan] = {}


def _of_pass(rank: RankMemory) -> int:
    return rank.total("training", ()) - rank.total("rollout", ())


def _of_any_tokens(rank: RankMemory) -> int:
    """Of a pass, what a micro-batch takes however small it is."""
    return rank.unreduced_gradients + rank.gathered_parameters


def _bytes(
    config: RunConfig, plans: Mapping[RunModel, Plan], gpus: int, of_pass: Callable[[RankMemory], int] | None = None
) -> int:
    """Of the GPU that has most, or of all processes: what is held, and ``of_pass`` of a rank on top of it."""
    # Models of a group hold memory together, but run one after the other.
    groups = [0 if gpus else config.ranks * _RANK] * config.training_groups
    passes = [0] * config.training_groups
    for model, plan in plans.items():
        group, copies = min(model.group, len(groups) - 1), plan.num_ranks // len(plan.ranks)
        sizes = [(rank.weights if model.forward_only else rank.total("optimizer_step", ()), rank) for rank in plan.ranks]
        peaks = [0 if of_pass is None else of_pass(rank) for _, rank in sizes]
        groups[group] += max(size for size, _ in sizes) if gpus else copies * sum(size for size, _ in sizes)
        passes[group] = max(passes[group], max(peaks) if gpus else copies * sum(peaks))
        if config.recover == "memory" and not gpus and not model.forward_only:
            groups[group] += 2 * plan.state_bytes
    groups = [size + work for size, work in zip(groups, passes, strict=True)]
    if gpus:
        return max(groups)
    if not isinstance(config, SampledConfig):
        return sum(groups)
    weights = next(iter(plans.values())).sync_bytes
    engine = weights + int((config.rollout.kv_cache_gib or 1.0) * GIB) + _ENGINE
    # A push leaves the weights in shared memory.
    return sum(groups) + config.num_engines * engine + weights
