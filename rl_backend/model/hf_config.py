"""Reading a Hugging Face ``config.json`` field by field, with refusals that name the field."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from rl_backend.contracts import UnsupportedError


def is_finite(value: Any) -> bool:
    """Whether a value is a number that a float can hold; ``json`` reads NaN, Infinity and whole numbers of any size."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and -sys.float_info.max <= value <= sys.float_info.max


@dataclass(frozen=True)
class HFConfig:
    """``config.json`` of a model directory, for one family.

    Every method raises :class:`~rl_backend.contracts.UnsupportedError` for a value that the family cannot honour.

    Attributes:
        fields: the JSON object.
        family: for messages.
    """

    fields: Mapping[str, Any]
    family: str

    def get(self, field: str, default: Any = None) -> Any:
        """The value; ``default`` where there is none or it is null."""
        value = self.fields.get(field)
        return default if value is None else value

    def positive_int(self, field: str, default: int | None = None) -> int:
        value = self.get(field, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.refuse(field, value, "expected a positive whole number")
        return value

    def positive_float(self, field: str, default: float | None = None) -> float:
        value = self.get(field, default)
        if not is_finite(value) or not value > 0:
            self.refuse(field, value, "expected a positive, finite number")
        return float(value)

    def flag(self, field: str, default: bool = False) -> bool:
        value = self.get(field, default)
        if not isinstance(value, bool):
            self.refuse(field, value, "expected true or false")
        return value

    def require(self, honoured: Mapping[str, tuple[Any, ...]]) -> None:
        """Refuses a field that is there with another value than those listed; null counts as absent."""
        for field, values in honoured.items():
            value = self.fields.get(field)
            if value is not None and value not in values:
                only = f"only {' or '.join(map(repr, values))} is implemented" if values else "it is not implemented"
                self.refuse(field, value, only)

    def refuse(self, field: str, value: Any, reason: str) -> NoReturn:
        """Raises the error."""
        raise UnsupportedError(
            f"config.json: {field}={value!r}: {reason} in the native {self.family} family; use a model without it, or "
            "register_model(...) a family that has it",
            field=field,
            value=repr(value),
        )
