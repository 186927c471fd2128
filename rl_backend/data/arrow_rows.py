"""Rows of Arrow tables: ``.parquet`` files, and data sets of the ``datasets`` library."""

import json
import logging
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, Self

from rl_backend.contracts import BatchError, UnsupportedError
from rl_backend.data.rows import Row, Rows

logger = logging.getLogger(__name__)

_AT_ONCE = 1000
"""Rows that are looked at together."""


class ArrowRows(Rows):
    """Rows of a table, which is in memory as Arrow has it, or mapped from disk.

    A row is what it would be as a JSON object: maps and columns of JSON text are objects. A table has the fields of all rows
    in each, and null where a row has none.

    Args:
        part: the rows from one index up to another, as a ``pyarrow.Table``.
        count: of all rows.
    """

    def __init__(self, source: str, name: str, part: Callable[[int, int], Any], count: int) -> None:
        super().__init__(source, name)
        self._part, self._count, self._schema = part, count, part(0, 0).schema

    @classmethod
    def of_parquet(cls, path: Path) -> Self:
        """The rows of a ``.parquet`` file.

        Raises:
            BatchError: it is damaged.
            UnsupportedError: ``pyarrow`` is not installed.
        """
        try:
            import pyarrow
            import pyarrow.parquet
        except ModuleNotFoundError as error:
            raise UnsupportedError(
                f"{path}: parquet needs pyarrow ({error}); run pip install '.[examples]' in the folder of rl-backend"
            ) from None
        try:
            table = pyarrow.parquet.read_table(path)
        except pyarrow.ArrowException as error:
            raise BatchError(f"{path}: not a readable parquet file: {error}") from None
        return cls(str(path), path.stem, lambda start, stop: table.slice(start, stop - start), table.num_rows)

    @classmethod
    def of_dataset(cls, source: str, name: str, dataset: Any) -> Self:
        """The rows of a ``datasets.Dataset``, whatever format it was saved with."""
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
        for start in range(0, self._count if names else 0, _AT_ONCE):
            part = self._part(start, min(start + _AT_ONCE, self._count))
            for name in names:
                for chunk in part.column(name).chunks:
                    found.update(dict.fromkeys(_padded(chunk, name)))
        return list(found)

    def _type(self, path: str) -> Any:
        """Of a column, or of a field in one."""
        if path in self._schema.names:
            return self._schema.field(path).type
        column, *fields = path.split(".")
        kind = self._schema.field(column).type
        for each in fields:
            kind = kind.field(each).type
        return kind


def _plain(value: Any, kind: Any) -> Any:
    """A value of ``to_pylist`` as JSON has it."""
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
    """What :func:`_plain` returns, without null in fields of structs. Maps and JSON text have only what their row has."""
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
