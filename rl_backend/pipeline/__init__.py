"""Pipeline schedules as data: made, validated and simulated."""

from rl_backend.pipeline.catalog import SCHEDULES as SCHEDULES
from rl_backend.pipeline.catalog import make_schedule as make_schedule
from rl_backend.pipeline.catalog import require_stages as require_stages
from rl_backend.pipeline.schedule import COMPUTATIONS as COMPUTATIONS
from rl_backend.pipeline.schedule import SENDS as SENDS
from rl_backend.pipeline.schedule import Action as Action
from rl_backend.pipeline.schedule import Kind as Kind
from rl_backend.pipeline.schedule import Schedule as Schedule
from rl_backend.pipeline.schedule import validate as validate
from rl_backend.pipeline.simulate import Costs as Costs
from rl_backend.pipeline.simulate import Span as Span
from rl_backend.pipeline.simulate import Timeline as Timeline
from rl_backend.pipeline.simulate import simulate as simulate
