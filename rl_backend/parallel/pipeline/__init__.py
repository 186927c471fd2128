"""Pipeline schedules as data: made, validated and simulated here."""

from rl_backend.parallel.pipeline.actions import COMPUTATIONS, RECEIVES, SENDS, Action, Kind
from rl_backend.parallel.pipeline.catalog import SCHEDULES, make_schedule, require_micro_batches, require_stages
from rl_backend.parallel.pipeline.costs import Costs
from rl_backend.parallel.pipeline.schedule import Schedule
from rl_backend.parallel.pipeline.simulate import Span, Timeline, simulate
from rl_backend.parallel.pipeline.validate import validate

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
