"""Ray actors around the backend: training groups, rollout groups of vLLM engines, and weight sync between them.

Names are imported when they are first used, so that a training script does not import vLLM.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actors.rollout.config import RolloutConfig as RolloutConfig
    from actors.rollout.config import SamplingConfig as SamplingConfig
    from actors.rollout.group import RolloutGroup as RolloutGroup
    from actors.rollout.sample import Sample as Sample
    from actors.rollout.sample import sample_seeds as sample_seeds
    from actors.sync.push import PushReport as PushReport
    from actors.sync.push import WeightSync as WeightSync
    from actors.sync.source import WeightSource as WeightSource
    from actors.train.context import HandleRef as HandleRef
    from actors.train.context import RankContext as RankContext
    from actors.train.future import GroupFuture as GroupFuture
    from actors.train.group import TrainGroup as TrainGroup
    from actors.train.loss import Loss as Loss

_MODULES = {
    "GroupFuture": "actors.train.future",
    "HandleRef": "actors.train.context",
    "Loss": "actors.train.loss",
    "PushReport": "actors.sync.push",
    "RankContext": "actors.train.context",
    "RolloutConfig": "actors.rollout.config",
    "RolloutGroup": "actors.rollout.group",
    "Sample": "actors.rollout.sample",
    "SamplingConfig": "actors.rollout.config",
    "TrainGroup": "actors.train.group",
    "WeightSource": "actors.sync.source",
    "WeightSync": "actors.sync.push",
    "sample_seeds": "actors.rollout.sample",
}

__all__ = [
    "GroupFuture",
    "HandleRef",
    "Loss",
    "PushReport",
    "RankContext",
    "RolloutConfig",
    "RolloutGroup",
    "Sample",
    "SamplingConfig",
    "TrainGroup",
    "WeightSource",
    "WeightSync",
    "sample_seeds",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'actors' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
