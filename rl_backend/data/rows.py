"""Rows of data files: JSON Lines, JSON, CSV and text, and the Arrow tables of Parquet files and data sets."""

import csv
import io
import json
import logging
import os
import re
from abc import abstractmethod
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self, overload

import xxhash

from rl_backend.contracts import BatchError

type Row = Mapping[str, Any]


class Rows(Sequence[Row]):
    """Rows of one data set, read when they are asked for.

    ``source`` is what the user named; rewards are given ``name``: of the file without suffix, of the folder or on the Hub.
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
    def read(self, index: int) -> Row: ...

    def where(self, index: int) -> str:
        return f"{self.source}, row {index + 1}"

    def without_padding(self, path: str, value: Any) -> Any:
        """The value at ``column`` or ``column.field`` without nulls that may stand for fields that its row does not have."""
        del path  # without a table every null is the row's
        return value

    def padded_fields(self, left_out: Collection[str]) -> list[str]:
        """Fields inside of columns, but those in ``left_out``, as ``column.field``, that are null in some row."""
        del left_out
        return []


TEXT_SUFFIXES = (".jsonl", ".json", ".csv")

_BOM = b"\xef\xbb\xbf"
_blank = re.compile(r"[ \t\r\n]*").match


class TextRows(Rows):
    """Rows of text files, of which only the places are in memory.

    A ``.jsonl`` file has one JSON object per line; empty lines are skipped. A ``.json`` file has a list of objects, or is
    like a ``.jsonl`` file. A ``.csv`` file names its columns in the first line; a cell is text, and an empty one is null.

    Raises:
        BatchError: when it is made: a list or a ``.csv`` file that is damaged. When a row is read: it is no object, does not
            have a cell for each column, or was changed since the file was opened.
        OSError: a file may not be read.
    """

    def __init__(self, source: str, name: str, files: Sequence[Path]) -> None:
        super().__init__(source, name)
        self.files = tuple(files)
        self._forms: list[_Form] = []
        self._form_of = array("L")
        self._places, self._sizes, self._digests, self._numbers = array("Q"), array("Q"), array("Q"), array("Q")
        for path in files:
            file = path.open("rb")
            # It stays open for reads of single rows, as long as these rows are used.
            try:
                form = _csv(file) if path.suffix == ".csv" else _json(file, path.suffix)
                for place, size, number in form.places:
                    self._form_of.append(len(self._forms))
                    self._places.append(place)
                    self._sizes.append(size)
                    self._digests.append(xxhash.xxh3_64_intdigest(os.pread(file.fileno(), size, place)))
                    self._numbers.append(number)
            except (ValueError, csv.Error, RecursionError) as error:
                raise BatchError(f"{path}: not {path.suffix[1:].upper()}: {error}; repair the file") from None
            self._forms.append(form)

    def __len__(self) -> int:
        return len(self._places)

    def read(self, index: int) -> Row:
        form, where = self._forms[self._form_of[index]], self.where(index)
        # Without a position that threads would share.
        found = os.pread(form.file.fileno(), self._sizes[index], self._places[index])
        if xxhash.xxh3_64_intdigest(found) != self._digests[index]:
            raise BatchError(f"{where}: was changed while it was in use; put the file back, or start again")
        try:
            row = form.parse(found)
            problem = f"a {type(row).__name__}"
        except (ValueError, RecursionError) as error:
            row, problem = None, f"not {form.kind}: {error}"
        if not isinstance(row, dict):
            raise BatchError(f"{where}: {problem}; expected {form.expected}")
        return row

    def where(self, index: int) -> str:
        form = self._form_of[index]
        return f"{self.files[form]}, {self._forms[form].counted} {self._numbers[index]}"


class _Form(NamedTuple):
    """An open file, and how its rows are written: each at first byte, bytes, and number, from 1, of what is ``counted``."""

    file: BinaryIO
    places: Iterator[tuple[int, int, int]]
    counted: str
    parse: Callable[[bytes], Any]
    kind: str
    expected: str


def _json(file: BinaryIO, suffix: str) -> _Form:
    expected = "one JSON object per line"
    if suffix == ".json":
        begins = file.read(4096).removeprefix(_BOM).lstrip()[:1]
        file.seek(0)
        if begins == b"[":
            return _Form(file, _elements(file.read()), "row", json.loads, "JSON", "a list of JSON objects")
        expected += ", or a list of objects"
    return _Form(file, _lines(file), "line", json.loads, "JSON", expected)


def _lines(file: BinaryIO) -> Iterator[tuple[int, int, int]]:
    place = 0
    for number, line in enumerate(file, start=1):
        if line.strip():
            yield place, len(line), number
        place += len(line)


def _elements(data: bytes) -> Iterator[tuple[int, int, int]]:
    text = data.removeprefix(_BOM).decode()
    place, counted = len(data) - len(data.removeprefix(_BOM)), 0
    for number, (begin, end) in enumerate(_spans(text), start=1):
        place += len(text[counted:begin].encode())
        size = len(text[begin:end].encode())
        yield place, size, number
        place, counted = place + size, end


def _spans(text: str) -> Iterator[tuple[int, int]]:
    decode = json.JSONDecoder().raw_decode

    def skipped(at: int) -> int:
        found = _blank(text, at)
        return at if found is None else found.end()

    # Element by element: all objects at once would need far more memory than their text.
    at = skipped(skipped(0) + 1)
    closed = text.startswith("]", at)
    while not closed:
        _, end = decode(text, at)
        yield at, end
        at = skipped(end)
        closed = text.startswith("]", at)
        if not closed:
            if not text.startswith(",", at):
                raise json.JSONDecodeError("Expecting ',' or ']' behind an object of the list", text, at)
            at = skipped(at + 1)
    if skipped(at + 1) != len(text):
        raise json.JSONDecodeError("Extra data behind the list", text, at + 1)


def _csv(file: BinaryIO) -> _Form:
    passed = 0

    def lines() -> Iterator[str]:
        nonlocal passed
        for line in file:
            text = (line if passed else line.removeprefix(_BOM)).decode()
            passed += len(line)
            yield text

    reader = csv.reader(lines(), strict=True)
    names = next(reader, [])
    if len(set(names)) < len(names):
        raise ValueError(f"the first line names a column twice: {', '.join(names)}")

    def places() -> Iterator[tuple[int, int, int]]:
        place, number = passed, reader.line_num + 1
        for cells in reader:
            if cells:
                yield place, passed - place, number
            place, number = passed, reader.line_num + 1

    def parse(record: bytes) -> dict[str, str | None]:
        cells = next(csv.reader(io.StringIO(record.decode(), newline=""), strict=True))
        return {name: cell or None for name, cell in zip(names, cells, strict=True)}

    expected = f"a cell for each of the {len(names)} columns {', '.join(names)}"
    return _Form(file, places(), "line", parse, "CSV", expected)


logger = logging.getLogger(__name__)

_AT_ONCE = 1000


class ArrowRows(Rows):
    """Rows of a table, which is in memory as Arrow has it, or mapped from disk.

    A row is what it would be as a JSON object: maps and columns of JSON text are objects. A table has the fields of all rows
    in each, and null where a row has none. ``part`` makes a ``pyarrow.Table`` of the rows from one index up to another.
    """

    def __init__(self, source: str, name: str, part: Callable[[int, int], Any], count: int) -> None:
        super().__init__(source, name)
        self._part, self._count, self._schema = part, count, part(0, 0).schema

    @classmethod
    def of_parquet(cls, path: Path) -> Self:
        # Imported here: it comes with an extra, and other files need none of it.
        import pyarrow
        import pyarrow.parquet

        try:
            table = pyarrow.parquet.read_table(path)
        except pyarrow.ArrowException as error:
            raise BatchError(f"{path}: not a readable parquet file: {error}") from None
        return cls(str(path), path.stem, lambda start, stop: table.slice(start, stop - start), table.num_rows)

    @classmethod
    def of_dataset(cls, source: str, name: str, dataset: Any) -> Self:
        times = [name for name, feature in dataset.features.items() if "timestamp" in str(feature)]
        if times and dataset.builder_name == "json":
            logger.warning(
                "%s: the datasets library reads the texts of %s as times and drops how they were written; where they are "
                "answers, give the files of the data set themselves",
                source,
                ", ".join(times),
            )
        tables = dataset.with_format("arrow")
        return cls(source, name, lambda start, stop: tables[start:stop], len(dataset))

    def __len__(self) -> int:
        return self._count

    def read(self, index: int) -> Row:
        (row,) = self._part(index, index + 1).to_pylist()
        return {field.name: _plain(row[field.name], field.type) for field in self._schema}

    def without_padding(self, path: str, value: Any) -> Any:
        return _without_padding(value, self._type(path))

    def padded_fields(self, left_out: Collection[str]) -> list[str]:
        names = [field.name for field in self._schema if field.name not in left_out]
        found: dict[str, None] = {}
        # In parts: of a mapped table only these are read into memory.
        for start in range(0, self._count if names else 0, _AT_ONCE):
            part = self._part(start, min(start + _AT_ONCE, self._count))
            for name in names:
                for chunk in part.column(name).chunks:
                    found.update(dict.fromkeys(_padded(chunk, name)))
        return list(found)

    def _type(self, path: str) -> Any:
        if path in self._schema.names:
            return self._schema.field(path).type
        from pyarrow import types

        column, *fields = path.split(".")
        kind = self._schema.field(column).type
        for each in fields:
            if types.is_map(kind):
                kind = kind.item_type
            elif types.is_struct(kind):  # else JSON text, in which every null is the row's
                kind = kind.field(each).type
        return kind


def _plain(value: Any, kind: Any) -> Any:
    import pyarrow
    from pyarrow import types

    if value is None:
        return None
    if types.is_struct(kind):
        return {field.name: _plain(value[field.name], field.type) for field in kind}
    if types.is_map(kind):
        return {key: _plain(each, kind.item_type) for key, each in value}
    if _is_list(kind):
        return [_plain(each, kind.value_type) for each in value]
    return json.loads(value) if isinstance(kind, pyarrow.JsonType) else value


def _without_padding(value: Any, kind: Any) -> Any:
    from pyarrow import types

    if value is None:
        return None
    if types.is_struct(kind):
        fields = {field.name: _without_padding(value[field.name], field.type) for field in kind}
        return {name: each for name, each in fields.items() if each is not None}
    if types.is_map(kind):
        return {key: _without_padding(each, kind.item_type) for key, each in value.items()}
    return [_without_padding(each, kind.value_type) for each in value] if _is_list(kind) else value


def _padded(values: Any, path: str) -> Iterator[str]:
    """The fields of structs in an array that are null where their struct is not."""
    from pyarrow import types

    if types.is_map(values.type):
        yield from _padded(values.items, path)
    elif _is_list(values.type):
        yield from _padded(values.flatten(), path)
    elif types.is_struct(values.type):
        structs = values.drop_null()
        for index, field in enumerate(values.type):
            inner = structs.field(index)
            if inner.null_count:
                yield f"{path}.{field.name}"
            yield from _padded(inner, f"{path}.{field.name}")


def _is_list(kind: Any) -> bool:
    from pyarrow import types

    return bool(
        types.is_list(kind)
        or types.is_large_list(kind)
        or types.is_fixed_size_list(kind)
        or types.is_list_view(kind)
        or types.is_large_list_view(kind)
    )
