"""Pipeline schedules as data: made, validated and simulated."""

from __future__ import annotations

from rl_backend.pipeline.catalog import SCHEDULES, make_schedule, require_micro_batches, require_stages
from rl_backend.pipeline.schedule import COMPUTATIONS, RECEIVES, SENDS, Action, Kind, Schedule
from rl_backend.pipeline.simulate import Costs, Span, Timeline, simulate
from rl_backend.pipeline.validate import validate

__all__ = [
    "COMPUTATIONS",
    "RECEIVES",
    "SCHEDULES",
    "SENDS",
    "Action",
    "Costs",
    "Kind",
    "Schedule",
    "Span",
    "Timeline",
    "make_schedule",
    "require_micro_batches",
    "require_stages",
    "simulate",
    "validate",
]
