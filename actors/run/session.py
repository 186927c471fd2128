"""The session of a run: Ray, training groups and engines, opened for it or lent to it."""

import os
import tempfile
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from actors.checks.memory import choose_micro_batch, chosen_options
from actors.cluster.placement import ClusterShare, share_cluster
from actors.cluster.session import raised_on_sigterm, ray_session
from actors.folder.lock import usable_run_dir
from actors.options.config import with_local_model
from actors.options.sampled_config import RunConfig, SampledConfig
from actors.rollout.config import RolloutConfig
from actors.rollout.group.group import RolloutGroup
from actors.sync.push import WeightSync
from actors.sync.staged_transports import TransportName
from actors.train.context import HandleRef, RankContext
from actors.train.group import TrainGroup
from actors.train.pulse import WaitBounds
from actors.watch.console import Phases
from rl_backend.contracts import ConfigError, RolloutError
from rl_backend.lab.text import count
from rl_backend.options.option_set import get, has, options_of

ENGINES_LOG = "engines.log"

# A run brings its model's weights, and engines may have more of the others than it asks for; the second set depends on
# the cluster.
_OF_A_RUN = {"model_path", "max_model_len", "load_tokenizer", "max_adapters", "max_adapter_rank"}
_OF_THE_CLUSTER = {"cores_per_engine", "cores", "placement", "gpus_per_worker", "gpu_memory_utilization"}

# Options of which a session has one value for all of its runs; but for optimizers.
_OF_ALL_RUNS = {
    *("train", "rollout", "ranks", "min_ranks", "dtype", "placement", "transport", "recover"),
    *("rank_silence", "operation_timeout"),
}


@dataclass
class _Shared:
    lock: threading.Lock = field(default_factory=threading.Lock)
    bases: dict[tuple[TrainGroup, str], HandleRef] = field(default_factory=dict)
    served: HandleRef | None = None
    runs: int = 0


@dataclass(frozen=True)
class Session:
    """Training groups of equal ranks, and engines, that are open for one run after the other.

    Every run builds its own models, which stay on the ranks until the groups end, and begins with a push of its weights.
    Runs that push LoRA adapters over one frozen model may work at the same time, in threads of one driver.
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
        """Inside, engines have the weights of ``base``; refused while other runs have adapters over another model."""
        shared, rollout = self._shared, self.rollout
        assert rollout is not None, "adapters are pushed to engines"
        with shared.lock:
            # The first of the runs that push adapters brings the weights below them; the others find them there.
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

    def serves_adapters(self, config: RunConfig) -> bool:
        """Whether the policy of a run with ``config`` goes to the engines as an adapter beside the frozen model."""
        if not config.pushes_adapters or self.rollout is None or not self.rollout.config.max_adapters:
            return False
        return self.rollout.config.max_adapter_rank >= config.lora.rank

    def forget_weights(self) -> None:
        """For a run that pushes all weights; refused while other runs push adapters."""
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
        """Refuses a ``config`` that would open another session itself, apart from its cores."""
        wanted: dict[str, Any] = {"training groups": config.training_groups, "ranks": config.ranks}
        found: dict[str, Any] = {"training groups": len(self.groups), "ranks": self.groups[0].wanted_ranks}
        wanted |= _leaves(config.runtime_config().model_dump(mode="json", exclude={"hf_path"}))
        found |= _leaves(self.groups[0].config.model_dump(mode="json", exclude={"hf_path"}))
        asked = config.rollout_config(ClusterShare(1, 1, 0))
        engines = None if self.rollout is None else self.rollout.config
        if asked is not None:
            compared = [name for name in RolloutConfig.model_fields if name not in _OF_A_RUN | _OF_THE_CLUSTER]
            wanted |= {f"rollout.{name}": getattr(asked, name) for name in compared}
            found |= {f"rollout.{name}": getattr(engines, name, None) for name in compared}
        lacks = [name for name in wanted | found if wanted.get(name) != found.get(name)]
        if asked is not None and engines is not None:
            # Engines may have more of these than the run needs.
            adapters = ("max_adapters", "max_adapter_rank") if asked.max_adapters else ()
            for name in ("max_model_len", "load_tokenizer", *adapters):
                wanted[name], found[name] = getattr(asked, name), getattr(engines, name)
                if found[name] < wanted[name]:
                    lacks.append(name)
        if lacks:
            has, asks = (", ".join(f"{name}={facts.get(name)!r}" for name in lacks) for facts in (found, wanted))
            raise ConfigError.of("session", has, f"the run asks for {asks}; open one for it with open_session(config)")


def _leaves(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Place -> value, without those of an optimizer."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if not isinstance(value, Mapping):
            found[prefix + name] = value
        elif name != "optimizer":
            found |= _leaves(value, f"{prefix}{name}.")
    return found


def require_one_session(shared: SampledConfig, users: Mapping[str, SampledConfig]) -> None:
    """Refuses a user, by name, who could not run beside the others on the session that ``shared`` opens."""
    opened = _leaves(shared.model_dump(mode="json", include=_OF_ALL_RUNS))
    saves = any(user.save_every for user in users.values())
    for name, user in users.items():
        asked, kind = _leaves(user.model_dump(mode="json", include=_OF_ALL_RUNS)), type(user)
        wrong: list[tuple[str, Any, str]] = [
            (
                f"{kind.__name__}.{options_of(kind).name_of(place)}",
                asked.get(place),
                f"is {opened.get(place)!r} for all users; set it for all",
            )
            for place in opened | asked
            if opened.get(place) != asked.get(place)
        ]
        if saves and not user.save_every and user.recover != "memory":
            problem = "others save checkpoints, and a dead rank's tenants are recovered together; set it, or recover=memory"
            wrong.append((f"{kind.__name__}.save_every", 0, problem))
        if user.longest_sampled > shared.rollout.max_model_len:
            problem = f"its sequences have up to {user.longest_sampled} tokens; set it for all"
            wrong.append((f"{kind.__name__}.rollout.max_model_len", shared.rollout.max_model_len, problem))
        if wrong:
            raise ConfigError(f"user {name!r}: {ConfigError.of_all(wrong)}")


@contextmanager
def open_session(config: RunConfig, phases: Phases | None = None) -> Iterator[Session]:
    """Joins or starts Ray, and starts the training groups and engines that ``config`` asks for.

    Raises:
        ConfigError, UnsupportedError: the cluster does not have what they need.
    """
    config = choose_micro_batch(with_local_model(config), {}).config
    ranks, engines = config.ranks * config.training_groups, config.num_engines
    recovers = config.recover == "memory" or any(run.save_every for run in config.runs().values())
    phases = phases or Phases()
    with ExitStack() as stack:
        with phases.phase("ray", ray_is()):
            stack.enter_context(ray_session(ranks, engines))
        share = share_cluster(ranks, engines, take_turns=not config.batches_ahead, colocate=config.colocates)
        # Both before anything is started: they refuse what does not fit this share.
        runtime, wanted = config.runtime_config(), config.rollout_config(share)
        with phases.phase("ranks", f"starting {count(ranks, 'training rank')} of {config.train.backend}"):
            groups = [
                stack.enter_context(
                    TrainGroup(
                        runtime,
                        config.ranks,
                        share.cores_per_rank,
                        share.gpus,
                        placement=config.placement,
                        bounds=WaitBounds(config.rank_silence, config.operation_timeout),
                        recover=config.recover if recovers else "off",
                        min_ranks=config.min_ranks,
                    )
                )
                for _ in range(config.training_groups)
            ]
        rollout = None
        if wanted is not None:
            rollout = stack.enter_context(start_engines(wanted, phases, config.run_dir))
        yield Session(groups, rollout)


def ray_is() -> str:
    if ray.is_initialized():
        return "running already"
    address = os.environ.get("RAY_ADDRESS")
    return "starting on this machine" if address is None else f"joining the cluster at {address}"


def start_engines(config: RolloutConfig, phases: Phases, folder: str | None) -> RolloutGroup:
    """Engines that serve; ``folder`` as in :func:`log_of_engines`."""
    engines = count(config.num_engines, "vLLM engine")
    with phases.phase("engines", f"starting {engines}, each of which loads the model"), log_of_engines(folder):
        return RolloutGroup(config)


@contextmanager
def log_of_engines(folder: str | None) -> Iterator[None]:
    """What vLLM says when it does not start is for a file in ``folder``; the error has the sentence."""
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
    with raised_on_sigterm():
        session.require(config)
        if not session.serves_adapters(config):
            session.forget_weights()
        yield session


def chosen_of(session: Session, config: RunConfig) -> dict[str, Any]:
    """What the session was opened with, of the options that runs choose; all of its runs have it."""
    opened: dict[str, Any] = {"train": session.groups[0].config}
    return {place: get(opened, place) for place in chosen_options(config) if has(opened, place)}


def require_paths(trainer: TrainGroup, model: str, run_dir: Path) -> None:
    """Checks, before a model is loaded, that every rank's node has the model and sees this process's run folder."""
    # Engines check the model themselves when they start; ranks write checkpoints to the run folder.
    mark = run_dir.resolve() / f".visible-{uuid.uuid4().hex}"
    with usable_run_dir(run_dir):
        mark.touch()
    try:
        seen = trainer.run_on_ranks(_look_for_paths, model, str(mark))
    finally:
        mark.unlink()
    for info, (has_model, sees_run_dir) in zip(trainer.ranks, seen, strict=True):
        where = f"on node {info.node_ip} (Ray node {info.node_id}), where training rank {info.rank} runs"
        if not (has_model and sees_run_dir):
            option, value, problem = (
                ("run_dir", str(run_dir.resolve()), f"is not seen {where}; give one on a file system that all nodes share")
                if has_model
                else ("model", model, f"is not a Hugging Face directory {where}; a model has one path on every node")
            )
            raise ConfigError.of(option, value, problem)


def _look_for_paths(context: RankContext, model: str, mark: str) -> tuple[bool, bool]:
    return (Path(model) / "config.json").is_file(), Path(mark).is_file()
