"""Memory that a model takes on each rank, computed before anything is started: ``rl-backend plan``."""

from rl_backend.lab.plan.make import make_plan as make_plan
from rl_backend.lab.plan.memory import Workload as Workload
