"""Ray actors around the backend: training groups, rollout groups of vLLM engines, weight sync, runs, and Ray itself.

Names are imported when they are first used, so that a training script does not import vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_backend.lazy import lazy_names

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

__all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
