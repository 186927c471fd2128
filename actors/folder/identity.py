"""The identity of a run: options and files that a resumed run must share with the one before.

Fields declare what may change, see :class:`~rl_backend.contracts.OnResume`; all others decide.
"""

import importlib.util
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

from actors.folder.checkpoints import Progress
from actors.options.sampled_config import RunConfig
from rl_backend.checkpoint.hf_reader import TEMPLATES
from rl_backend.checkpoint.training_state import file_facts
from rl_backend.contracts import SAME_CONTENTS, BaseConfig, ConfigError, OnResume
from rl_backend.data.datasets import data_files
from rl_backend.data.gym import is_gym
from rl_backend.data.hub import hub_name, local_model
from rl_backend.data.rewards import WeightedReward
from rl_backend.options.option_set import get, has, options_of, value_and_default

_WHOLE = (".json", ".jinja", ".model", ".txt")
_SAMPLES, _SAMPLE_BYTES = 16, 1 << 16
# Option -> the split that it means where it names none of several.
_DATA_SETS: Mapping[str, str | None] = {"dataset": "train", "eval_dataset": None}


def saved_facts(config: RunConfig) -> dict[str, Any]:
    """What a checkpoint says of its run; only the same run may continue from it. Raises ConfigError without a dataset."""
    return {"example": type(config).__name__, "options": deciding_options(config), "contents": _contents(config)}


def deciding_options(config: RunConfig) -> dict[str, Any]:
    values = config.model_dump(mode="json")
    deciding = (path for path, owner, name in _places(config, None) if owner.is_set(name) and has(values, path))
    found = {options_of(type(config)).name_of(path): get(values, path) for path in deciding}
    if not isinstance(config.eval_dataset, str | None):
        # In order: the first is the run's. Their rows are among the contents.
        sets = config.eval_sets.items()
        found["eval_dataset"] = [
            [name, each.model_dump(mode="json", exclude={"path"}, exclude_none=True)] for name, each in sets
        ]
    return found


def _places(config: BaseConfig, kind: OnResume | None, prefix: str = "") -> Iterator[tuple[str, BaseConfig, str]]:
    """Place, configuration and name of each value of which a resume asks this; None: to be the same."""
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        declared = next((each for each in field.metadata if isinstance(each, OnResume)), None)
        if isinstance(value, BaseConfig) and declared is None:
            yield from _places(value, kind, f"{prefix}{name}.")
        elif declared == kind:
            yield prefix + name, config, name


def require_same_run(config: RunConfig, progress: Progress) -> None:
    """Checks everything except ``dtype=auto``, see :func:`require_same_dtype`.

    Raises:
        ConfigError: names the options in which ``config`` is another run than that of a checkpoint.
        CheckpointError: another program saved it.
    """
    name, path, saved = type(config).__name__, progress.path, progress.identity
    if saved.example != name:
        raise ConfigError.of("resume", config.resume, f"{path} is of a run of {saved.example}, this is one of {name}")
    here, named = deciding_options(config), options_of(type(config))
    # Under a place, where it has got a short name since.
    options = {named.name_of(option): value for option, value in saved.options.items()}
    if "eval_dataset" not in options:  # a path alone, or of a version that did not say
        here.pop("eval_dataset", None)
    differ = {
        option: f"the run of {path} has {options.get(option, value_and_default(config, option)[1])!r}, and would not go on "
        "as it was"
        for option in here | options
        if options.get(option) != here.get(option)
    }
    for option, found in ({} if differ else _contents(config)).items():
        if saved.contents.get(option) != found:
            differ[option] = f"is not, byte for byte, what the run of {path} has"
    if differ:
        (option, problem), *others = differ.items()
        also = f"; {', '.join(other for other, _ in others)} differ too" if others else ""
        value, _ = value_and_default(config, option)
        raise ConfigError.of(f"{name}.{option}", value, f"{problem}; use that, or a new run{also}")
    if config.dtype != "auto":
        require_same_dtype(config, progress)


def require_same_dtype(config: RunConfig, progress: Progress) -> None:
    saved, dtype = progress.identity.dtype, config.trained_dtype
    if saved != dtype:
        raise ConfigError.of(
            f"{type(config).__name__}.dtype",
            config.dtype,
            f"is {dtype} here; the run of {progress.path} has {saved}; use dtype={saved}, or start a new run",
        )


def _contents(config: RunConfig) -> dict[str, Any]:
    found = {
        options_of(type(config)).name_of(path): getattr(owner, name) for path, owner, name in _places(config, SAME_CONTENTS)
    }
    if not isinstance(config.eval_dataset, str | None):
        found["eval_dataset"] = {name: each.path for name, each in config.eval_sets.items()}
    return {name: _data(name, value) if name in _DATA_SETS else _content(value) for name, value in found.items()}


def _data(name: str, source: str | Mapping[str, str] | None) -> Any:
    if isinstance(source, Mapping):
        return {each: _data(name, path) for each, path in source.items()}
    if source is None or Path(source).is_file():
        return _content(source)
    files = data_files(source, field=name, default_split=_DATA_SETS[name])
    # The options of a generated task are in its name alone.
    return [*([source] if is_gym(source) else ()), *(_pieces(file) for file in files)]


def _content(named: str | Mapping[str, WeightedReward] | None) -> Any:
    """Of a file, a Hugging Face directory or functions; None where there is nothing, which is refused when it is loaded."""
    if named is None:
        return None
    if not isinstance(named, str):
        return {name: {"weight": each.weight, "content": _content(each.function)} for name, each in named.items()}
    path = Path(local_model(named) if hub_name(named) else named)
    if path.is_dir():
        files = sorted([*path.iterdir(), *path.glob(f"{TEMPLATES}/*.jinja")])
        return {str(file.relative_to(path)): facts for file in files if (facts := _model_file(file)) is not None}
    if path.is_file():
        return file_facts(path).model_dump(mode="json")
    location, separator, function = named.rpartition(":")
    source = _source(location) if separator else None
    return None if source is None else {"function": function, **file_facts(source).model_dump(mode="json")}


def _source(location: str) -> Path | None:
    if location.endswith(".py"):
        return Path(location) if Path(location).is_file() else None
    try:
        spec = importlib.util.find_spec(location)
    except Exception:  # noqa: BLE001, a package that is imported for it may raise anything, and does so again when it is loaded
        return None
    return Path(spec.origin) if spec is not None and spec.origin and Path(spec.origin).is_file() else None


def _model_file(file: Path) -> Any:
    if file.suffix in _WHOLE:
        return file_facts(file).model_dump(mode="json")
    if file.suffix != ".safetensors":
        return None
    # Weights may be of many gigabytes: the size, and pieces from the first byte to the last.
    return _pieces(file)


def _pieces(file: Path) -> Any:
    size = file.stat().st_size
    digest = xxhash.xxh3_64()
    with file.open("rb") as stream:
        for index in range(_SAMPLES):
            stream.seek(max(size - _SAMPLE_BYTES, 0) * index // (_SAMPLES - 1), os.SEEK_SET)
            digest.update(stream.read(_SAMPLE_BYTES))
    return {"num_bytes": size, "samples_xxh3": digest.hexdigest()}
