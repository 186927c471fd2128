"""Resuming: where a run begins, in a new folder or after a checkpoint, and its logs cut back to that checkpoint."""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Self

import xxhash

from actors.folder.checkpoints import CHECKPOINTS, Progress, RunCheckpoint, RunCheckpoints, read_run_checkpoint
from actors.folder.identity import deciding_options, require_same_run
from actors.folder.lock import usable_run_dir
from actors.folder.state import read_object
from actors.options.sampled_config import RunConfig
from rl_backend.checkpoint.manifest import FileFacts
from rl_backend.checkpoint.training_state import file_facts
from rl_backend.contracts import ConfigError
from rl_backend.lab.text import json_text


class LogFile:
    """Lines that are appended to a file, each whole when it is written; bytes after those that are ``kept`` are cut off."""

    def __init__(self, path: Path, kept: FileFacts | None = None) -> None:
        self._digest, self._size = xxhash.xxh3_64(), 0
        if kept is not None:
            require_unchanged(path, kept)
            with path.open("rb") as stream:
                while self._size < kept.num_bytes:
                    self._count(stream.read(min(kept.num_bytes - self._size, 1 << 22)))
        # Unbuffered: what a process that is killed has logged is in the file.
        self._file = path.open("ab", buffering=0)
        self._file.truncate(self._size)

    def write(self, *lines: Mapping[str, Any]) -> None:
        text = "".join(json_text(line, ensure_ascii=False) + "\n" for line in lines).encode()
        self._count(text)
        # A single write may take less than all, on a full disk for one.
        while text:
            text = text[self._file.write(text) :]

    def sync(self) -> FileFacts:
        os.fsync(self._file.fileno())
        return FileFacts(num_bytes=self._size, xxh3=self._digest.hexdigest())

    def close(self) -> None:
        self._file.close()

    def _count(self, data: bytes) -> None:
        self._digest.update(data)
        self._size += len(data)


def require_unchanged(log: Path, facts: FileFacts) -> None:
    try:
        found = file_facts(log, facts.num_bytes)
    except OSError as error:
        problem = f"cannot be read: {error}"
    else:
        if found == facts:
            return
        if found.num_bytes < facts.num_bytes:
            problem = f"has lost lines: it had {facts.num_bytes} bytes at the checkpoint and has {found.num_bytes}"
        else:
            problem = f"is damaged: its first {facts.num_bytes} bytes are not those that it had at the checkpoint"
    raise ConfigError.of("resume", str(log), f"{problem}; repair it, or continue from the checkpoint in a new run_dir")


LOGS = ("metrics.jsonl", "samples.jsonl", "held_out.jsonl")


class RunFinishedError(ConfigError):
    """A run that is continued with ``resume=auto`` has taken all its steps: nothing is left to do."""

    @classmethod
    def in_folder(cls, config: RunConfig) -> Self:
        return cls(f"the run in {config.run_dir} has finished its {config.steps} steps; raise steps to continue")


@dataclass(frozen=True)
class RunStart:
    """Where a run begins.

    Attributes:
        kept: what each log in the run folder had when the checkpoint was saved; of other logs nothing is kept.
        newest: step of the newest checkpoint in the run folder when this was decided.
        replaces: the folder holds steps of an interrupted run without a checkpoint, which this run repeats.
        damaged: checkpoints after the one that the run continues from, and what is wrong with each.
    """

    checkpoint: RunCheckpoint | None = None
    kept: Mapping[str, FileFacts] = field(default_factory=dict)
    newest: int | None = None
    replaces: bool = False
    damaged: Mapping[Path, str] = field(default_factory=dict)

    @property
    def step(self) -> int:
        return 0 if self.checkpoint is None else self.checkpoint.step

    @property
    def same_folder(self) -> bool:
        return bool(self.kept)

    @property
    def progress(self) -> Progress:
        return Progress.of(self.checkpoint)

    def describe(self) -> list[str]:
        return [] if self.checkpoint is None else [f"continuing after step {self.step}, from {self.checkpoint.path}"]

    def warnings(self) -> list[str]:
        return [
            f"{problem}. The run goes back to step {self.step} and takes the steps after it again; {path.name} is renamed"
            for path, problem in self.damaged.items()
        ]


def find_start(config: RunConfig) -> RunStart:
    """Follows ``config.resume``. Reads the run folder and changes nothing.

    Raises:
        RunFinishedError: ``resume=auto``, and the run has taken all its steps.
        ConfigError: the folder holds another run, or one that has finished, or ``config`` differs in an option that decides.
        CheckpointError: a checkpoint that is damaged, or none.
    """
    own = checkpoints_of(config)
    with usable_run_dir(config.run_dir), suppress(FileNotFoundError, NotADirectoryError):
        os.stat(config.run_dir)
    if Path(config.run_dir, "model").resolve() == Path(config.model).resolve():
        raise ConfigError.of("run_dir", config.run_dir, "its model/ is the model that training begins with; choose another")
    if config.resume is None:
        require_new_run(config.run_dir)
        return RunStart()
    newest = max(own.steps(), default=None)
    damaged: dict[Path, str] = {}
    if config.resume == "auto":
        checkpoint, damaged = own.newest_whole() if config.damaged_checkpoint == "earlier" else (own.latest(), {})
        if checkpoint is None:
            return RunStart(replaces=_may_be_replaced(config))
    else:
        _require_checkpoint(config.resume)
        checkpoint = read_run_checkpoint(config.resume)
    in_own_folder = checkpoint.path.parent == own.root.resolve()
    require_same_run(config, Progress.of(checkpoint))
    if checkpoint.step > config.steps:
        raise ConfigError.of(
            f"{type(config).__name__}.steps",
            config.steps,
            f"{checkpoint.path} is of step {checkpoint.step} already; raise it",
        )
    if not in_own_folder:
        if newest is not None:
            require_new_run(config.run_dir)
        return RunStart(checkpoint, replaces=_may_be_replaced(config))
    if newest is not None and newest > checkpoint.step and not damaged:
        raise ConfigError.of(
            "resume",
            config.resume,
            f"{config.run_dir} has later checkpoints, up to step {newest}; remove them, or continue in a new run_dir",
        )
    finished = _has_finished(config.run_dir) and read_file_of_run(config.run_dir, "config.json").get("steps")
    # A run that has finished and lacks its last checkpoint takes the steps after the newest that is left again.
    if finished == config.steps == checkpoint.step:
        if config.resume == "auto":
            raise RunFinishedError.in_folder(config)
        raise ConfigError.of(
            "resume",
            config.resume,
            f"the run in {config.run_dir} has finished its {config.steps} steps; raise steps to continue",
        )
    return RunStart(checkpoint, _kept_logs(checkpoint, config), newest, damaged=damaged)


def _require_checkpoint(path: str) -> None:
    """Refuses what is no checkpoint at first sight. Both the folder of a run and a checkpoint have a ``run.json``."""
    if Path(path).is_dir() and not (Path(path) / LOGS[0]).is_file():
        return
    problem = "is no folder; give auto, or a checkpoint, such as runs/grpo/checkpoints/latest"
    if Path(path).is_dir():
        problem = "is the folder of a run; give auto and this run_dir"
        if RunCheckpoints(Path(path) / CHECKPOINTS).steps():
            problem += f", or {path.rstrip('/')}/{CHECKPOINTS}/latest"
    raise ConfigError.of("resume", path, problem)


def _kept_logs(checkpoint: RunCheckpoint, config: RunConfig) -> dict[str, FileFacts]:
    kept = Progress.of(checkpoint).logs
    for name in LOGS:
        if name in kept:
            require_unchanged(Path(config.run_dir) / name, kept[name])
    return kept


def require_new_run(path: Path | str) -> None:
    with usable_run_dir(path):
        used = _has_steps(path) or RunCheckpoints(Path(path) / CHECKPOINTS).steps()
    if used:
        raise ConfigError.of(
            "run_dir", str(path), "holds another run; choose a new directory, remove it, or continue it with resume=auto"
        )
    _require_no_others(Path(path))


def _require_no_others(path: Path) -> None:
    """Refuses data and a model that have the names of a run's files, which would replace them."""
    found: list[str] = []
    with usable_run_dir(path):
        # That of a run is there before anything is in its logs. Its config.json comes first.
        if not (path / "run.json").exists():
            found = [name for name in LOGS[1:] if (path / name).exists() and (path / name).stat().st_size]
            config = path / "config.json"
            if config.exists() and '"model_type"' in config.read_text(encoding="utf-8", errors="replace"):
                found.append(config.name)
    if found:
        raise ConfigError.of("run_dir", str(path), f"has a {found[0]} that the run would replace; choose a new directory")


def checkpoints_of(config: RunConfig) -> RunCheckpoints:
    return RunCheckpoints(Path(config.run_dir) / CHECKPOINTS, config.keep_checkpoints or None)


def _may_be_replaced(config: RunConfig) -> bool:
    _require_no_others(Path(config.run_dir))
    if not (Path(config.run_dir) / "config.json").exists():
        return False
    earlier = read_file_of_run(config.run_dir, "config.json")
    began, begins = _origin(earlier.get("resume")), _origin(config.resume)
    has_steps = _has_steps(config.run_dir)
    if began != begins and (has_steps or begins is None):
        where = "at its first step" if began is None else f"after {began}"
        raise ConfigError.of(
            "resume",
            config.resume,
            f"the run in {config.run_dir} began {where} and has no checkpoint yet; start there again, with "
            f"resume={earlier.get('resume')!r}, or choose another run_dir",
        )
    if not has_steps:
        return False
    try:
        same = deciding_options(type(config)(**earlier)) == deciding_options(config)
    except ConfigError:
        same = False
    finished = _has_finished(config.run_dir)
    if same and finished and config.resume == "auto" and earlier.get("steps") == config.steps:
        raise RunFinishedError.in_folder(config)
    if finished or not same:
        which = "that has finished" if same else "with other options"
        problem = f"holds a run {which}, without a checkpoint; choose another, or remove it"
        raise ConfigError.of("run_dir", config.run_dir, problem)
    return True


def _origin(resume: str | None) -> Path | None:
    """The checkpoint of another run that a run begins with."""
    return None if resume in (None, "auto") else Path(str(resume)).resolve()


def _has_steps(run_dir: Path | str) -> bool:
    metrics = Path(run_dir) / LOGS[0]
    if not metrics.exists():
        return False
    # The line of step 0 has what was measured before training.
    with metrics.open("rb") as lines:
        return any(not line.startswith(b'{"step": 0,') for line in islice(lines, 2))


def _has_finished(run_dir: str) -> bool:
    return read_file_of_run(run_dir, "run.json").get("state") == "finished"


def read_file_of_run(run_dir: Path | str, name: str) -> dict[str, Any]:
    file = Path(run_dir) / name
    try:
        return read_object(file)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError.of(
            "run_dir",
            str(run_dir),
            f"{name} of the run in it cannot be read: {error}; put the file right, or choose a new run_dir",
        ) from None
