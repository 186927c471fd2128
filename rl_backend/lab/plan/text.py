"""A plan as text and as JSON."""

from __future__ import annotations

from typing import Any

from rl_backend.lab.plan.make import Plan
from rl_backend.lab.plan.memory import PHASES
from rl_backend.lab.text import ByteUnit, count, table

COMPONENTS = (
    "weights",
    "gradients",
    "optimizer",
    "undo",
    "unreduced_gradients",
    "gathered_parameters",
    "activations",
    "workspace",
    "sync_bucket",
)
COLUMNS = "{:24}" + "{:>16}" * len(PHASES)


def as_text(plan: Plan, device_bytes: int | None, fitting: Plan | None) -> str:
    """The table of the largest ranks, and what follows from it."""
    unit = ByteUnit.up_to(max(plan.peak(phase) for phase in PHASES))
    lines = [_title(plan), "", *_table(plan, unit), ""]
    if len(plan.ranks) > 1:
        lines += _pipeline_ranks(plan, unit)
    if plan.config.backend == "bridge":
        lines.append("activations are those of Megatron's own layers; Transformer Engine's keep less")
    logits = max(rank.logits_chunk for rank in plan.ranks)
    if logits:
        lines.append(f"logits: {unit.of(logits)} {unit.name} at one time, in the workspace")
    lines.append(
        f"a weight sync sends {unit.of(plan.sync_bytes)} {unit.name} in {plan.workload.sync_dtype}; through shared memory "
        "or gloo it keeps as much of /dev/shm until it is closed"
    )
    if device_bytes is not None:
        lines += ["", *_verdict(plan, device_bytes, fitting, unit)]
    return "\n".join(lines)


def as_json(plan: Plan, device_bytes: int | None, fitting: Plan | None) -> dict[str, Any]:
    """Bytes per rank and phase."""
    facts: dict[str, Any] = {
        "backend": plan.config.backend,
        "num_ranks": plan.num_ranks,
        "parallel": _layout(plan),
        "workload": plan.workload.model_dump(),
        "sync_bytes": plan.sync_bytes,
        "peak": {phase: plan.peak(phase) for phase in PHASES},
        "ranks": [
            {
                "pipeline_rank": rank.pipeline_rank,
                "first_rank": rank.pipeline_rank * _ranks_of_a_stage(plan),
                "num_ranks": _ranks_of_a_stage(plan),
                "phases": {
                    phase: {**rank.phase(phase, plan.workload.offload), "total": rank.total(phase, plan.workload.offload)}
                    for phase in PHASES
                },
                "logits_chunk": rank.logits_chunk,
                "kept_per_micro_batch": {str(stage): kept for stage, kept in rank.kept_per_micro_batch.items()},
            }
            for rank in plan.ranks
        ],
    }
    if device_bytes is not None:
        over = plan.phases_over(device_bytes)
        facts |= {"device_bytes": device_bytes, "fits": not over, "phases_over": over}
        facts["suggestion"] = None if fitting is None else as_json(fitting, device_bytes, None)
    return facts


def _title(plan: Plan) -> str:
    work = plan.workload
    return (
        f"{plan.config.backend} on {count(plan.num_ranks, 'rank')}, {_describe(plan)}; "
        f"{work.num_micro_batches} micro-batches of {work.micro_batch_tokens} tokens in sequences of {work.sequence_length}"
    )


def _table(plan: Plan, unit: ByteUnit) -> list[str]:
    """What the largest rank of each phase takes, by purpose."""
    ranks = {phase: plan.largest(phase).phase(phase, plan.workload.offload) for phase in PHASES}
    rows = [_titles(f"{unit.name} on the largest rank")]
    for name in COMPONENTS:
        if any(name in found for found in ranks.values()):
            rows.append((_spaced(name), *(unit.of(found[name]) if name in found else "" for found in ranks.values())))
    return table(COLUMNS, [*rows, ("total", *(unit.of(plan.peak(phase)) for phase in PHASES))])


def _pipeline_ranks(plan: Plan, unit: ByteUnit) -> list[str]:
    rows = [_titles(f"{unit.name} of pipeline rank")]
    for rank in plan.ranks:
        totals = (unit.of(rank.total(phase, plan.workload.offload)) for phase in PHASES)
        rows.append((str(rank.pipeline_rank), *totals))
    return [*table(COLUMNS, rows), ""]


def _titles(first: str) -> tuple[str, ...]:
    return (first, *map(_spaced, PHASES))


def _spaced(name: str) -> str:
    return name.replace("_", " ")


def _verdict(plan: Plan, device_bytes: int, fitting: Plan | None, unit: ByteUnit) -> list[str]:
    over = plan.phases_over(device_bytes)
    if not over:
        most = max(plan.peak(phase) for phase in PHASES)
        return [f"fits {unit.of(device_bytes)} {unit.name}, of which {unit.of(device_bytes - most)} are left"]
    needs = (f"{_spaced(phase)} needs {unit.of(plan.peak(phase))}" for phase in over)
    lines = [f"does not fit {unit.of(device_bytes)} {unit.name}: {', '.join(needs)}"]
    if fitting is None:
        lines.append(
            f"no layout of {count(plan.num_ranks, 'rank')} fits: take more ranks, smaller micro-batches, activation "
            "checkpointing, or offload more"
        )
    else:
        most = max(fitting.peak(phase) for phase in PHASES)
        lines.append(f"fits with {unit.of(most)} {unit.name}: {_describe(fitting)}")
    return lines


def _describe(plan: Plan) -> str:
    return " ".join(f"{name}={size}" for name, size in _layout(plan).items() if size > 1 or name == "dp")


def _layout(plan: Plan) -> dict[str, int]:
    return {"dp": plan.data_parallel_size, **plan.config.backend_cfg.parallel.model_dump()}


def _ranks_of_a_stage(plan: Plan) -> int:
    return plan.num_ranks // len(plan.ranks)
