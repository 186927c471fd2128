"""What a runtime's parameters are called in Hugging Face directories."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rl_backend.contracts.errors import ConfigError


@dataclass(frozen=True)
class PackedWeight:
    """A parameter that is several Hugging Face tensors of one shape, stacked along its first dimensions.

    The gates and up-projections of E experts in one parameter (E, 2, N, K) are
    ``PackedWeight((E, 2), (gate of 0, up of 0, gate of 1, ...))``: ``parameter[e, 0]`` is the tensor ``names[2 * e]``.

    Attributes:
        shape: the first dimensions of the parameter, those that number the tensors.
        names: Hugging Face names, the last of these dimensions fastest.

    Raises:
        ConfigError: another number of names than ``shape`` has places.
    """

    shape: tuple[int, ...]
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.names) != math.prod(self.shape):
            raise ConfigError.of(
                "PackedWeight.names", len(self.names), f"expected {math.prod(self.shape)} for shape {self.shape}"
            )


type WeightName = str | PackedWeight
"""A parameter's Hugging Face name, or names."""


def stored_tensors(name: WeightName) -> Iterator[tuple[tuple[int, ...], str]]:
    """(index into the parameter's first dimensions, Hugging Face name) of each tensor that a parameter holds."""
    if isinstance(name, str):
        yield (), name
    else:
        yield from zip(itertools.product(*map(range, name.shape)), name.names, strict=True)


def stored_names(names: Mapping[str, WeightName]) -> list[str]:
    """Hugging Face names of all parameters, in order."""
    return [stored for name in names.values() for _, stored in stored_tensors(name)]
