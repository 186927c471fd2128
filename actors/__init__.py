"""Ray actors around the backend: training groups, rollout groups of vLLM engines, and weight sync between them.

Names are imported when they are first used, so that a training script does not import vLLM.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actors.loss import Loss as Loss
    from actors.rollout_config import RolloutConfig as RolloutConfig
    from actors.rollout_config import SamplingConfig as SamplingConfig
    from actors.rollout_group import RolloutGroup as RolloutGroup
    from actors.rollout_sample import Sample as Sample
    from actors.rollout_sample import sample_seeds as sample_seeds
    from actors.train_context import HandleRef as HandleRef
    from actors.train_context import RankContext as RankContext
    from actors.train_group import TrainGroup as TrainGroup
    from actors.train_operation import GroupFuture as GroupFuture
    from actors.weight_sync import PushReport as PushReport
    from actors.weight_sync import WeightSync as WeightSync
    from actors.weight_sync_source import WeightSource as WeightSource

_MODULES = {
    "GroupFuture": "actors.train_operation",
    "HandleRef": "actors.train_context",
    "Loss": "actors.loss",
    "PushReport": "actors.weight_sync",
    "RankContext": "actors.train_context",
    "RolloutConfig": "actors.rollout_config",
    "RolloutGroup": "actors.rollout_group",
    "Sample": "actors.rollout_sample",
    "SamplingConfig": "actors.rollout_config",
    "TrainGroup": "actors.train_group",
    "WeightSource": "actors.weight_sync_source",
    "WeightSync": "actors.weight_sync",
    "sample_seeds": "actors.rollout_sample",
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
