"""What a rank of a pipeline keeps at one time of all micro-batches in flight."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from rl_backend.pipeline import Action, Kind
from rl_backend.plan.stage_memory import StageMemory


class InFlight(NamedTuple):
    """Bytes at the moment when the most is needed.

    Attributes:
        activations: kept for backward passes.
        workspace: of the pass that runs then, beyond what it keeps.
    """

    activations: int
    workspace: int


def most_in_flight(actions: Iterable[Action], stages: Mapping[int, StageMemory]) -> InFlight:
    """Follows the actions of one rank."""
    kept = 0
    most = InFlight(0, 0)
    for action in actions:
        memory = stages.get(action.stage)
        if memory is None:
            continue
        if action.kind is Kind.FORWARD:
            most = max(most, InFlight(kept + memory.kept, memory.forward_peak - memory.kept), key=sum)
            kept += memory.kept
        elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            most = max(most, InFlight(kept, memory.backward_peak - memory.kept), key=sum)
            kept -= memory.kept
            kept += memory.put_off if action.kind is Kind.BACKWARD_INPUT else 0
        elif action.kind is Kind.BACKWARD_WEIGHT:
            kept -= memory.put_off
    return most


def without_pipeline(num_micro_batches: int) -> list[Action]:
    """One micro-batch after the other, on a stage that is the whole model."""
    return [
        Action(kind, 0, micro_batch) for micro_batch in range(num_micro_batches) for kind in (Kind.FORWARD, Kind.BACKWARD)
    ]
