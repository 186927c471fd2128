"""A plan as text and as JSON."""

from __future__ import annotations

from typing import Any

from rl_backend.plan import PHASES, Plan

MIB, GIB = 2**20, 2**30
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


class _Unit:
    """GiB, or MiB for a small model."""

    def __init__(self, plan: Plan) -> None:
        small = max(plan.peak(phase) for phase in PHASES) < GIB
        self.name, self._size = ("MiB", MIB) if small else ("GiB", GIB)

    def of(self, size: int) -> str:
        return f"{size / self._size:.2f}"


def as_text(plan: Plan, device_bytes: int | None, fitting: Plan | None) -> str:
    """The table of the largest ranks, and what follows from it."""
    unit = _Unit(plan)
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
        f"{plan.config.backend} on {_count(plan.num_ranks, 'rank')}, {_describe(plan)}; "
        f"{work.num_micro_batches} micro-batches of {work.micro_batch_tokens} tokens in sequences of {work.sequence_length}"
    )


def _table(plan: Plan, unit: _Unit) -> list[str]:
    ranks = {phase: plan.largest(phase).phase(phase, plan.workload.offload) for phase in PHASES}
    lines = [f"{f'{unit.name} on the largest rank':24}" + "".join(f"{phase.replace('_', ' '):>16}" for phase in PHASES)]
    for name in COMPONENTS:
        if any(name in found for found in ranks.values()):
            cells = (unit.of(found[name]) if name in found else "" for found in ranks.values())
            lines.append(f"{name.replace('_', ' '):24}" + "".join(f"{cell:>16}" for cell in cells))
    return [*lines, f"{'total':24}" + "".join(f"{unit.of(plan.peak(phase)):>16}" for phase in PHASES)]


def _pipeline_ranks(plan: Plan, unit: _Unit) -> list[str]:
    lines = [f"{f'{unit.name} of pipeline rank':24}" + "".join(f"{phase.replace('_', ' '):>16}" for phase in PHASES)]
    for rank in plan.ranks:
        totals = "".join(f"{unit.of(rank.total(phase, plan.workload.offload)):>16}" for phase in PHASES)
        lines.append(f"{rank.pipeline_rank:<24}{totals}")
    return [*lines, ""]


def _verdict(plan: Plan, device_bytes: int, fitting: Plan | None, unit: _Unit) -> list[str]:
    over = plan.phases_over(device_bytes)
    if not over:
        most = max(plan.peak(phase) for phase in PHASES)
        return [f"fits {unit.of(device_bytes)} {unit.name}, of which {unit.of(device_bytes - most)} are left"]
    needs = (f"{phase.replace('_', ' ')} needs {unit.of(plan.peak(phase))}" for phase in over)
    lines = [f"does not fit {unit.of(device_bytes)} {unit.name}: {', '.join(needs)}"]
    if fitting is None:
        lines.append(
            f"no layout of {_count(plan.num_ranks, 'rank')} fits: take more ranks, smaller micro-batches, activation "
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


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"
