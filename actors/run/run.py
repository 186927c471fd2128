"""A run: what a training loop needs around it, from its folder to its result."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any, NoReturn, Self

import xxhash

from actors.checks.machine import faster_dtype
from actors.checks.memory import choose_micro_batch, chosen_options
from actors.checks.preflight import CHOSEN, check_start, kept_choice
from actors.collect.collector import CollectedBatch, Source
from actors.collect.inputs import EpisodeInputs, Inputs
from actors.folder.checkpoints import StreamPosition
from actors.folder.folder import RunFolder
from actors.folder.lock import RunLock, free_disk, usable_run_dir
from actors.folder.resume import find_start
from actors.options.config import with_local_model
from actors.options.policy_options import tenant_config
from actors.options.sampled_config import RunConfig, SampledConfig
from actors.rollout.group.group import RolloutGroup
from actors.run.parts import ModelRecipe, Parts
from actors.run.sampling import Sampling
from actors.run.saver import RunSaver
from actors.run.session import Session, borrowed_session, chosen_of, open_session, require_paths
from actors.run.stop import StopRequest
from actors.train.model import GroupModel, RouterReplayMode
from actors.train.recovery import Reshaped
from actors.watch.console import Phases, StepLines, command_began, say, say_facts, warn
from actors.watch.engine_events import EngineEvents
from actors.watch.health_metrics import HealthWarnings
from actors.watch.metrics import Clock
from actors.watch.trace import TraceSource
from rl_backend.checkpoint.peft_files import write_peft_directory
from rl_backend.contracts import ConfigError, Head, OptimizerConfig, RLBackendError, RuntimeConfig
from rl_backend.lab.text import as_number, finite

# Of a checkpoint's state: metrics of its step and health, under names that checkpoints have.
_METRICS, _HEALTH = "metrics", "vital_signs"

type OnStep = Callable[[int, dict[str, float]], None]
"""Called after each step with its number and metrics."""


class Run[C: RunConfig]:
    """A training run in a folder, from its first step, or from a checkpoint, to its last step.

    The loop is yours; the run locks its folder, opens Ray, training groups and engines, restores and saves checkpoints,
    logs and prints the steps and says how it ended, however it ends::

        with Run(config) as run:
            model = run.build_model("mine")
            run.begin("Mine", {"mine": model})
            for step in run.steps():
                update = model.update(next(batches), loss)
                run.lap("train")
                run.end_step(update_metrics([update]))
            run.save_model(model)

    Args:
        config: read and checked when the object is made: nothing is started for a run that cannot begin.
        session: open training groups and engines, which stay open; None opens them for this run.
        label: begins every line that the run prints.
        stop: ends the run after the step that it is in; None lets SIGTERM and Ctrl-C do that, in the main thread.

    Attributes:
        last_metrics: those of the last step, as :meth:`end_step` was given them; at first those of the checkpoint's step.

    Raises:
        ConfigError: options or a folder with which the run cannot begin, or a session that does not fit it.
        CheckpointError: a checkpoint that cannot be continued.
    """

    session: Session
    folder: RunFolder

    def __init__(
        self,
        config: C,
        session: Session | None = None,
        on_step: OnStep | None = None,
        *,
        label: str = "",
        stop: StopRequest | None = None,
    ) -> None:
        self._began = command_began(take=session is None)
        self._phases = Phases(label, self._began)
        if session is not None and config.colocates:
            problem = "a session may serve other runs too, whose engines would sleep; give no session, or set colocate=False"
            raise ConfigError.of(f"{type(config).__name__}.colocate", True, problem)
        config = with_local_model(config)
        self.label = label
        # In the order of what it costs: nothing is started for a run that cannot begin.
        self.start = find_start(config)
        kept = kept_choice(self.start) if session is None else chosen_of(session, config)
        choice = choose_micro_batch(config, kept)
        self.config = config = choice.config
        self._chosen = choice.facts
        for warning in [*self.start.warnings(), *check_start(config, session_is_open=session is not None)]:
            warn(warning, label)
        self._borrowed = session
        self._on_step = on_step
        self._stop = stop or StopRequest()
        self._answers_signals = stop is None
        self._stack = ExitStack()
        self._step = self.start.step
        self._clock = Clock()
        self._lines = StepLines(config.steps, self._began, label)
        self._trained: tuple[GroupModel, ...] = ()
        # What became of training ranks, for the line of the step.
        self._heard: list[str] = []
        self._sampling: Sampling[Any] | None = None
        saved = self.start.progress.state
        self._health = HealthWarnings(saved.get(_HEALTH), config.health)
        known = saved.get(_METRICS, {}).items()
        self.last_metrics = {name: number for name, value in known if (number := as_number(value)) is not None}
        self._load_data()

    def _load_data(self) -> None:
        """Data that a run reads and checks itself, before anything is started."""

    def __enter__(self) -> Self:
        config = self.config
        with ExitStack() as stack:
            lock = stack.enter_context(RunLock(config.run_dir))
            # Before the session, so that a start that fails leaves a report too.
            self.folder = RunFolder(config.run_dir, config, start=self.start, lock=lock, metrics_to=config.metrics_to)
            with ExitStack() as start_fails:
                start_fails.push(self.folder)
                opened = borrowed_session(self._borrowed, config) if self._borrowed else open_session(config, self._phases)
                self.session = stack.enter_context(opened)
                start_fails.pop_all()
            stack.push(self.folder)
            if config.trace:
                sources: list[TraceSource] = [*self.session.groups, *filter(None, [self.session.rollout])]
                with usable_run_dir(self.folder.path):
                    self.folder.record(sources)
            for group in self.session.groups:
                require_paths(group, config.model, self.folder.path)
                group.say_recoveries(self._hear)
            path, borrowed = self.folder.path, self._borrowed is not None
            # Folders of several runs on the session may end alike; whole paths would be too long for names.
            owner = f"{path.name}-{xxhash.xxh32_hexdigest(bytes(path))}"
            self._parts = Parts(config, self.session, self._phases, owner=owner, borrowed=borrowed)
            stack.push(self._parts)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._stop.insisted and self._answers_signals:
            self._saver.abandon()
        self._stack.__exit__(*error)

    def build_model(
        self,
        name: str,
        *,
        group: int = 0,
        forward_only: bool = False,
        head: Head = "log_probs",
        hf_path: Path | str | None = None,
        optimizer: OptimizerConfig | None = None,
        router_replay: RouterReplayMode = "off",
    ) -> GroupModel:
        """Builds a model on the training group of that number, or on the last one.

        With ``lora.rank`` it is a LoRA tenant of the group's frozen model, which is the forward-only model itself.

        Args:
            hf_path: a directory, or a name on the Hub; None takes the run's ``model``.
            optimizer: None takes the run's.
            router_replay: for a policy that is updated.
        """
        return self._parts.build(ModelRecipe(name, group, forward_only, head, hf_path, optimizer, router_replay))

    def phase(self, name: str, waits_for: str) -> AbstractContextManager[None]:
        """Prints a phase of your own of the start, with its time: ``with run.phase("data", "reading train.jsonl"):``."""
        return self._phases.phase(name, waits_for)

    def begin(self, title: str, trained: Mapping[str, GroupModel], facts: Sequence[str] = ()) -> None:
        """Restores the models of the checkpoint that the run continues, if any, and prints what the run is, with ``facts``.

        Args:
            trained: the models that checkpoints hold, by the names of their directories.
        """
        self._restore(trained)
        say_facts(f"{self.label}{title}", [*facts, *self._chosen, *faster_dtype(self.config), *self.start.describe()])

    def steps(self) -> Iterator[int]:
        """The numbers of the steps that are left. Each ends with :meth:`end_step`.

        SIGTERM, or one Ctrl-C, ends the run after the step that it is in, with a checkpoint if ``save_every`` is set.

        Raises:
            RunStopped: the run was asked to end.
        """
        stopping = self._stack.enter_context(ExitStack())
        if self._answers_signals:
            kept = "and its checkpoint is committed" if self.config.save_every else "without a checkpoint (save_every=0)"
            stopping.enter_context(self._stop.on_signals(f"the run ends when this step is done {kept}"))
        self._lines.begin()
        for step in range(self.start.step + 1, self.config.steps + 1):
            self._step, self._clock = step, Clock()
            yield step
            if self._stop.reason and step < self.config.steps:
                self._end_after(step)
        stopping.close()
        self._saver.finish()

    def lap(self, phase: str) -> None:
        """Ends a phase of the step: the metrics ``seconds/<phase>`` and ``tokens_per_second/<phase>``, of results that have
        come.
        """
        # Of the trained model that had most: models of different groups compute at the same time.
        self._clock.lap(phase, max((model.tokens.take() for model in self._trained), default=0))

    def end_step(self, metrics: Mapping[str, float]) -> None:
        """Saves a checkpoint if one is due, logs and prints the step, warns, and commits what is saved by now. Ends the run
        with an error where the step is beyond one of the ``health`` limits that are to stop it.

        The run adds ``tokens_per_second/<phase>`` and ``peak_memory_gib``, of the rank that has held most so far, to
        ``metrics``, ``recovery/...`` where training ranks were replaced in the step, and ``reshape/...`` where a group got
        another layout; why stands among the step's ``warnings``.
        """
        step, clock, sampling = self._step, self._clock, self._sampling
        self.last_metrics = dict(metrics)
        # First: with async_save files are written while the step is evaluated. Ranks that are in host memory by now saved
        # before the push.
        if not self._parts.ranks_are_away:
            self._saver.save(step, clock)
        measured = {**metrics, **clock.rates, "peak_memory_gib": self._parts.peak_memory / 2**30}
        warnings = self._health.warnings(step, measured | free_disk(self.folder.path))
        also: dict[str, float] = {}
        if sampling is not None:
            if sampling.evaluates(step):
                self._parts.require_engines()
            measured |= sampling.end_step(step, measured.get("log_prob_gap", 0.0), clock) | self._engines.take()
            also["weight_version"] = sampling.version
        heard, self._heard = self._heard, []
        self.folder.log(step, measured | clock.seconds | also | self._parts.take_recoveries(), [*warnings, *heard])
        if sampling is not None:
            sampling.log_samples(step)
        self._lines.end(step, measured, clock.seconds)
        for warning in warnings:
            warn(warning, self.label)
        # After the logs: a checkpoint says how long they are.
        self._saver.commit(step, self._state(), self._position)
        if self._on_step:
            self._on_step(step, measured)
        if self._health.stop:
            raise RLBackendError(f"{self._health.stop}. The run stops here: health.on_limit=stop")
        # A run that is to end has its checkpoint to commit.
        for group in self._parts.groups if step < self.config.steps and not self._stop.reason else ():
            if group.has_room:
                self._saver.finish()
                self._say_reshaped(group.grow())

    def reshape(self, ranks: int, config: RuntimeConfig | None = None, *, group: int = 0, **sizes: int) -> None:
        """Moves a training group to another number of ranks or another layout between two steps, from memory.

        Arguments and errors are those of :meth:`~actors.train.group.TrainGroup.reshape`. A run that continues from a later
        checkpoint has the layout of its configuration.
        """
        self._saver.finish()
        self._say_reshaped(self._parts.groups[group].reshape(ranks, config, **sizes))

    def _say_reshaped(self, reshaped: Reshaped | None) -> None:
        if reshaped is not None:
            self._heard.append(reshaped.describe())
            say(f"{self.label}{reshaped.describe()}")

    def _hear(self, problem: str) -> None:
        self._heard.append(problem)
        warn(problem, self.label)

    def save_model(self, model: GroupModel, name: str = "model") -> Path:
        """Writes a model as a Hugging Face directory of the run's folder.

        Of a LoRA tenant that is peft's directory, and with ``lora.save_merged`` ``<name>_merged`` is the whole model.
        """
        self._parts.to_ranks()
        path, lora = self.folder.place(name), self.config.lora
        if model.base is None:
            model.group.save_checkpoint(model.handle, path, hf=True)
            return path
        factors = model.group.export_lora_adapter(model.handle)
        write_peft_directory(path, factors.items(), tenant_config(lora), model.hf_path)
        if lora.save_merged:
            model.group.save_checkpoint(model.handle, self.folder.place(f"{name}_merged"), hf=True)
        return path

    def _end_after(self, step: int) -> NoReturn:
        if self._saver.lacks(step):
            self._parts.to_ranks()
        checkpoint = self._saver.end(step, self._state(), self._position)
        how = f"after step {step} of {self.config.steps}"
        if checkpoint is None:
            how += ", without a checkpoint (save_every=0)"
        else:
            how += f", with a checkpoint: continue with --resume auto, from {checkpoint.name}"
        stopped = self._stop.stopped(how)
        say(f"{self.label}ended by {stopped}")
        raise stopped

    def _state(self) -> dict[str, Any]:
        sampling = {} if self._sampling is None else self._sampling.state
        chosen = chosen_options(self.config)
        return {**sampling, CHOSEN: chosen, _HEALTH: self._health.state, _METRICS: finite(self.last_metrics, json.dumps)}

    @property
    def _position(self) -> StreamPosition | None:
        return None if self._sampling is None else self._sampling.position

    def _restore(self, trained: Mapping[str, GroupModel]) -> None:
        checkpoint = self.start.checkpoint
        with nullcontext() if checkpoint is None else self.phase("checkpoint", f"loading {checkpoint.path.name}"):
            self._saver = self._stack.enter_context(RunSaver(self.config, self.folder, trained, self.start))
        self._trained = tuple(trained.values())

    def _begin_sampling[B: CollectedBatch](
        self,
        title: str,
        trained: Mapping[str, GroupModel],
        facts: Sequence[str],
        config: SampledConfig,
        inputs: Inputs | EpisodeInputs,
        open_source: Callable[[RolloutGroup, str | None], Source[Any, B]],
    ) -> None:
        self._restore(trained)
        policy = next(iter(trained.values()))
        self._engines = self._stack.enter_context(EngineEvents(self._parts.rollout, self.label))
        self._parts.connect(policy, config.transport)
        adapter = policy.handle.name if self._parts.serves_adapters else None
        source = self._stack.enter_context(open_source(self._parts.rollout, adapter))
        push, progress = self._parts.push, self.start.progress
        self._sampling = Sampling(config, inputs, source, push, self.folder, progress, began=self._began, label=self.label)
        pushed, results = self._sampling.begin(self.start.step, self._phases, first=self.start.checkpoint is None)
        merged = "" if policy.base is None or adapter else " with the adapter added"
        weights, turns = f"weights{merged} by {pushed.transport}", filter(None, [self._parts.colocation])
        known = [*facts, *self._chosen, weights, *turns, *faster_dtype(config), *self.start.describe()]
        say_facts(f"{self.label}{title}", known)
        self._sampling.begin_steps(results)

    @property
    def _sampled(self) -> Sampling[Any]:
        assert self._sampling is not None, "begin comes first"
        return self._sampling

    def write_summary(self, results: Mapping[str, float]) -> None:
        """``summary.json`` of a loop's own results, with ``steps`` and the ``seconds`` since the command, or its resume."""
        seconds = time.monotonic() - self._began
        self.folder.write_summary({**results, "steps": self.config.steps, "seconds": seconds})
