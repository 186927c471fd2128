"""Rows of a data set: what every source of them gives, whatever its files look like."""

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, overload

type Row = Mapping[str, Any]


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

    def without_padding(self, path: str, value: Any) -> Any:
        """A value without the nulls of fields that its row may not have: a table has the fields of all rows in each.

        Args:
            path: of the value in its row: ``column``, or ``column.field``.
        """
        del path  # without a table every null is the row's
        return value

    def padded_fields(self, left_out: Collection[str]) -> list[str]:
        """Fields inside of columns, as ``column.field``, that are null in some row, which may not have them.

        Args:
            left_out: columns that are not looked at.
        """
        del left_out
        return []
