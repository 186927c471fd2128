"""Sequences that begin with the same tokens, as a tree whose runs of tokens are computed once."""

from typing import NamedTuple, Self

import torch
from torch import Tensor


class PrefixTree(NamedTuple):
    """Runs of rows, depth first: a run comes after the one that it continues, and its rows after those of the run before it.

    Attributes:
        lengths: rows of each run, at least 1.
        parents: the run that each run continues, -1 for one that starts sequences.
        ends: the last run of each of the caller's sequences. A run that ends none may only fill up rows.
    """

    lengths: tuple[int, ...]
    parents: tuple[int, ...]
    ends: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        return sum(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Of the caller's sequences."""
        key_lens = self.key_lens
        return sum(key_lens[end] for end in self.ends)

    @property
    def shares(self) -> bool:
        """Whether any row is of more than one token."""
        return len(set(self.ends)) < len(self.ends) or max(self.parents) >= 0

    @property
    def starts(self) -> tuple[int, ...]:
        """The first row of each run."""
        starts, row = [], 0
        for length in self.lengths:
            starts.append(row)
            row += length
        return tuple(starts)

    @property
    def key_lens(self) -> tuple[int, ...]:
        """Rows of each run's path: of all runs before it, and its own."""
        lens: list[int] = []
        for length, parent in zip(self.lengths, self.parents, strict=True):
            lens.append(length if parent < 0 else lens[parent] + length)
        return tuple(lens)

    def path(self, run: int) -> tuple[int, ...]:
        """The runs from the start of its sequences to ``run``, itself included."""
        path = [run]
        while self.parents[path[-1]] >= 0:
            path.append(self.parents[path[-1]])
        return tuple(reversed(path))

    @property
    def row_counts(self) -> Tensor:
        """(rows,) int64: how many of the caller's sequences each row is of; 0 for rows that fill up."""
        counts = [self.ends.count(run) for run in range(len(self.lengths))]
        for run in reversed(range(len(counts))):
            if self.parents[run] >= 0:
                counts[self.parents[run]] += counts[run]
        return torch.tensor(counts).repeat_interleave(torch.tensor(self.lengths))

    @property
    def sequence_rows(self) -> tuple[int, ...]:
        """How many rows each sequence has, those that others share counted with the first; rows that fill up are nobody's.

        In the order of the rows where roots are in the order of their first sequences.
        """
        roots: list[int] = []
        rows: dict[int, int] = {}
        for run, (length, parent) in enumerate(zip(self.lengths, self.parents, strict=True)):
            roots.append(run if parent < 0 else roots[parent])
            rows[roots[run]] = rows.get(roots[run], 0) + length
        return tuple(rows.pop(roots[end], 0) for end in self.ends)

    @property
    def position_ids(self) -> Tensor:
        """(rows,) int64: the place of each row in its sequences."""
        places = [torch.arange(keys - own, keys) for own, keys in zip(self.lengths, self.key_lens, strict=True)]
        return torch.cat(places)

    @property
    def key_rows(self) -> Tensor:
        """(sum of key_lens,) int64: the rows of every run's path, ancestors first, one run's after the other's."""
        return torch.cat(self._rows_of_paths())

    @property
    def rows_of_tokens(self) -> Tensor:
        """(T,) int64: the row of each token of the caller's sequences, laid end to end."""
        rows = self._rows_of_paths()
        return torch.cat([rows[end] for end in self.ends])

    def _rows_of_paths(self) -> list[Tensor]:
        rows: list[Tensor] = []
        for start, length, parent in zip(self.starts, self.lengths, self.parents, strict=True):
            own = torch.arange(start, start + length)
            rows.append(own if parent < 0 else torch.cat((rows[parent], own)))
        return rows

    def padded(self, multiple: int) -> Self:
        """With one more run, which ends no sequence, where the rows would be no multiple."""
        filler = -self.num_rows % multiple
        if filler == 0:
            return self
        return self._replace(lengths=(*self.lengths, filler), parents=(*self.parents, -1))


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """(rows, ...) -> (len(rows), ...). Backward, gradients of a row taken more than once are added up in a fixed order."""
    # Indexing sorts on CUDA where index_add is atomic; on a CPU it is the other way round.
    return x[rows] if x.is_cuda else x.index_select(0, rows)
