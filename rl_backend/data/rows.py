"""Rows of data: of ``.jsonl`` and ``.parquet`` files, of folders of the ``datasets`` library, and of data sets on the Hub.

They are read one by one, when they are asked for: of a ``.jsonl`` file only places are in memory, of other data what Arrow
keeps there or maps from disk.
"""

import json
import os
from abc import abstractmethod
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import xxhash

from rl_backend.contracts import BatchError, ConfigError, UnsupportedError
from rl_backend.data.hub import hub_name, require_datasets, why_not

type Row = Mapping[str, Any]

_SUFFIXES = (".jsonl", ".parquet")


class Rows(Sequence[Row]):
    """Rows of one data set. A kind of data says how many there are, and reads one.

    Attributes:
        source: what the rows are of, as the user named it.
        name: of the data set, for rewards: a file's name without suffix, a folder's name or the name on the Hub.
    """

    def __init__(self, source: str, name: str) -> None:
        self.source, self.name = source, name

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        if isinstance(index, slice):
            return [self.read(each) for each in range(*index.indices(len(self)))]
        return self.read(range(len(self))[index])

    @abstractmethod
    def read(self, index: int) -> Row:
        """The row at ``index``, from 0."""

    def where(self, index: int) -> str:
        """Source and number of a row, counted from 1, for messages."""
        return f"{self.source}, row {index + 1}"


class JsonLines(Rows):
    """One JSON object per line; empty lines are skipped.

    Raises:
        BatchError: when a row is read: a line that is no JSON object, or that was changed since the file was opened.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(str(path), path.stem)
        self._file = path.open("rb")
        self._places, self._sizes, self._digests, self._numbers = array("Q"), array("Q"), array("Q"), array("Q")
        place = 0
        for number, line in enumerate(self._file, start=1):
            if line.strip():
                self._places.append(place)
                self._sizes.append(len(line))
                self._digests.append(xxhash.xxh3_64_intdigest(line))
                self._numbers.append(number)
            place += len(line)

    def __len__(self) -> int:
        return len(self._places)

    def read(self, index: int) -> Row:
        # Without a position that threads would share.
        line = os.pread(self._file.fileno(), self._sizes[index], self._places[index])
        where = self.where(index)
        if xxhash.xxh3_64_intdigest(line) != self._digests[index]:
            raise BatchError(f"{where}: was changed while it was in use; put the file back, or start again")
        try:
            row = json.loads(line)
        except ValueError as error:
            raise BatchError(f"{where}: not JSON: {error}; expected one object per line") from None
        except RecursionError:
            raise BatchError(f"{where}: nested too deeply") from None
        if not isinstance(row, dict):
            raise BatchError(f"{where}: a {type(row).__name__}; expected one JSON object per line")
        return row

    def where(self, index: int) -> str:
        return f"{self.source}, line {self._numbers[index]}"


class ParquetRows(Rows):
    """Rows of a ``.parquet`` file, which is in memory as Arrow has it."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path), path.stem)
        try:
            import pyarrow
            import pyarrow.parquet
        except ModuleNotFoundError as error:
            raise UnsupportedError(
                f"{path}: parquet needs pyarrow ({error}); run pip install '.[examples]' in the folder of rl-backend"
            ) from None
        try:
            self._table = pyarrow.parquet.read_table(path)
        except pyarrow.ArrowException as error:
            raise BatchError(f"{path}: not a readable parquet file: {error}") from None

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def read(self, index: int) -> Row:
        row: Row = self._table.slice(index, 1).to_pylist()[0]
        return row


class DatasetRows(Rows):
    """Rows of a ``datasets.Dataset``, which is mapped from disk."""

    def __init__(self, source: str, name: str, dataset: Any) -> None:
        super().__init__(source, name)
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, index: int) -> Row:
        row: Row = self._dataset[index]
        return row


def open_rows(source: Path | str, *, field: str = "dataset", default_split: str | None = "train") -> Rows:
    """Opens a data set.

    Args:
        source: a ``.jsonl`` or ``.parquet`` file; a folder that ``datasets`` has saved or can load; or a name on the
            Hugging Face Hub. Folders and names may be followed by subset and split: ``openai/gsm8k:main:test``,
            ``folder::train``.
        field: the option that names it, for messages.
        default_split: taken of several splits where none is named; None asks for one.

    Raises:
        ConfigError: there is no such data set, or no such subset or split of it, or it may not be read, or the Hub cannot be
            reached.
        BatchError: a ``.parquet`` file that cannot be read, or no rows.
        UnsupportedError: ``pyarrow`` or ``datasets`` is needed and not installed.
    """
    text = str(source)
    path = Path(text).expanduser()
    if path.is_file():
        if path.suffix not in _SUFFIXES:
            problem = (
                "is neither a .jsonl nor a .parquet file; convert it, or give a folder of its own, which the datasets "
                "library reads"
            )
            raise ConfigError.of(field, text, problem)
        try:
            rows: Rows = JsonLines(path) if path.suffix == ".jsonl" else ParquetRows(path)
        except OSError as error:
            problem = f"cannot be read: {error.strerror or error}; give a file that this user may read"
            raise ConfigError.of(field, text, problem) from None
    else:
        rows = DatasetRows(text, *_load(text, field, default_split))
    if not len(rows):
        raise BatchError(f"{source}: no rows; give data with at least one")
    return rows


def data_files(source: Path | str, *, field: str = "dataset", default_split: str | None = "train") -> list[Path]:
    """The files that hold the rows of a data set; arguments and errors as of :func:`open_rows`."""
    path = Path(str(source)).expanduser()
    if path.is_file():
        return [path]
    _, dataset = _load(str(source), field, default_split)
    return [Path(file["filename"]) for file in dataset.cache_files]


def _load(source: str, field: str, default_split: str | None) -> tuple[str, Any]:
    """Name and ``datasets.Dataset`` of a folder, or of a name on the Hub."""
    place, subset, split = _parts(source)
    on_hub, folder = hub_name(place), Path(place).expanduser()
    if on_hub is None and not folder.is_dir():
        raise ConfigError.of(
            field,
            source,
            f"no such file or folder ({folder.absolute()}); give a .jsonl or .parquet file, a folder of the datasets "
            "library, or a name on the Hub such as openai/gsm8k:main:train",
        )
    datasets = require_datasets(field, source)
    saved = on_hub is None and any((folder / mark).is_file() for mark in ("state.json", "dataset_dict.json"))
    if saved and subset:
        raise ConfigError.of(field, source, f"datasets saved this folder, without subsets; leave out {subset!r}")
    try:
        if saved:
            found = datasets.load_from_disk(str(folder))
        elif on_hub:
            found = datasets.load_dataset(on_hub.repository, subset, revision=on_hub.revision)
        else:
            found = datasets.load_dataset(str(folder), subset)
    except Exception as error:  # of any type: the Hub, the network, the disk and each file format have their own
        problem = why_not(error, "data set") if on_hub else f"cannot be read by datasets: {type(error).__name__}: {error}"
        raise ConfigError.of(field, source, problem) from error
    name = on_hub.repository if on_hub else folder.name
    if not isinstance(found, Mapping):
        if split is None:
            return name, found
        raise ConfigError.of(field, source, f"is one data set without splits; leave out {split!r}")
    wanted = split or (next(iter(found)) if len(found) == 1 else default_split)
    if wanted not in found:
        example = f"{place}:{subset or ''}:{next(iter(found))}"
        problem = f"has no split {split!r}, but" if split else "has several splits,"
        raise ConfigError.of(field, source, f"{problem} {', '.join(found)}; name one of them, as in {example}")
    return name, found[wanted]


def _parts(source: str) -> tuple[str, str | None, str | None]:
    """``place:subset:split``, of which the last two may be left out or empty."""
    if Path(source).expanduser().exists():
        return source, None, None
    place, subset, split = [*source.split(":", 2), "", ""][:3]
    return place, subset or None, split or None
