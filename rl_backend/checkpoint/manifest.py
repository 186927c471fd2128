"""Manifests: sealed JSON that makes a directory a complete checkpoint."""

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Self

import xxhash
from pydantic import Field, ValidationError, field_validator

from rl_backend.checkpoint.confined import require_inside, require_names
from rl_backend.contracts import CheckpointError, ConfigError, Head
from rl_backend.contracts.base_config import BaseConfig

_DIGEST = '"digest": "{}"'


class SealedConfig(BaseConfig):
    """A configuration that is written with a digest of its text."""

    # xxh3-64 of the text with this field empty. It comes first, so that only its place in the text is looked for.
    digest: str = ""

    def sealed_text(self) -> str:
        text = self.replace(digest="").model_dump_json(indent=1)
        return text.replace(_DIGEST.format(""), _DIGEST.format(_digest(text)), 1)

    @classmethod
    def read_sealed(cls, file: Path) -> Self:
        """Reads a file of :meth:`sealed_text`; :class:`CheckpointError` where it is of another kind, or was changed."""
        try:
            text = file.read_text(encoding="utf-8")
            found = cls.model_validate_json(text)
        except ValidationError as error:
            problem = "; ".join(": ".join((*map(str, each["loc"]), each["msg"])) for each in error.errors())
        except (ConfigError, UnicodeDecodeError, OSError) as error:
            problem = str(error)
        else:
            if _digest(text.replace(_DIGEST.format(found.digest), _DIGEST.format(""), 1)) == found.digest:
                return found
            problem = "it has other text than was written"
        details = {"path": str(file.parent), "name": file.name}
        raise CheckpointError(f"{file} is damaged: {problem}; take an earlier checkpoint", **details)


def _digest(text: str) -> str:
    return str(xxhash.xxh3_64_hexdigest(text.encode()))


MANIFEST_NAME = "manifest.json"
_FORMAT = re.compile(r'"format"\s*:\s*(\d+)')


class FileFacts(BaseConfig):
    """Size and xxh3-64, 16 hexadecimal digits, of a file when it was written."""

    num_bytes: int = Field(ge=0)
    xxh3: str


class TenantFacts(BaseConfig):
    """Facts about the LoRA tenant that a checkpoint holds.

    Attributes:
        config: its ``LoRAConfig``.
        base: digest of the weights of the model that it adapts, with ``+`` and that of a checkpoint that it had loaded.
        num_draws: passes in which it has drawn dropout.
    """

    config: dict[str, Any]
    base: str
    num_draws: int = Field(ge=0)


class TrainingManifest(SealedConfig):
    """Everything about a checkpoint that is not a tensor.

    Attributes:
        parameters: Hugging Face name -> shape; the fingerprint of the model.
        private: those of ``parameters`` that the runtime saved under private names, which no other runtime reads.
        kept: Hugging Face name -> shape of weights that are not trained: an exported model takes them from the directory
            that the run began from.
        in_float32: Hugging Face names of weights that are computed with in float32, whatever the dtype of the rest.
        fewer_steps: Hugging Face name -> steps, of parameters that had no gradient in some of them.
        runtime_config: ``RuntimeConfig`` of the run, for readers; only ``backend`` and the layout are used.
        lora: of a tenant's checkpoint, which has no weights of the base; None for a whole model.
        extra: from the caller of ``save_checkpoint``.
    """

    format: Literal[2] = 2
    model_type: str
    parameters: dict[str, tuple[int, ...]]
    private: tuple[str, ...] = ()
    kept: dict[str, tuple[int, ...]] = Field(default_factory=dict)
    in_float32: tuple[str, ...] = ()
    head: Head = "log_probs"
    weight_version: int = Field(ge=0)
    schedule_steps: int = Field(ge=0)
    optimizer_steps: int = Field(ge=0)
    fewer_steps: dict[str, int] = Field(default_factory=dict)
    world_size: int = Field(ge=1)
    runtime_config: dict[str, Any]
    lora: TenantFacts | None = None
    extra: dict[str, Any] = Field(default_factory=dict)
    files: dict[str, FileFacts] = Field(default_factory=dict)

    @field_validator("files")
    @classmethod
    def _names(cls, files: dict[str, FileFacts]) -> dict[str, FileFacts]:
        require_names(files)
        return files

    def require_model(self, model_type: str, parameters: Mapping[str, tuple[int, ...]], head: Head, path: Path) -> None:
        """Raises :class:`CheckpointError`, with the differences, unless the checkpoint is of this model."""
        problems = []
        if self.model_type != model_type:
            problems.append(f"a {self.model_type!r} model, this one is {model_type!r}")
        if self.head != head:
            problems.append(
                f"a model with head={self.head!r}, this one has head={head!r}; load it into one of "
                f"build_model(head={self.head!r})"
            )
        other = [name for name in {**self.parameters, **parameters} if self.parameters.get(name) != parameters.get(name)]
        if other and not problems:
            there, found = (shapes.get(other[0], "none") for shapes in (self.parameters, parameters))
            problems.append(
                f"another model: {other[0]} has shape {there} there and {found} here ({len(other)} differ); load it with "
                f"the configuration that saved it (hf_path={self.runtime_config.get('hf_path')!r})"
            )
        if problems:
            raise CheckpointError.at(path, f"holds {'; '.join(problems)}")

    def require_readable_by(self, backend: str, path: Path) -> None:
        """Raises :class:`CheckpointError` when another runtime saved parameters under private names."""
        saved = self.runtime_config.get("backend")
        if self.private and saved != backend:
            raise CheckpointError.at(
                path,
                f"was written by the {saved} runtime, which has {self.private[0]} and {len(self.private) - 1} other "
                f"weights in an order of its own that the {backend} runtime does not read; load it with backend={saved!r}, "
                "or take its weights alone: save_checkpoint(hf=True) there, hf_path here",
                backend=saved,
            )

    def require_files(self, path: Path) -> None:
        """Raises :class:`CheckpointError` for a file that is missing, of another size, or a link out of ``path``."""
        for name, facts in self.files.items():
            file = require_inside(path, name)
            found = file.stat().st_size if file.is_file() else None
            if found != facts.num_bytes:
                changed = f"damaged: {name} has {found} bytes, {facts.num_bytes} were written"
                problem = f"incomplete: {name} is missing" if found is None else changed
                raise CheckpointError.at(path, f"is {problem}", name=name)


def damaged(path: Path, name: str, what: str) -> CheckpointError:
    return CheckpointError.at(path, f"is damaged: {what}; take an earlier checkpoint", name=name)


def require_format(path: Path, name: str, reads: str, remedy: str) -> None:
    """By its number before its fields are read: those of another format would be told as damage."""
    with suppress(OSError):  # whoever reads the fields is told
        found = _FORMAT.search(require_inside(path, name).read_text(encoding="utf-8", errors="replace"))
        if found and found[1] != reads:
            problem = f"has format {found[1]}, this version reads format {reads}; {remedy}"
            raise CheckpointError.at(path, problem, is_damaged=False)


def read_manifest(path: Path) -> TrainingManifest:
    """The manifest of a directory; :class:`CheckpointError` for one that is absent, damaged or names files outside."""
    file = path / MANIFEST_NAME
    if not file.is_file():
        hint = (
            "it is a Hugging Face directory: give it as RuntimeConfig.hf_path"
            if (path / "config.json").is_file()
            else ("a save that did not finish leaves none" if path.is_dir() else "there is no such directory")
        )
        raise CheckpointError.at(path, f"has no {MANIFEST_NAME}, so it is no training checkpoint; {hint}")
    remedy = (
        "load it with the version that wrote it, and take its weights along: save_checkpoint(hf=True) there, hf_path here"
    )
    require_format(path, MANIFEST_NAME, "2", remedy)
    return TrainingManifest.read_sealed(file)
