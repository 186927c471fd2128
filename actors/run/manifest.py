"""A checkpoint of a run: its models, the loop's own state, and the manifest that says whether it is complete."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from rl_backend.checkpoint.confined import require_inside, require_names
from rl_backend.checkpoint.manifest import MANIFEST_NAME, FileFacts, SealedConfig
from rl_backend.checkpoint.training_state import file_facts
from rl_backend.contracts import CheckpointError

RUN_FILE = "run.json"


class RunManifest(SealedConfig):
    """``run.json``, which makes a directory a checkpoint of a run.

    Attributes:
        format: version of the layout.
        step: training steps taken.
        state: the loop's own.
        files: path -> size and digest, of each model's manifest and of every file beside the models.
    """

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
    """A committed checkpoint of a run.

    Attributes:
        step: training steps that it holds.
        state: what :meth:`RunCheckpoints.commit` was given.
        models: names of the directories that ``load_checkpoint`` takes.
    """

    path: Path
    step: int
    state: Mapping[str, Any]
    models: tuple[str, ...]

    def model(self, name: str) -> Path:
        """The directory of one model.

        Raises:
            CheckpointError: there is none of that name.
        """
        if name not in self.models:
            raise CheckpointError(
                f"{self.path} holds no {name!r}, only {', '.join(self.models)}; load a checkpoint of a run that trained it",
                path=str(self.path),
                name=name,
            )
        return self.path / name


def read_run_checkpoint(path: Path | str) -> RunCheckpoint:
    """Reads ``run.json`` and verifies that the checkpoint is the one that was committed; a link is followed.

    ``load_checkpoint`` verifies the contents of each model.

    Raises:
        CheckpointError: not a checkpoint of a run, a file that is missing or has other bytes than were written, or a name
            that leads out of the directory.
    """
    given = Path(path)
    path = given.resolve()
    file = path / RUN_FILE
    if not path.is_dir():
        raise CheckpointError(f"{given} is not a directory; give a step-... directory of a run", path=str(given))
    if not file.is_file():
        hint = (
            f"it is one model's; give {path.parent}, which holds the run's state as well"
            if (path / MANIFEST_NAME).is_file()
            else "give a step-... directory of a run, or remove it if it is what is left of one"
        )
        raise CheckpointError(f"{path} has no {RUN_FILE}, so it is no checkpoint of a run; {hint}", path=str(path))
    manifest = RunManifest.read_sealed(require_inside(path, RUN_FILE))
    for name, facts in manifest.files.items():
        if not require_inside(path, name).is_file():
            raise _damaged(path, name, "it is missing")
        if file_facts(path / name) != facts:
            raise _damaged(path, name, "it has other bytes than were written")
    return RunCheckpoint(path, manifest.step, manifest.state, models_among(manifest.files))


def models_among(files: Iterable[str]) -> tuple[str, ...]:
    """Names of the directories of models, of the paths in a checkpoint of a run."""
    return tuple(Path(name).parent.name for name in files if Path(name).name == MANIFEST_NAME)


def _damaged(path: Path, name: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is damaged, {name}: {what}; remove the directory to continue from an earlier one", path=str(path), name=name
    )
