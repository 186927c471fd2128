"""What the actions of a schedule cost in time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from rl_backend.contracts import ConfigError
from rl_backend.parallel.pipeline.actions import Action, Kind


@dataclass(frozen=True)
class Costs:
    """Times in any one unit; the defaults are those for which the zero-bubble schedules were made.

    Attributes:
        forward, backward_input, backward_weight: of one micro-batch in one stage: one number for all stages, or one for
            each. A full backward pass takes the sum of the last two.
        communication: from the end of a computation until its result is on another rank.

    Raises:
        ConfigError: a time that is not finite, is negative, or is 0 where something is computed.
    """

    forward: float | Sequence[float] = 1.0
    backward_input: float | Sequence[float] = 1.0
    backward_weight: float | Sequence[float] = 1.0
    communication: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            may_be_zero = field.name == "communication"
            for time in value if isinstance(value, Sequence) else (value,):
                if not math.isfinite(time) or time < 0 or (time == 0 and not may_be_zero):
                    raise ConfigError.of(f"Costs.{field.name}", time, f"must be {'0 or more' if may_be_zero else 'above 0'}")

    def of(self, action: Action) -> float:
        """Time of a computation."""
        match action.kind:
            case Kind.FORWARD:
                return _of_stage(self.forward, action.stage)
            case Kind.BACKWARD_INPUT:
                return _of_stage(self.backward_input, action.stage)
            case Kind.BACKWARD_WEIGHT:
                return _of_stage(self.backward_weight, action.stage)
            case Kind.BACKWARD:
                return _of_stage(self.backward_input, action.stage) + _of_stage(self.backward_weight, action.stage)
        raise ValueError(f"{action} is not a computation")

    def require_stages(self, num_stages: int) -> None:
        """Raises :class:`ConfigError` unless times given for each stage are as many as there are stages."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Sequence) and len(value) != num_stages:
                raise ConfigError.of(f"Costs.{field.name}", value, f"has {len(value)} times for {num_stages} stages")


def _of_stage(cost: float | Sequence[float], stage: int) -> float:
    return cost[stage] if isinstance(cost, Sequence) else cost
