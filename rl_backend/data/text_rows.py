"""Rows of text files: ``.jsonl``, ``.json`` and ``.csv``."""

import csv
import io
import json
import os
import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import xxhash

from rl_backend.contracts import BatchError
from rl_backend.data.rows import Row, Rows

TEXT_SUFFIXES = (".jsonl", ".json", ".csv")

_BOM = b"\xef\xbb\xbf"
_blank = re.compile(r"[ \t\r\n]*").match


class TextRows(Rows):
    """Rows of text files, of which only the places are in memory.

    A ``.jsonl`` file has one JSON object per line; empty lines are skipped. A ``.json`` file has a list of objects, or is
    like a ``.jsonl`` file. A ``.csv`` file names its columns in the first line; a cell is text, and an empty one is null.

    Attributes:
        files: their paths.

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
            try:
                form = _csv(file) if path.suffix == ".csv" else _json(file, path.suffix)
                for place, size, number in form.places:
                    self._form_of.append(len(self._forms))
                    self._places.append(place)
                    self._sizes.append(size)
                    self._digests.append(xxhash.xxh3_64_intdigest(os.pread(file.fileno(), size, place)))
                    self._numbers.append(number)
            except (ValueError, csv.Error) as error:
                raise BatchError(f"{path}: not {path.suffix[1:].upper()}: {error}; repair the file") from None
            except RecursionError:
                raise BatchError(f"{path}: nested too deeply") from None
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
        except ValueError as error:
            raise BatchError(f"{where}: not {form.kind}: {error}; expected {form.expected}") from None
        except RecursionError:
            raise BatchError(f"{where}: nested too deeply") from None
        if not isinstance(row, dict):
            raise BatchError(f"{where}: a {type(row).__name__}; expected {form.expected}")
        return row

    def where(self, index: int) -> str:
        form = self._form_of[index]
        return f"{self.files[form]}, {self._forms[form].counted} {self._numbers[index]}"


class _Form(NamedTuple):
    """An open file, and how its rows are written.

    Attributes:
        places: of each row, first byte, bytes, and number counted from 1.
        counted: what these numbers count.
        parse: the bytes of a row, which become it.
        expected: of the file, for messages.
    """

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
    """Places in a JSON list."""
    text = data.removeprefix(_BOM).decode()
    place, counted = len(data) - len(data.removeprefix(_BOM)), 0
    for number, (begin, end) in enumerate(_spans(text), start=1):
        place += len(text[counted:begin].encode())
        size = len(text[begin:end].encode())
        yield place, size, number
        place, counted = place + size, end


def _spans(text: str) -> Iterator[tuple[int, int]]:
    """First character of each element of a JSON list, and the one behind it."""
    decode = json.JSONDecoder().raw_decode

    def skipped(at: int) -> int:
        found = _blank(text, at)
        return at if found is None else found.end()

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
        if len(cells) != len(names):
            raise ValueError(f"{len(cells)} cells")
        return {name: cell or None for name, cell in zip(names, cells, strict=True)}

    expected = f"a cell for each of the {len(names)} columns {', '.join(names)}"
    return _Form(file, places(), "line", parse, "CSV", expected)
