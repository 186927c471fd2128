"""The session of a run: Ray, training groups and engines, opened for it or lent to it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.cluster.placement import ClusterShare, share_cluster
from actors.cluster.session import raised_on_sigterm, ray_session
from actors.rollout.config import RolloutConfig
from actors.rollout.group import RolloutGroup
from actors.run.config import TrainingConfig
from actors.run.lock import usable_run_dir
from actors.train.context import RankContext
from actors.train.group import TrainGroup
from rl_backend.contracts import ConfigError, RuntimeConfig

_OF_A_RUN = {"model_path", "max_model_len"}
_OF_THE_CLUSTER = {"cores_per_engine", "cores", "placement", "gpus_per_worker", "gpu_memory_utilization"}


@dataclass(frozen=True)
class Session:
    """Training groups and engines that are open, for one run after the other.

    Every run builds its own models, which stay on the ranks until the groups end, and begins with a push of its weights.

    Attributes:
        groups: of equal ranks. A run's first model is on the first.
        rollout: engines; None for runs that sample nothing.
    """

    groups: Sequence[TrainGroup]
    rollout: RolloutGroup | None = None

    def require(self, config: TrainingConfig) -> None:
        """Raises :class:`ConfigError` unless a run of ``config`` would open such a session itself, apart from its cores."""
        wanted: dict[str, Any] = {"training groups": config.training_groups, "ranks": config.ranks}
        found: dict[str, Any] = {"training groups": len(self.groups), "ranks": self.groups[0].num_ranks}
        wanted |= _flat(config.runtime_config())
        found |= _flat(self.groups[0].config)
        asked = config.rollout_config(ClusterShare(1, 1, 0))
        engines = None if self.rollout is None else self.rollout.config
        if asked is not None:
            compared = [name for name in RolloutConfig.model_fields if name not in _OF_A_RUN | _OF_THE_CLUSTER]
            wanted |= {f"rollout.{name}": getattr(asked, name) for name in compared}
            found |= {f"rollout.{name}": getattr(engines, name, None) for name in compared}
        for name in wanted | found:
            if wanted.get(name) != found.get(name):
                raise ConfigError.of(
                    "session",
                    f"{name}={found.get(name)!r}",
                    f"the run asks for {wanted.get(name)!r}; open a session for it with open_session(config)",
                )
        if asked is not None and engines is not None and engines.max_model_len < asked.max_model_len:
            raise ConfigError.of(
                "session",
                f"max_model_len={engines.max_model_len}",
                f"the run's prompts and responses have up to {asked.max_model_len} tokens; open a session for them",
            )


def _flat(config: RuntimeConfig) -> dict[str, Any]:
    """Fields that all models of a group have in common."""
    fields = config.model_dump(mode="json", exclude={"hf_path"})
    backend: dict[str, Any] = fields.pop("backend_cfg")
    backend.pop("optimizer", None)
    return fields | {f"backend_cfg.{name}": value for name, value in backend.items()}


@contextmanager
def open_session(config: TrainingConfig) -> Iterator[Session]:
    """Joins or starts Ray, and starts the training groups and engines that ``config`` asks for.

    Raises:
        ConfigError, UnsupportedError: the cluster does not have what they need.
    """
    ranks, engines = config.ranks * config.training_groups, config.num_engines
    with ExitStack() as stack:
        stack.enter_context(ray_session(ranks, engines))
        share = share_cluster(ranks, engines, take_turns=not config.batches_ahead)
        runtime = config.runtime_config()
        groups = [
            stack.enter_context(
                TrainGroup(runtime, config.ranks, share.cores_per_rank, share.gpus, placement=config.placement)
            )
            for _ in range(config.training_groups)
        ]
        rollout = config.rollout_config(share)
        yield Session(groups, None if rollout is None else stack.enter_context(RolloutGroup(rollout)))


@contextmanager
def lent_session(session: Session, config: TrainingConfig) -> Iterator[Session]:
    """``session`` for a run of ``config``, without the weights of the run before.

    Raises:
        ConfigError: it was opened for another kind of run.
    """
    with raised_on_sigterm():
        session.require(config)
        if session.rollout is not None:
            session.rollout.forget_weights()
        yield session


def require_paths(trainer: TrainGroup, model: str, run_dir: Path) -> None:
    """Checks, before a model is loaded, that every rank's node has the model and sees this process's run folder.

    Engines check the model themselves when they start.

    Args:
        model: Hugging Face directory, at the same path on every node.
        run_dir: exists here; ranks write checkpoints to it.

    Raises:
        ConfigError: names the node and the path.
    """
    mark = run_dir.resolve() / f".visible-{uuid.uuid4().hex}"
    with usable_run_dir(run_dir):
        mark.touch()
    try:
        seen = trainer.run_on_ranks(_look_for_paths, model, str(mark))
    finally:
        mark.unlink()
    for info, (has_model, sees_run_dir) in zip(trainer.ranks, seen, strict=True):
        where = f"on node {info.node_ip} (Ray node {info.node_id}), where training rank {info.rank} runs"
        if not has_model:
            raise ConfigError.of(
                "model", model, f"is not a Hugging Face directory {where}; a model has the same path on every node"
            )
        if not sees_run_dir:
            raise ConfigError.of(
                "run_dir",
                str(run_dir.resolve()),
                f"is not seen {where}; give a folder on a file system that all nodes share, for the ranks write the trained "
                "model to it",
            )


def _look_for_paths(context: RankContext, model: str, mark: str) -> tuple[bool, bool]:
    return (Path(model) / "config.json").is_file(), Path(mark).is_file()
