"""What a resumed run must have in common with the one before: options and files that decide what is learned.

Options that may change are in ``may_change`` of a run's configuration, see :mod:`actors.run.config`.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from actors.run.config import TrainingConfig, resolve_dtype
from actors.run.manifest import RunCheckpoint
from rl_backend.checkpoint.state_files import file_facts
from rl_backend.contracts import BACKEND_CONFIGS, CheckpointError, ConfigError

_EXECUTION = frozenset(
    {
        "device",
        "activation_checkpointing",
        "reshard_after_forward",
        "log_prob_chunk_tokens",
        "pipeline_schedule",
        "pipeline_layers",
        "recompute_granularity",
        "recompute_method",
        "recompute_num_layers",
        "recompute_modules",
    }
)
"""Fields of ``backend_options`` that decide how a step is computed, and not what; those of a plugin decide."""

_WHOLE = (".json", ".jinja", ".model", ".txt")
_SAMPLES, _SAMPLE_BYTES = 16, 1 << 16


def saved_facts(config: TrainingConfig) -> dict[str, Any]:
    """What a checkpoint says of its run, so that only the same one goes on from it.

    Raises:
        ConfigError: the dataset is missing.
    """
    return {"example": type(config).__name__, "options": deciding_options(config), "contents": _contents(config)}


def deciding_options(config: TrainingConfig) -> dict[str, Any]:
    """Those that a resumed run must have too, as JSON; without those that name files."""
    values = config.model_dump(mode="json", exclude={*config.may_change, *config.contents, "dtype"})
    backend = BACKEND_CONFIGS.get(config.backend)(parallel=config.parallel, **config.backend_options)
    given = backend.model_dump(mode="json", include=set(config.backend_options) - _EXECUTION)
    default = {name: field.get_default(call_default_factory=True) for name, field in type(backend).model_fields.items()}
    values["backend_options"] = {name: value for name, value in given.items() if getattr(backend, name) != default[name]}
    return values


def require_same_run(config: TrainingConfig, checkpoint: RunCheckpoint) -> None:
    """Checks all but a ``dtype`` of auto, see :func:`require_same_dtype`.

    Raises:
        ConfigError: names the first option in which ``config`` is another run than that of ``checkpoint``.
        CheckpointError: another program saved it.
    """
    name, path = type(config).__name__, checkpoint.path
    try:
        saved: Mapping[str, Any] = checkpoint.state["run"]
        if saved["example"] != name:
            raise ConfigError.of("resume", config.resume, f"{path} is of a run of {saved['example']}, this is one of {name}")
        options: dict[str, Any] = saved["options"]
        contents: dict[str, Any] = saved["contents"]
        if not (isinstance(options, dict) and isinstance(contents, dict)):
            raise TypeError("its options and contents are not objects")
    except KeyError as error:
        raise CheckpointError(f"{path} is of another program: its state has no {error}; give it to that one") from None
    except (TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is damaged, its state does not say of which run it is ({error}); go on from another checkpoint",
            path=str(path),
        ) from None
    here = deciding_options(config)
    for option in here | options:
        if options.get(option) != here.get(option):
            raise ConfigError.of(
                f"{name}.{option}",
                here.get(option),
                f"the run of {path} has {options.get(option)!r}, and would not go on as it was; use that, or a new run",
            )
    for option, found in _contents(config).items():
        if contents.get(option) != found:
            raise ConfigError.of(
                f"{name}.{option}",
                getattr(config, option),
                f"is not, byte for byte, what the run of {path} has; use that, or a new run",
            )
    if config.dtype != "auto":
        require_same_dtype(config, checkpoint, config.dtype)


def require_same_dtype(config: TrainingConfig, checkpoint: RunCheckpoint, dtype: str | None = None) -> None:
    """Raises :class:`ConfigError` unless ``config`` trains in the dtype that saved ``checkpoint``.

    Args:
        dtype: that of ``config``; None resolves it, which needs Ray.
    """
    saved = checkpoint.state["run"].get("dtype")
    dtype = dtype or resolve_dtype(config.dtype)
    if saved != dtype:
        raise ConfigError.of(
            f"{type(config).__name__}.dtype",
            config.dtype,
            f"is {dtype} here; the run of {checkpoint.path} has {saved}, and would not go on as it was; use dtype={saved}",
        )


def _contents(config: TrainingConfig) -> dict[str, Any]:
    if not Path(config.dataset).is_file():
        raise ConfigError.of("dataset", config.dataset, "no such file")
    return {name: _content(getattr(config, name)) for name in config.contents}


def _content(named: str | None) -> Any:
    """Of a file, a Hugging Face directory or a function; None where there is nothing, which is refused when it is loaded."""
    if named is None:
        return None
    path = Path(named)
    if path.is_dir():
        return {file.name: facts for file in sorted(path.iterdir()) if (facts := _model_file(file)) is not None}
    if path.is_file():
        return file_facts(path).model_dump(mode="json")
    location, separator, function = named.rpartition(":")
    source = _source(location) if separator else None
    return None if source is None else {"function": function, **file_facts(source).model_dump(mode="json")}


def _source(location: str) -> Path | None:
    """The file of ``path/file.py`` or ``package.module``."""
    if location.endswith(".py"):
        return Path(location) if Path(location).is_file() else None
    try:
        spec = importlib.util.find_spec(location)
    except Exception:  # noqa: BLE001, a package that is imported for it may raise anything, and does so again when it is loaded
        return None
    return Path(spec.origin) if spec is not None and spec.origin and Path(spec.origin).is_file() else None


def _model_file(file: Path) -> Any:
    """Of weights, which may be of many gigabytes, the size and pieces from the first byte to the last."""
    if file.suffix in _WHOLE:
        return file_facts(file).model_dump(mode="json")
    if file.suffix != ".safetensors":
        return None
    size = file.stat().st_size
    digest = xxhash.xxh3_64()
    with file.open("rb") as stream:
        for index in range(_SAMPLES):
            stream.seek(max(size - _SAMPLE_BYTES, 0) * index // (_SAMPLES - 1), os.SEEK_SET)
            digest.update(stream.read(_SAMPLE_BYTES))
    return {"num_bytes": size, "samples_xxh3": digest.hexdigest()}
