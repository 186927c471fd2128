"""Checkpoints of a run as it goes: every model and the loop's state, committed together when all are written."""

import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from actors.folder.checkpoints import CHECKPOINTS, Progress, RunCheckpoints, StreamPosition
from actors.folder.folder import RunFolder
from actors.folder.identity import require_same_dtype, saved_facts
from actors.folder.resume import RunStart
from actors.options.sampled_config import RunConfig
from actors.train.model import GroupModel
from actors.watch.metrics import Clock
from rl_backend.contracts import CheckpointError

# A run that ends with an error, Ctrl-C too, waits so long for its last checkpoint; another Ctrl-C ends the wait.
_WAIT_SECONDS = 300.0


class RunSaver:
    """Loads the models of a run where it begins, and saves them every ``config.save_every`` steps and after the last.

    In a step :meth:`save` comes after the update and :meth:`commit` after the step's lines are logged. With
    ``config.async_save`` files are written while later steps run, and committed after the step in which the last is written.
    ``models`` are by the names of their directories. A context manager, which ends before the groups of its models.

    Raises:
        ConfigError: the checkpoint's run has another dtype than this cluster gives it.
    """

    def __init__(self, config: RunConfig, folder: RunFolder, models: Mapping[str, GroupModel], start: RunStart) -> None:
        self._config = config
        self._folder = folder
        self._models = models
        keep = config.keep_checkpoints if config.save_every else 0
        self._store = RunCheckpoints(folder.path / CHECKPOINTS, keep or None)
        self._store.put_aside(start.damaged)
        self._store.clean_up()
        self._run = {**saved_facts(config), "dtype": config.trained_dtype} if config.save_every else {}
        self._saving: int | None = None
        self._saved: int | None = None
        self._state: Mapping[str, Any] = {}
        if start.checkpoint is not None:
            require_same_dtype(config, start.progress)
            for name, model in models.items():
                model.group.load_checkpoint(model.handle, start.checkpoint.model(name))

    def save(self, step: int, clock: Clock) -> None:
        if self._is_due(step) and self._saved != step:
            self._begin(step)
            clock.lap("save")

    def lacks(self, step: int) -> bool:
        """Whether :meth:`end` saves the models."""
        return bool(self._config.save_every) and self._saved != step

    def end(self, step: int, parts: Mapping[str, Any], position: StreamPosition | None = None) -> Path | None:
        """Commits a checkpoint of ``step``, after which a run ends early, and waits until it is written; None without
        ``save_every``.
        """
        if not self._config.save_every:
            return None
        if self.lacks(step):
            self._begin(step)
            self.commit(step, parts, position)
        self.finish()
        committed = self._store.latest()
        return None if committed is None else committed.path

    def abandon(self) -> None:
        self._state = {}

    def _begin(self, step: int) -> None:
        # One checkpoint is written at a time; a slow disk makes the loop wait here.
        self.finish()
        # Made here: on NFS a driver that has looked for it, and finds it made elsewhere, would not see it for a while.
        draft = self._store.make_draft(step)
        self._saving = self._saved = step
        for name, model in self._models.items():
            model.group.save_checkpoint(model.handle, draft / name, asynchronous=self._config.async_save)

    def commit(self, step: int, parts: Mapping[str, Any], position: StreamPosition | None = None) -> None:
        """Adds the loop's state to the checkpoint of ``step``, if one was begun, and commits what is written by now.

        Args:
            parts: of JSON, by the part of the loop that wants it back from :meth:`Progress.part`.
        """
        if self._saving == step:
            draft, logs = self._store.draft(step), self._folder.sync_logs()
            # Assigned last: what ends in between is not committed.
            self._state = Progress.saved(draft, step, self._run, logs, parts, position).state
        if self._saving is not None and not self._is_being_written():
            self.finish()

    def finish(self, timeout: float | None = None) -> None:
        """Waits for a checkpoint that is being written, up to ``timeout`` seconds, and commits it."""
        if self._saving is None:
            return
        deadline = None if timeout is None else time.monotonic() + timeout
        for model in self._models.values():
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            model.group.wait_for_checkpoint.submit(model.handle).result(left)
        # The commit would take the models that are there for all.
        draft = self._store.draft(self._saving)
        missing = [name for name in self._models if not (draft / name).is_dir()]
        if missing:
            raise CheckpointError(f"{draft} has no {', '.join(missing)}: the save has failed", path=str(draft))
        with ExitStack() as groups:
            # A recovery would look for what was saved where it was, or for a checkpoint that the commit removes.
            for group in dict.fromkeys(model.group for model in self._models.values()):
                groups.enter_context(group.steady())
            committed = self._store.commit(self._saving, self._state)
            for name, model in self._models.items():
                model.group.bound(model.handle, draft / name, committed.model(name))
        self._saving, self._state = None, {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.finish()
        elif self._saving is not None and self._state:
            try:
                self.finish(_WAIT_SECONDS)
            except (Exception, KeyboardInterrupt) as problem:  # noqa: BLE001, the error that ends the run is the one to tell
                reason = f"{type(problem).__name__}: {problem}".rstrip(": ")
                error.add_note(f"the checkpoint of step {self._saving} was not committed, {reason}")

    def _is_due(self, step: int) -> bool:
        every = self._config.save_every
        if not every:
            return False
        wanted = any(model.group.wants_boundary for model in self._models.values())
        return wanted or step % every == 0 or step == self._config.steps

    def _is_being_written(self) -> bool:
        return any(model.group.checkpoint_is_pending(model.handle) for model in self._models.values())
