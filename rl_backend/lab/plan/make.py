"""Plans: what a configuration takes on each rank, layouts that fit a device, and both as text and JSON."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from rl_backend.checkpoint.hf_reader import read_hf_config
from rl_backend.contracts import (
    BackendConfig,
    BatchError,
    ConfigError,
    NativeConfig,
    ParallelConfig,
    RuntimeConfig,
    UnsupportedError,
)
from rl_backend.lab.plan.bridge import bridge_memory
from rl_backend.lab.plan.memory import COMPONENTS, PHASES, Phase, RankMemory, Workload
from rl_backend.lab.plan.native import (
    MASTER_BYTES,
    accumulates_whole,
    engine_slot_bytes,
    native_memory,
    why_prompts_are_repeated,
)
from rl_backend.lab.text import count, table
from rl_backend.model import find_model, model_positions
from rl_backend.model.blocks import CacheBytes
from rl_backend.model.decoder_spec import DecoderSpec
from rl_backend.runtime.bridge.config import BridgeConfig
from rl_backend.runtime.native.layout import describe_model
from rl_backend.runtime.registry import check_config

GPUS_OF_A_NODE = 8
GIB = 2**30

# Of a weight and its moments, in float32; and of the token fields of a loss, roughly.
_STATE_BYTES, _TOKEN_BYTES = 12, 32

COLUMNS = "{:24}" + "{:>16}" * len(PHASES)


@dataclass(frozen=True)
class Plan:
    """Attributes:
    data_parallel_size: what the layout leaves of the ranks.
    ranks: memory of each pipeline rank.
    sync_bytes: of all weights that one weight sync sends.
    engine_slots: bytes that each vLLM engine takes for the adapters of LoRA tenants.
    repeats_prompts: why prompts are computed for each of their samples; empty where they are computed once.
    sequence_cache: what an engine keeps of one sequence while it generates; None where the model does not say.
    count_sent: takes time that few plans need; see ``sync_sent``.
    """

    config: RuntimeConfig
    num_ranks: int
    workload: Workload
    data_parallel_size: int
    ranks: Sequence[RankMemory]
    sync_bytes: int
    engine_slots: int = 0
    repeats_prompts: str = ""
    sequence_cache: CacheBytes | None = None
    count_sent: Callable[[], Sequence[int]] = tuple

    @cached_property
    def sync_sent(self) -> Sequence[int]:
        """Bytes of a weight sync that each rank sends, through shared memory or gloo."""
        return self.count_sent()

    @property
    def layout(self) -> dict[str, int]:
        return {"dp": self.data_parallel_size, **self.config.backend_cfg.parallel.model_dump()}

    @property
    def num_parameters(self) -> int:
        return self.sync_bytes // int(getattr(torch, self.workload.sync_dtype).itemsize)

    @property
    def state_bytes(self) -> int:
        """Of what is trained and its optimizer, on all ranks together: a checkpoint, or a boundary in memory."""
        if self.workload.tenants:
            # Three of the four numbers that a rank has of each weight: not the gradient.
            return sum(rank.adapters for rank in self.ranks) * 3 // 4
        return self.num_parameters * _STATE_BYTES

    @property
    def step_bytes(self) -> int:
        """Of the data of a step, which a driver keeps to run it again."""
        work = self.workload
        return self.data_parallel_size * work.num_micro_batches * self.sequence_tokens * _TOKEN_BYTES

    @property
    def sequence_tokens(self) -> int:
        """Of all sequences of a micro-batch: more than are computed where prompts are computed once."""
        return self.workload.micro_batch(shares_prompts=not self.repeats_prompts).num_tokens

    def sync_seconds(self, link_gib: float) -> tuple[float, float]:
        """Of the rank that sends most in a weight sync over gloo, and of an engine's host; links have ``link_gib`` GiB/s."""
        return max(self.sync_sent) / GIB / link_gib, self.sync_bytes / GIB / link_gib

    def largest(self, phase: Phase) -> RankMemory:
        return max(self.ranks, key=lambda rank: rank.total(phase, self.workload.offload))

    def peak(self, phase: Phase) -> int:
        return self.largest(phase).total(phase, self.workload.offload)

    def phases_over(self, device_bytes: int) -> list[Phase]:
        return [phase for phase in PHASES if self.peak(phase) > device_bytes]


def make_plan(config: RuntimeConfig, num_ranks: int, workload: Workload) -> Plan:
    """What ``config`` takes on ``num_ranks`` ranks. Reads ``config.json`` alone and needs no device.

    Raises:
        ConfigError: a layout that does not fit, sequences longer than the model's positions, or a ``byte_budget`` that is
            too small.
        BatchError: a number of micro-batches that the pipeline schedule does not take.
        UnsupportedError: a model, a runtime or options that cannot be counted.
    """
    counted = {"native": native_memory, "bridge": bridge_memory}
    if config.backend not in counted:
        known = " and ".join(counted)
        raise UnsupportedError(f"RuntimeConfig.backend={config.backend!r}: a plan knows {known}", backend=config.backend)
    check_config(config, num_ranks)
    workload = _within_positions(workload, config)
    ranks, weights, sent = counted[config.backend](config, num_ranks, workload)
    slots = engine_slot_bytes(weights, config, workload) if workload.tenants else 0
    dp_size = config.backend_cfg.parallel.data_parallel_size(num_ranks)
    sync_bytes = sum(weight.nbytes for weight in weights)
    repeats = f"backend={config.backend!r}"
    if config.backend == "native":
        native = config.options(NativeConfig)
        repeats = why_prompts_are_repeated(describe_model(config.hf_path, native, workload.head), native, workload)
    cache = _sequence_cache(config, workload)
    return Plan(config, num_ranks, workload, dp_size, ranks, sync_bytes, slots, repeats, cache, sent)


def _within_positions(workload: Workload, config: RuntimeConfig) -> Workload:
    positions = model_positions(read_hf_config(config.hf_path), getattr(config.backend_cfg, "model", "auto"))
    if positions is None or workload.sequence_length <= positions:
        return workload
    if workload.is_set("sequence_length"):
        problem = f"the model has {positions} positions; use at most that"
        raise ConfigError.of("Workload.sequence_length", workload.sequence_length, problem)
    return workload.replace(sequence_length=positions)


def _sequence_cache(config: RuntimeConfig, workload: Workload) -> CacheBytes | None:
    hf_config = read_hf_config(config.hf_path)
    architecture = find_model(getattr(config.backend_cfg, "model", "auto"), hf_config).parse_config(hf_config)
    if not isinstance(architecture, DecoderSpec):
        return None
    return architecture.cache_bytes(workload.sequence_length, int(getattr(torch, workload.sync_dtype).itemsize))


def suggest_layout(plan: Plan, device_bytes: int) -> Plan | None:
    """The first that fits a device, or None: the given layout, then those in the order of :func:`candidate_layouts`; each as
    it is, and where ``reduce_gradients`` was not given with gradients reduced in every backward pass. All else stays.
    """
    if not plan.phases_over(device_bytes):
        return plan
    given = plan.config.backend_cfg
    others = [each for each in candidate_layouts(plan.config, plan.num_ranks) if each != given.parallel]
    for parallel in (given.parallel, *others):
        for options in _reductions(plan, given.replace(parallel=parallel)):
            if options == given or _least_bytes(plan, options) > device_bytes:
                continue
            try:
                other = make_plan(plan.config.replace(backend_cfg=options), plan.num_ranks, plan.workload)
            except (ConfigError, BatchError):
                continue
            if not other.phases_over(device_bytes):
                return other
    return None


def _reductions(plan: Plan, options: BackendConfig) -> list[BackendConfig]:
    # Of the plan's own: a configuration that was made from another has every field as given.
    given = "reduce_gradients" in plan.config.backend_cfg.model_fields_set
    if not isinstance(options, NativeConfig) or given or not any(rank.unreduced_gradients for rank in plan.ranks):
        return [options]
    return [options, options.replace(reduce_gradients="per_micro_batch")]


def _least_bytes(plan: Plan, options: BackendConfig) -> int:
    # What training takes at least, without the seconds that laying it out takes: an average rank's parameters.
    parallel, offload = options.parallel, plan.workload.offload
    if plan.workload.tenants:
        return 0  # the frozen model alone may be smaller than any bound on what is trained
    everywhere = plan.num_parameters / plan.num_ranks
    computed = plan.num_parameters / (parallel.pp * max(parallel.tp, parallel.ep * parallel.etp))
    moments = 0 if "optimizer" in offload else 2 * MASTER_BYTES * everywhere
    if isinstance(options, NativeConfig):
        accumulates = accumulates_whole(options, plan.workload) and plan.num_ranks > 1
        unreduced = getattr(torch, options.reduce_dtype).itemsize * computed if accumulates else 0
        return int(2 * MASTER_BYTES * everywhere + moments + unreduced)
    assert isinstance(options, BridgeConfig), "make_plan counts these two"
    return int((getattr(torch, options.param_dtype).itemsize + MASTER_BYTES) * computed + moments)


def candidate_layouts(config: RuntimeConfig, num_ranks: int) -> list[ParallelConfig]:
    """Layouts in order of preference, whether they fit the model or not; ``vpp`` and ``etp`` are the configuration's."""
    # Fewer ranks in a replica first, because data parallelism communicates least; then fewer pipeline ranks, which idle
    # between steps; then fewer context-parallel and expert-parallel ones. Tensor and expert parallelism stay inside a node.
    base = config.backend_cfg.parallel
    sizes = [size for size in range(1, num_ranks + 1) if num_ranks % size == 0]
    inside = [size for size in sizes if size <= GPUS_OF_A_NODE]
    found = [
        (tp * pp * cp, pp, cp, ep)
        for tp, pp, cp, ep in itertools.product(inside, sizes, sizes, inside)
        if num_ranks % (tp * pp * cp) == 0 and num_ranks % (pp * ep * base.etp) == 0
    ]
    return [base.replace(tp=replica // (pp * cp), pp=pp, cp=cp, ep=ep) for replica, pp, cp, ep in sorted(found)]


def as_text(plan: Plan, device_bytes: int | None, fitting: Plan | None, link_gib: Sequence[float] = ()) -> str:
    """A table, and sentences; ``link_gib`` are GiB/s of links that a weight sync may have."""
    work, peaks = plan.workload, {phase: plan.peak(phase) for phase in PHASES}
    most = max(peaks.values())
    unit, unit_bytes = ("GiB", GIB) if most >= GIB else ("MiB", 2**20)

    def amount(num_bytes: int) -> str:
        return f"{num_bytes / unit_bytes:.2f}"

    taken = [plan.largest(phase).phase(phase, work.offload) for phase in PHASES]
    used = [name for name in COMPONENTS if any(name in found for found in taken)]
    rows = [(name, *(amount(found[name]) if name in found else "" for found in taken)) for name in used]
    lines = [
        f"{plan.config.backend} on {count(plan.num_ranks, 'rank')}, {_layout_text(plan)}; {work.num_micro_batches} "
        f"micro-batches of {work.micro_batch_tokens} tokens in sequences of {work.sequence_length}",
        "",
        *_table(f"{unit} on the largest rank", [*rows, ("total", *map(amount, peaks.values()))]),
    ]
    if len(plan.ranks) > 1:
        sizes = [[rank.total(phase, work.offload) for phase in PHASES] for rank in plan.ranks]
        totals = [(str(index), *map(amount, each)) for index, each in enumerate(sizes)]
        lines += _table(f"{unit} of pipeline rank", totals)
    if work.samples_per_prompt > 1:
        lines.append(_prompts_text(plan))
    if plan.config.backend == "bridge":
        lines.append("activations are those of Megatron's own layers; Transformer Engine's keep less")
    if flops := max(rank.flops for rank in plan.ranks):
        unit_name, size = ("TFLOP", 1e12) if flops >= 1e12 else ("GFLOP", 1e9)
        lines.append(f"the busiest rank computes {flops / size:.2f} {unit_name} in a step, recomputed layers included")
    logits = max(rank.logits_chunk for rank in plan.ranks)
    if logits:
        lines.append(f"logits: {amount(logits)} {unit} at one time, in the workspace")
    lines.append(
        f"a weight sync sends {amount(plan.sync_bytes)} {unit} in {work.sync_dtype}; through shared memory "
        "or gloo it keeps as much of /dev/shm until it is closed, with changed_only also of the ranks' host memory"
    )
    if link_gib:
        lines.append(f"a rank sends at most {amount(max(plan.sync_sent))} {unit} of it, and each engine's host receives all")
    for gib in link_gib:
        lines.append(
            "at {:g} GiB/s a link takes {:.2f} s to send that, and {:.2f} s to receive".format(gib, *plan.sync_seconds(gib))
        )
    lines.append(
        f"with recover=memory the ranks' nodes keep two states of {amount(plan.state_bytes)} {unit} in host memory, other "
        f"nodes as much again, and the driver about {plan.step_bytes / 2**20:.1f} MiB of each step since"
    )
    if plan.sequence_cache is not None:
        whole, tokens, state = (f"{size / 2**20:.2f}" for size in (sum(plan.sequence_cache), *plan.sequence_cache))
        parts = f": {tokens} of keys and values, {state} of states, which do not grow" if plan.sequence_cache.state else ""
        lines.append(f"a vLLM engine keeps {whole} MiB of a sequence of {work.sequence_length} tokens{parts}")
    if plan.engine_slots:
        lines.append(
            f"each vLLM engine keeps {amount(plan.engine_slots)} {unit} for the adapters of {count(work.tenants, 'tenant')}"
        )
    if device_bytes is None:
        return "\n".join(lines)
    device = f"{amount(device_bytes)} {unit}"
    over = [f"{phase.replace('_', ' ')} needs {amount(peaks[phase])}" for phase in plan.phases_over(device_bytes)]
    if not over:
        return "\n".join([*lines, "", f"fits {device}, of which {amount(device_bytes - most)} are left"])
    remedy = (
        f"no layout of {count(plan.num_ranks, 'rank')} fits: take more ranks, smaller micro-batches, activation "
        "checkpointing, or offload more"
    )
    if fitting is not None:
        needed = max(fitting.peak(phase) for phase in PHASES)
        remedy = f"fits with {amount(needed)} {unit}: {_layout_text(fitting)}{_reduction_text(fitting, plan)}"
    return "\n".join([*lines, "", f"does not fit {device}: {', '.join(over)}", remedy])


def as_json(plan: Plan, device_bytes: int | None, fitting: Plan | None, link_gib: Sequence[float] = ()) -> dict[str, Any]:
    """Bytes per rank and phase."""
    offload, ranks_of_a_stage = plan.workload.offload, plan.num_ranks // len(plan.ranks)
    facts: dict[str, Any] = {
        "backend": plan.config.backend,
        "num_ranks": plan.num_ranks,
        "parallel": plan.layout,
        "reduce_gradients": getattr(plan.config.backend_cfg, "reduce_gradients", None),
        "workload": plan.workload.model_dump(),
        "sync_bytes": plan.sync_bytes,
        "sync_sent": list(plan.sync_sent),
        "sync_seconds": {
            f"{gib:g}": dict(zip(("send", "receive"), plan.sync_seconds(gib), strict=True)) for gib in link_gib
        },
        "engine_slots": plan.engine_slots,
        "state_bytes": plan.state_bytes,
        "step_bytes": plan.step_bytes,
        "sequence_tokens": plan.sequence_tokens,
        "sequence_cache": None if plan.sequence_cache is None else plan.sequence_cache._asdict(),
        "peak": {phase: plan.peak(phase) for phase in PHASES},
        "ranks": [
            {
                "pipeline_rank": index,
                "first_rank": index * ranks_of_a_stage,
                "num_ranks": ranks_of_a_stage,
                "phases": {phase: {**rank.phase(phase, offload), "total": rank.total(phase, offload)} for phase in PHASES},
                "logits_chunk": rank.logits_chunk,
                "flops": rank.flops,
                "kept_per_micro_batch": {str(stage): kept for stage, kept in rank.kept_per_micro_batch.items()},
            }
            for index, rank in enumerate(plan.ranks)
        ],
    }
    if device_bytes is not None:
        over = plan.phases_over(device_bytes)
        facts |= {"device_bytes": device_bytes, "fits": not over, "phases_over": over}
        facts["suggestion"] = None if fitting is None else as_json(fitting, device_bytes, None)
    return facts


def _prompts_text(plan: Plan) -> str:
    work = plan.workload
    if plan.repeats_prompts:
        return f"prompts are computed for each of their {work.samples_per_prompt} samples, because of {plan.repeats_prompts}"
    return (
        f"prompts of {work.prompt_length} tokens are computed once for up to {work.samples_per_prompt} samples: a "
        f"micro-batch has {plan.sequence_tokens} tokens of sequences"
    )


def _table(title: str, rows: Sequence[tuple[str, ...]]) -> list[str]:
    return [*(line.replace("_", " ") for line in table(COLUMNS, [(title, *PHASES), *rows])), ""]


def _reduction_text(plan: Plan, other: Plan) -> str:
    """What ``plan`` reduces gradients by, where that is not as in ``other``."""
    mine, theirs = (getattr(each.config.backend_cfg, "reduce_gradients", "") for each in (plan, other))
    return "" if mine == theirs else f" reduce_gradients={mine}"


def _layout_text(plan: Plan) -> str:
    return " ".join(f"{name}={size}" for name, size in plan.layout.items() if size > 1 or name == "dp")
