"""Opens data sets: files, folders of the ``datasets`` library, and data sets on the Hub. Rows are read when asked for."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from rl_backend.contracts import BatchError, ConfigError
from rl_backend.data.gym import gym_file, is_gym, open_gym
from rl_backend.data.hub import FILES, hub_name, why_not
from rl_backend.data.rows import TEXT_SUFFIXES, ArrowRows, Rows, TextRows

_NO_OPTIONS = ("name", "version", "data_dir", "data_files", "description")
"""Fields of ``datasets`` that do not say how files are read."""


def open_rows(source: Path | str, *, field: str = "dataset", default_split: str | None = "train") -> Rows:
    """Opens a data set.

    Args:
        source: a ``.jsonl``, ``.json``, ``.csv`` or ``.parquet`` file; a folder that ``datasets`` has saved or can load;
            a name on the Hugging Face Hub; or a task of reasoning-gym (:mod:`rl_backend.data.gym`). Folders and names may be
            followed by subset and split, as in ``openai/gsm8k:main:test`` and ``folder::train``.
        field: the option that names it, for messages.
        default_split: taken of several splits where none is named; None asks for one.

    Raises:
        ConfigError: there is no such data set, subset or split, it may not be read, or the Hub cannot be reached.
        BatchError: a file that is damaged, or no rows.
    """
    text = str(source)
    path = Path(text).expanduser()
    if is_gym(text):
        return open_gym(text, field=field)
    try:
        if path.is_file():
            if path.suffix not in (*TEXT_SUFFIXES, ".parquet"):
                problem = f"is no {FILES} file; convert it, or give a folder of its own, which the datasets library reads"
                raise ConfigError.of(field, text, problem)
            rows: Rows = ArrowRows.of_parquet(path) if path.suffix == ".parquet" else TextRows(str(path), path.stem, [path])
        else:
            name, found = _load(text, field, default_split)
            rows = TextRows(text, name, found) if isinstance(found, list) else ArrowRows.of_dataset(text, name, found)
    except OSError as error:
        problem = f"cannot be read: {error.strerror or error}; give a file that this user may read"
        raise ConfigError.of(field, text, problem) from None
    if not len(rows):
        raise BatchError(f"{source}: no rows; give data with at least one")
    return rows


def data_files(source: Path | str, *, field: str = "dataset", default_split: str | None = "train") -> list[Path]:
    """The files that hold the rows of a data set; arguments and errors as of :func:`open_rows`."""
    path = Path(str(source)).expanduser()
    if is_gym(source):
        return [gym_file(str(source), field=field)]
    if path.is_file():
        return [path]
    _, found = _load(str(source), field, default_split)
    return found if isinstance(found, list) else [Path(file["filename"]) for file in found.cache_files]


def _load(source: str, field: str, default_split: str | None) -> tuple[str, Any]:
    place, subset, split = _parts(source)
    on_hub, folder = hub_name(place), Path(place).expanduser()
    if on_hub is None and not folder.is_dir():
        raise ConfigError.of(
            field,
            source,
            f"no such file or folder ({folder.absolute()}); give a {FILES} file, a folder of the datasets library, or a "
            "name on the Hub such as openai/gsm8k:main:train",
        )
    # Imported here: it takes seconds, comes with an extra, and files need none of it.
    import datasets

    # Marks of save_to_disk, whose folders load_dataset refuses.
    saved = on_hub is None and any((folder / mark).is_file() for mark in ("state.json", "dataset_dict.json"))
    if saved and subset:
        raise ConfigError.of(field, source, f"datasets saved this folder, without subsets; leave out {subset!r}")
    try:
        if saved:
            found = datasets.load_from_disk(str(folder))
        elif on_hub:
            found = datasets.load_dataset(on_hub.repository, subset, revision=on_hub.revision)
        else:
            found = _text_files(datasets.load_dataset_builder(str(folder), subset).config)
            found = datasets.load_dataset(str(folder), subset) if found is None else found
    except Exception as error:  # of any type: the Hub, the network, the disk and each file format have their own
        problem = why_not(error, "data set") if on_hub else f"cannot be read by datasets: {type(error).__name__}: {error}"
        raise ConfigError.of(field, source, problem) from error
    name = on_hub.repository if on_hub else folder.name
    if split is None and not isinstance(found, Mapping):
        return name, found
    splits = found if isinstance(found, Mapping) else {}
    wanted = split or (next(iter(splits)) if len(splits) == 1 else default_split)
    if wanted not in splits:
        problem = f"is one data set without splits; leave out {split!r}"
        if splits:
            known = f"has no split {split!r}, but" if split else "has several splits,"
            example = f"{place}:{subset or ''}:{next(iter(splits))}"
            problem = f"{known} {', '.join(splits)}; name one of them, as in {example}"
        raise ConfigError.of(field, source, problem)
    return name, splits[wanted]


def _text_files(config: Any) -> dict[str, list[Path]] | None:
    """Of each split of a folder its text files, which are read here; None where ``datasets`` has other files or options."""
    # The library would guess a type for each column: texts of digits and of dates would come out as numbers and times.
    files = {str(split): [Path(each) for each in paths] for split, paths in (config.data_files or {}).items()}
    all_files = [each for paths in files.values() for each in paths]
    plain = type(config)(**{name: getattr(config, name) for name in _NO_OPTIONS})
    if not all_files or not all(each.suffix in TEXT_SUFFIXES and each.is_file() for each in all_files):
        return None
    return files if all(getattr(config, each.name) == getattr(plain, each.name) for each in fields(config)) else None


def _parts(source: str) -> tuple[str, str | None, str | None]:
    # A path may have colons itself.
    if Path(source).expanduser().exists():
        return source, None, None
    place, subset, split = [*source.split(":", 2), "", ""][:3]
    return place, subset or None, split or None
