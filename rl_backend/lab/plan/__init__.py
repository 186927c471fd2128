"""What a model takes on each rank, before anything is started: ``rl-backend plan``."""

from rl_backend.lab.plan.make import Plan, candidate_layouts, make_plan, suggest_layout
from rl_backend.lab.plan.memory import PHASES, Phase, RankMemory, Workload

__all__ = ["PHASES", "Phase", "Plan", "RankMemory", "Workload", "candidate_layouts", "make_plan", "suggest_layout"]
