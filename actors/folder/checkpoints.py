"""A run's checkpoints: several models and the run's progress as one, committed by one rename."""

import io
import json
import logging
import re
import shutil
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import torch
from pydantic import Field, field_validator

from actors.folder.lock import written_to
from actors.rollout.messages import Routes, Sample, VersionSpan
from rl_backend.checkpoint.confined import require_inside, require_names
from rl_backend.checkpoint.durable_commit import rename_synced, sync, with_notes, write_synced
from rl_backend.checkpoint.manifest import MANIFEST_NAME, FileFacts, SealedConfig, read_manifest, require_format
from rl_backend.checkpoint.metadata_unpickler import load_problem
from rl_backend.checkpoint.training_state import file_facts, require_written
from rl_backend.contracts import CheckpointError, ConfigError

CHECKPOINTS, LATEST, RUN_FILE = "checkpoints", "latest", "run.json"

_COMMITTED = re.compile(r"step-(\d{8,})")
_LEFT_BEHIND = re.compile(r"\.step-\d{8,}\.(incomplete|removed-[0-9a-f]{8})|\.latest\.new")

_REMEDY = "; remove the directory to continue from an earlier one"

logger = logging.getLogger(__name__)


class RunManifest(SealedConfig):
    """``run.json``, which makes a directory a checkpoint of a run; ``files`` has each model's manifest, and other files."""

    format: Literal[1] = 1
    step: int = Field(ge=0)
    state: dict[str, Any]
    files: dict[str, FileFacts]

    @field_validator("files")
    @classmethod
    def _names(cls, files: dict[str, FileFacts]) -> dict[str, FileFacts]:
        require_names(files, depth=2)
        return files


@dataclass(frozen=True)
class RunCheckpoint:
    """A committed checkpoint: the loop's ``state``, and ``models``, names of directories for ``load_checkpoint``."""

    path: Path
    step: int
    state: Mapping[str, Any]
    models: tuple[str, ...]

    def model(self, name: str) -> Path:
        """The directory of one model; ``load_checkpoint`` refuses one that is not there."""
        return self.path / name


def read_run_checkpoint(path: Path | str) -> RunCheckpoint:
    """Reads ``run.json`` and verifies that the checkpoint is the one that was committed; a link is followed.

    Raises:
        CheckpointError: not a checkpoint of a run, or a file that is missing, has other bytes, or lies outside.
    """
    path = Path(path).resolve()
    if not (path / RUN_FILE).is_file():
        hint = (
            f"it is one model's; give {path.parent}, which holds the run's state as well"
            if (path / MANIFEST_NAME).is_file()
            else "give a step-... directory of a run, or remove it if it is what is left of one"
        )
        raise CheckpointError(f"{path} has no {RUN_FILE}, so it is no checkpoint of a run; {hint}", path=str(path))
    require_format(path, RUN_FILE, "1", "continue with the version that wrote it")
    manifest = RunManifest.read_sealed(require_inside(path, RUN_FILE))
    for name, facts in manifest.files.items():
        missing = not require_inside(path, name).is_file()
        if missing or file_facts(path / name) != facts:
            what = "it is missing" if missing else "it has other bytes than were written"
            raise CheckpointError(
                f"{path} is damaged, {name}: {what}{_REMEDY}",
                path=str(path),
                name=name,
            )
    return RunCheckpoint(path, manifest.step, manifest.state, models_among(manifest.files))


def read_whole(path: Path) -> RunCheckpoint:
    """As :func:`read_run_checkpoint`, which leaves the files of the models to their ranks; this reads them too."""
    checkpoint = read_run_checkpoint(path)
    for model in map(checkpoint.model, checkpoint.models):
        manifest = read_manifest(model)
        manifest.require_files(model)
        for name, facts in manifest.files.items():
            require_written(model, name, facts)
    return checkpoint


class RunCheckpoints:
    """The checkpoints of one run under ``root``: ``step-00000010`` and so on, and ``latest``, a link to the newest.

    Models are saved into a draft, which :meth:`commit` renames: a save that was cut off is never taken for a checkpoint::

        checkpoints = RunCheckpoints("runs/mine/checkpoints", keep_last=3)
        runtime.save_checkpoint(policy, checkpoints.draft(step) / "policy")      # every rank
        if dist.get_rank() == 0:
            checkpoints.commit(step, {"batches": batches_taken})                 # one process, after the saves

    :meth:`clean_up`, :meth:`commit` and :meth:`latest` are for one process of the run, which tells the others what it found:
    on a shared file system ranks that look for themselves may see different directories. One run writes to a ``root``.

    Raises:
        ConfigError: ``keep_last`` below 1.
    """

    def __init__(self, root: Path | str, keep_last: int | None = None) -> None:
        if keep_last is not None and keep_last < 1:
            raise ConfigError.of("RunCheckpoints.keep_last", keep_last, "expected at least 1, or None to keep all")
        self.root = Path(root)
        self.keep_last = keep_last

    def steps(self) -> list[int]:
        return [step for step, _ in self._committed()]

    def latest(self) -> RunCheckpoint | None:
        """The newest committed checkpoint; None without any.

        Raises:
            CheckpointError: it is damaged. An earlier one is not used instead, because the run had continued; see
                :meth:`newest_whole`.
        """
        # Not by the link ``latest``, which a run that was killed may have left behind.
        committed = self._committed()
        return read_run_checkpoint(committed[-1][1]) if committed else None

    def newest_whole(self) -> tuple[RunCheckpoint | None, dict[Path, str]]:
        """The newest checkpoint that has every byte that was written, and what is wrong with those after it.

        Raises:
            CheckpointError: all are damaged, or one is of another format or has links out of it.
        """
        damaged: dict[Path, str] = {}
        for _, path in reversed(self._committed()):
            try:
                return read_whole(path), damaged
            except OSError as error:
                damaged[path.resolve()] = f"{path} is damaged: {error}"
            except CheckpointError as error:
                if not error.details.get("is_damaged", True):
                    raise
                damaged[path.resolve()] = error.message.removesuffix(_REMEDY)
        if damaged:
            raise CheckpointError(f"every checkpoint is damaged: {'; '.join(damaged.values())}", path=str(self.root))
        return None, {}

    def put_aside(self, damaged: Iterable[Path]) -> None:
        """Gives directories names that no checkpoint has."""
        for path in damaged:
            with written_to(path):
                path.rename(path.with_name(f"{path.name}.damaged-{uuid.uuid4().hex[:8]}"))

    def draft(self, step: int) -> Path:
        """The directory that holds the checkpoint of ``step``, and files beside its models, until it is committed."""
        path = self._path(step)
        with written_to(self.root):
            newest = max(self.steps(), default=-1)
        if newest >= step:
            raise CheckpointError(
                f"{self.root} has a checkpoint of step {newest}, so one of step {step} would not be its newest; remove "
                "those after it, or save to another directory",
                path=str(path),
            )
        return self.root / f".{path.name}.incomplete"

    def make_draft(self, step: int) -> Path:
        draft = self.draft(step)
        with written_to(draft):
            draft.mkdir(parents=True, exist_ok=True)
        return draft

    def commit(self, step: int, state: Mapping[str, Any]) -> RunCheckpoint:
        """Makes the draft of ``step`` a checkpoint, in one rename, then points ``latest`` to it and removes old ones.

        Args:
            state: what the loop needs to continue: JSON, with strings as keys.

        Raises:
            CheckpointError: a model is missing or still being saved, ``state`` is not JSON, or the file system refuses.
        """
        draft, path = self.draft(step), self._path(step)
        if lost := [name for name, value in state.items() if not _is_json(name, value)]:
            raise CheckpointError(
                f"the state for {draft} would not be read back as it is: {lost[0]}={state[lost[0]]!r}; use JSON: lists, "
                "finite numbers, and strings as keys",
                path=str(draft),
            )
        try:
            manifest = RunManifest(step=step, state=dict(state), files=_saved_files(draft))
            # The manifest last: with it the draft is whole, and one rename makes it a checkpoint.
            write_synced(draft / RUN_FILE, manifest.sealed_text())
            sync(draft)
            rename_synced(draft, path)
        except OSError as error:
            raise CheckpointError(f"cannot commit {path}: {with_notes(error)}", path=str(path)) from error
        self._point_latest_to(path)
        # Last: a crash in between leaves one too many, not one too few.
        self._remove_old()
        return RunCheckpoint(path, step, manifest.state, models_among(manifest.files))

    def discard(self, step: int) -> None:
        """Removes the draft of ``step``, if any, to save that step again after one of its saves has failed.

        For one process, while no rank saves to the draft; raises as :meth:`draft`, and when it cannot be renamed.
        """
        draft = self.draft(step)
        if draft.exists():
            _discard(draft)

    def clean_up(self) -> None:
        """Removes what a run that was killed has left unfinished, and points ``latest`` to the newest checkpoint.

        To be called before the first save, when no other run writes to ``root``; raises when a draft cannot be renamed.
        """
        if not self.root.is_dir():
            return
        for entry in list(self.root.iterdir()):
            match = _LEFT_BEHIND.fullmatch(entry.name)
            if match and match[1] == "incomplete":
                _discard(entry)
            elif match:
                _remove(entry)
        committed = self._committed()
        if committed:
            self._point_latest_to(committed[-1][1])
            self._remove_old()

    def _path(self, step: int) -> Path:
        return self.root / f"step-{step:08d}"

    def _committed(self) -> list[tuple[int, Path]]:
        if not self.root.is_dir():
            return []
        found = ((_COMMITTED.fullmatch(entry.name), entry) for entry in self.root.iterdir())
        return sorted((int(match[1]), entry) for match, entry in found if match and entry.is_dir())

    def _point_latest_to(self, path: Path) -> None:
        new = self.root / ".latest.new"
        try:
            new.unlink(missing_ok=True)
            new.symlink_to(path.name)
            new.replace(self.root / LATEST)
            sync(self.root)
        except OSError as error:
            # The checkpoint is committed, and resuming looks at the directories.
            logger.warning("%s does not point to %s: %s", self.root / LATEST, path.name, error)

    def _remove_old(self) -> None:
        if self.keep_last is None:
            return
        for _, path in self._committed()[: -self.keep_last]:
            try:
                _take_away(path, f".{path.name}")
            except OSError as error:
                logger.warning("the old checkpoint %s could not be removed: %s", path, error)


def _saved_files(draft: Path) -> dict[str, FileFacts]:
    files = {}
    entries = sorted(draft.iterdir()) if draft.is_dir() else []
    for entry in entries:
        # A save that has not finished has a hidden name, whatever it holds by now.
        if entry.name.startswith(".") or (entry.is_dir() and not (entry / MANIFEST_NAME).is_file()):
            raise CheckpointError(
                f"{entry} is not what save_checkpoint leaves when it is done, without hf; commit after wait_for_checkpoint",
                path=str(draft),
            )
        file = entry / MANIFEST_NAME if entry.is_dir() else entry
        if file.name != RUN_FILE:
            if file is entry:
                sync(file)  # save_checkpoint has flushed its own
            files[str(file.relative_to(draft))] = file_facts(file)
    if not models_among(files):
        raise CheckpointError(f"no model has been saved to {draft}; save at least one before the commit", path=str(draft))
    return files


def _is_json(name: object, value: Any) -> bool:
    try:
        return isinstance(name, str) and bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False


def _discard(draft: Path) -> None:
    try:
        _take_away(draft, draft.stem)
    except OSError as error:
        raise CheckpointError(
            f"{draft}, which was left unfinished, cannot be renamed: {error}; remove it, or the step cannot be saved again",
            path=str(draft),
        ) from error


def _take_away(directory: Path, name: str) -> None:
    # Half removed under its own name, a checkpoint would be taken for a damaged one. What cannot be removed, such as files
    # that are open on NFS or that a process left over still writes, is then in nobody's way.
    removed = directory.with_name(f"{name}.removed-{uuid.uuid4().hex[:8]}")
    directory.rename(removed)
    _remove(removed)


def _remove(entry: Path) -> None:
    try:
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    except OSError as error:
        logger.warning("%s, which is no checkpoint any more, could not be removed: %s", entry, error)


def models_among(files: Iterable[str]) -> tuple[str, ...]:
    return tuple(Path(name).parent.name for name in files if Path(name).name == MANIFEST_NAME)


DRAWN_SAMPLES = "drawn_samples.pt"


@dataclass(frozen=True)
class StreamPosition:
    """A place between two batches of the data.

    Attributes:
        taken: batches that training has taken.
        drawn: samples of the following batches, where they are complete; their prompts are those of the data.
    """

    taken: int = 0
    drawn: Sequence[Sequence[Sample]] = ()


class Identity(NamedTuple):
    """What a resumed run must share with the one before: its configuration's class, options that are not the default, facts
    of the files and functions that options name, dtype of the trained parameters.
    """

    example: str
    options: Mapping[str, Any]
    contents: Mapping[str, Any]
    dtype: str | None = None


@dataclass(frozen=True)
class Progress:
    """How far a run has come after a step; ``path`` is the checkpoint's directory, None where a run begins.

    A run that continues compares :attr:`identity`, cuts the logs of its folder back to :attr:`logs`, and restores the rest.
    The JSON ``state`` has ``run``, ``logs``, ``batches``, and what each part of the loop wants back by its name.
    """

    step: int = 0
    state: Mapping[str, Any] = field(default_factory=dict)
    path: Path | None = None

    @classmethod
    def of(cls, checkpoint: RunCheckpoint | None) -> Self:
        return cls() if checkpoint is None else cls(checkpoint.step, checkpoint.state, checkpoint.path)

    @classmethod
    def saved(
        cls,
        draft: Path,
        step: int,
        identity: Mapping[str, Any],
        logs: Mapping[str, Any],
        parts: Mapping[str, Any],
        position: StreamPosition | None,
    ) -> Self:
        # No random state: what is drawn follows from seed, step and batch, and the generators of ranks are in the models.
        state = {"run": identity, "logs": logs, **parts}
        if position is not None:
            state["batches"] = {"taken": position.taken}
            save_drawn(position.drawn, draft)
        return cls(step, state, draft)

    def part(self, name: str) -> Mapping[str, Any]:
        """What a part of the loop has saved; empty where a run begins, refused where a checkpoint has none."""
        if self.path is None:
            return {}
        saved = self.state.get(name)
        if not isinstance(saved, Mapping):
            problem = f"{self.path} has no usable {name!r} in its state; continue from another checkpoint"
            raise CheckpointError(problem, path=str(self.path))
        return saved

    @property
    def identity(self) -> Identity:
        try:
            saved: Mapping[str, Any] = self.state["run"]
            return Identity(saved["example"], dict(saved["options"]), dict(saved["contents"]), saved.get("dtype"))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            problem = f"{self.path} is of another program: its state does not say which run it belongs to"
            raise CheckpointError(
                f"{problem} ({type(error).__name__}: {error}); give it to that one", path=str(self.path)
            ) from None

    @property
    def logs(self) -> dict[str, FileFacts]:
        try:
            return {name: FileFacts(**facts) for name, facts in self.state["logs"].items()}
        except (AttributeError, KeyError, TypeError, ConfigError) as error:
            problem = f"does not say what the logs of its run held ({type(error).__name__}: {error})"
            raise CheckpointError(f"{self.path} {problem}; continue from it in a new run_dir", path=str(self.path)) from None

    @property
    def position(self) -> StreamPosition:
        """Where a stream of samples continues; refused where samples that were drawn ahead cannot be read."""
        if self.path is None:
            return StreamPosition()
        return StreamPosition(self.taken, load_drawn(self.path))

    @property
    def taken(self) -> int:
        """Batches of samples that the steps have taken."""
        return int(self.part("batches").get("taken", 0))


def save_drawn(batches: Sequence[Sequence[Sample]], directory: Path) -> None:
    path, written = directory / DRAWN_SAMPLES, io.BytesIO()
    torch.save([[_to_dict(sample) for sample in batch] for batch in batches], written)
    with written_to(path):
        # Not getbuffer(): Python crashes when it collects a BytesIO whose buffer an error still holds.
        path.write_bytes(written.getvalue())


def load_drawn(directory: Path) -> list[list[Sample]]:
    path = directory / DRAWN_SAMPLES
    try:
        return [[_from_dict(sample) for sample in batch] for batch in torch.load(path, weights_only=True)]
    except Exception as error:  # pickle raises errors of any type for damaged data
        raise CheckpointError(f"{path} cannot be read: {load_problem(error)}", path=str(path)) from error


def _to_dict(sample: Sample) -> dict[str, Any]:
    values = {name: getattr(sample, name) for name in Sample.__dataclass_fields__}
    values["version_spans"] = [tuple(span) for span in sample.version_spans]
    if sample.routes is not None:
        # torch knows no read-only tensors.
        values["routes"] = {
            "experts": torch.from_numpy(sample.routes.experts.copy()),
            "weight_version": sample.routes.weight_version,
        }
    if sample.sampling_mask is not None:
        values["sampling_mask"] = torch.from_numpy(sample.sampling_mask.copy())
    return values


def _from_dict(values: Mapping[str, Any]) -> Sample:
    routes, mask = values["routes"], values.get("sampling_mask")
    return Sample(
        **{
            **values,
            "version_spans": tuple(VersionSpan(*span) for span in values["version_spans"]),
            "routes": None if routes is None else Routes(routes["experts"].numpy(), routes["weight_version"]),
            "sampling_mask": None if mask is None else mask.numpy(),
        }
    )
