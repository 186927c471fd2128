"""The session of a run: Ray, training groups and engines, opened for it or lent to it."""

from __future__ import annotations

import os
import tempfile
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from actors.cluster.placement import ClusterShare, share_cluster
from actors.cluster.session import raised_on_sigterm, ray_session
from actors.folder.lock import usable_run_dir
from actors.options.config import with_local_model
from actors.options.sampled_config import RunConfig
from actors.rollout.config import RolloutConfig
from actors.rollout.group.group import RolloutGroup
from actors.sync.push import WeightSync
from actors.sync.staged_transports import TransportName
from actors.train.context import HandleRef, RankContext
from actors.train.group import TrainGroup
from actors.watch.console import Phases
from rl_backend.contracts import ConfigError, RolloutError, RuntimeConfig
from rl_backend.lab.text import count

ENGINES_LOG = "engines.log"

_OF_A_RUN = {"model_path", "max_model_len", "load_tokenizer", "max_adapters", "max_adapter_rank"}
_OF_THE_CLUSTER = {"cores_per_engine", "cores", "placement", "gpus_per_worker", "gpu_memory_utilization"}


@dataclass
class _Shared:
    """What runs of one session have in common.

    Attributes:
        bases: frozen models that adapters stand beside, by group and directory.
        served: the one whose weights engines have while ``runs`` push adapters.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    bases: dict[tuple[TrainGroup, str], HandleRef] = field(default_factory=dict)
    served: HandleRef | None = None
    runs: int = 0


@dataclass(frozen=True)
class Session:
    """Training groups and engines that are open, for one run after the other.

    Every run builds its own models, which stay on the ranks until the groups end, and begins with a push of its weights.
    Runs of LoRA adapters share the frozen models below them. Those that push adapters may work at the same time, in
    threads of one driver: engines have the weights of one such model then, and beside them an adapter of each run.

    Attributes:
        groups: of equal ranks. A run's first model is on the first.
        rollout: engines; None for runs that sample nothing.
    """

    groups: Sequence[TrainGroup]
    rollout: RolloutGroup | None = None
    _shared: _Shared = field(default_factory=_Shared, init=False, repr=False, compare=False)

    def base(self, group: TrainGroup, path: str) -> HandleRef:
        """The frozen model of a directory that all adapters on ``group`` share, built when it is first asked for."""
        shared = self._shared
        with shared.lock:
            if (group, path) not in shared.bases:
                shared.bases[group, path] = group.build_model(
                    name=f"base of {Path(path).name}", trainable=False, hf_path=path
                )
            return shared.bases[group, path]

    @contextmanager
    def serving(self, group: TrainGroup, base: HandleRef, transport: TransportName) -> Iterator[None]:
        """Inside, engines have the weights of ``base``, which runs that came before may use already.

        Raises:
            ConfigError: those have adapters over another model.
        """
        shared, rollout = self._shared, self.rollout
        assert rollout is not None, "adapters are pushed to engines"
        with shared.lock:
            if not shared.runs:
                rollout.forget_weights()
                with WeightSync(group, rollout, base, transport=transport) as sync:
                    sync.push()
                shared.served = base
            elif shared.served != base:
                raise ConfigError.of(
                    "session",
                    shared.served and shared.served.name,
                    "its engines serve adapters over another model to other runs; open one of its own",
                )
            shared.runs += 1
        try:
            yield
        finally:
            with shared.lock:
                shared.runs -= 1

    def forget_weights(self) -> None:
        """For a run that pushes all weights.

        Raises:
            ConfigError: other runs push adapters.
        """
        with self._shared.lock:
            if self._shared.runs:
                raise ConfigError.of(
                    "session",
                    f"{self._shared.runs} run(s)",
                    "push adapters over the weights that engines have; wait for them",
                )
            if self.rollout is not None:
                self.rollout.forget_weights()

    def require(self, config: RunConfig) -> None:
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
        if asked is not None and engines is not None and asked.load_tokenizer and not engines.load_tokenizer:
            raise ConfigError.of(
                "session",
                "load_tokenizer=False",
                "the run has stop_strings, which engines need a tokenizer for; open another",
            )
        for name in ("max_adapters", "max_adapter_rank") if config.pushes_adapters else ():
            if getattr(engines, name) < getattr(asked, name):
                raise ConfigError.of(
                    "session",
                    f"{name}={getattr(engines, name)}",
                    f"the run asks for {getattr(asked, name)}; open one with more",
                )


def _flat(config: RuntimeConfig) -> dict[str, Any]:
    """Fields that all models of a group have in common."""
    fields = config.model_dump(mode="json", exclude={"hf_path"})
    backend: dict[str, Any] = fields.pop("backend_cfg")
    backend.pop("optimizer", None)
    return fields | {f"backend_cfg.{name}": value for name, value in backend.items()}


@contextmanager
def open_session(config: RunConfig, phases: Phases | None = None) -> Iterator[Session]:
    """Joins or starts Ray, and starts the training groups and engines that ``config`` asks for.

    Args:
        phases: of the start that this is a part of; None prints those of a start of its own.

    Raises:
        ConfigError, UnsupportedError: the cluster does not have what they need.
    """
    config = with_local_model(config)
    ranks, engines = config.ranks * config.training_groups, config.num_engines
    phases = phases or Phases()
    with ExitStack() as stack:
        with phases.phase("ray", ray_is()):
            stack.enter_context(ray_session(ranks, engines))
        share = share_cluster(ranks, engines, take_turns=not config.batches_ahead)
        runtime = config.runtime_config()
        with phases.phase("ranks", f"starting {count(ranks, 'training rank')} of {config.train.backend}"):
            groups = [
                stack.enter_context(
                    TrainGroup(runtime, config.ranks, share.cores_per_rank, share.gpus, placement=config.placement)
                )
                for _ in range(config.training_groups)
            ]
        wanted = config.rollout_config(share)
        rollout = None
        if wanted is not None:
            with (
                phases.phase("engines", f"starting {count(engines, 'vLLM engine')}, each of which loads the model"),
                log_of_engines(config.run_dir),
            ):
                rollout = stack.enter_context(RolloutGroup(wanted))
        yield Session(groups, rollout)


def ray_is() -> str:
    """What a start does about Ray, for its phase."""
    if ray.is_initialized():
        return "running already"
    address = os.environ.get("RAY_ADDRESS")
    return "starting on this machine" if address is None else f"joining the cluster at {address}"


@contextmanager
def log_of_engines(folder: str | None) -> Iterator[None]:
    """What vLLM says when it does not start is for a file in ``folder``; the error has the sentence.

    Args:
        folder: made if it is missing; None takes one of the system's temporary files.
    """
    try:
        yield
    except RolloutError as error:
        text = error.details.get("traceback")
        if text is None:
            raise
        log = Path(folder or tempfile.mkdtemp(prefix="rl-backend-")) / ENGINES_LOG
        with usable_run_dir(log.parent):
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text(text)
        raise RolloutError(f"{error}; all that vLLM said is in {log}", **error.details) from None


@contextmanager
def borrowed_session(session: Session, config: RunConfig) -> Iterator[Session]:
    """``session`` for a run of ``config``, without the weights of the run before.

    Raises:
        ConfigError: it was opened for another kind of run.
    """
    with raised_on_sigterm():
        session.require(config)
        if not config.pushes_adapters:
            session.forget_weights()
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
