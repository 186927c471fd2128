"""Ray actors around the backend: training groups, rollout groups of vLLM engines, weight sync, runs, and Ray itself.

Names are imported when they are first used, so that a training script does not import vLLM.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actors.checks.preflight import preflight as preflight
    from actors.cluster.session import init_local_ray as init_local_ray
    from actors.cluster.session import join_ray as join_ray
    from actors.folder.checkpoints import RunCheckpoints as RunCheckpoints
    from actors.folder.folder import RunFolder as RunFolder
    from actors.rollout.config import RolloutConfig as RolloutConfig
    from actors.rollout.config import SamplingConfig as SamplingConfig
    from actors.rollout.group.group import RolloutGroup as RolloutGroup
    from actors.rollout.messages import Sample as Sample
    from actors.rollout.messages import sample_seeds as sample_seeds
    from actors.rollout.tokens import RolloutTokens as RolloutTokens
    from actors.run.rl_run import EpisodeRun as EpisodeRun
    from actors.run.rl_run import RLRun as RLRun
    from actors.run.run import Run as Run
    from actors.run.session import Session as Session
    from actors.run.session import open_session as open_session
    from actors.sync.adapter_push import Canary as Canary
    from actors.sync.push import WeightSync as WeightSync
    from actors.sync.report import PushReport as PushReport
    from actors.sync.source import WeightSource as WeightSource
    from actors.train.context import HandleRef as HandleRef
    from actors.train.context import RankContext as RankContext
    from actors.train.group import GroupFuture as GroupFuture
    from actors.train.group import TrainGroup as TrainGroup
    from actors.train.loss import Loss as Loss

_MODULES = {
    "Canary": "actors.sync.adapter_push",
    "EpisodeRun": "actors.run.rl_run",
    "GroupFuture": "actors.train.group",
    "HandleRef": "actors.train.context",
    "Loss": "actors.train.loss",
    "PushReport": "actors.sync.report",
    "RLRun": "actors.run.rl_run",
    "RankContext": "actors.train.context",
    "RolloutConfig": "actors.rollout.config",
    "RolloutGroup": "actors.rollout.group.group",
    "RolloutTokens": "actors.rollout.tokens",
    "Run": "actors.run.run",
    "RunCheckpoints": "actors.folder.checkpoints",
    "RunFolder": "actors.folder.folder",
    "Sample": "actors.rollout.messages",
    "SamplingConfig": "actors.rollout.config",
    "Session": "actors.run.session",
    "TrainGroup": "actors.train.group",
    "WeightSource": "actors.sync.source",
    "WeightSync": "actors.sync.push",
    "init_local_ray": "actors.cluster.session",
    "join_ray": "actors.cluster.session",
    "open_session": "actors.run.session",
    "preflight": "actors.checks.preflight",
    "sample_seeds": "actors.rollout.messages",
}

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'actors' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
