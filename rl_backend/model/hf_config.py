"""A Hugging Face ``config.json``, read field by field with refusals that name the field; and its rotary embedding."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, NoReturn

from rl_backend.contracts import UnsupportedError, quantisation_problem
from rl_backend.primitive import rope


def is_finite(value: Any) -> bool:
    """Whether a value is a number that a float can hold."""
    # json reads NaN, Infinity and whole numbers of any size.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and -sys.float_info.max <= value <= sys.float_info.max


@dataclass(frozen=True)
class HFConfig:
    """``config.json`` of a model directory, for one ``family``, which messages name.

    Every method raises :class:`~rl_backend.contracts.UnsupportedError` for a value that the family cannot honour.
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
        """The value; ``default`` where there is none. Null is false, as transformers takes it."""
        value = self.fields.get(field, default)
        if value is None:
            return False
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

    def require_readable_weights(self) -> None:
        """Refuses a ``quantization_config`` of weights that cannot be read as plain numbers."""
        problem = quantisation_problem(self.fields)
        if problem:
            self.refuse("quantization_config", self.fields["quantization_config"], problem)

    def refuse(self, field: str, value: Any, reason: str) -> NoReturn:
        raise UnsupportedError(
            f"config.json: {field}={value!r}: {reason} in the native {self.family} family; use a model without it, or "
            "register_model(...) a family that has it",
            field=field,
            value=repr(value),
        )


class RotaryContext(NamedTuple):
    """What determines the angles, and the longest sequence, in tokens, that the embedding is made for."""

    rotary: rope.Rotary
    max_length: int


def read_rotary(
    config: HFConfig, head_dim: int, default_theta: float | None = None, default_part: float | None = None
) -> RotaryContext:
    """Reads ``rope_theta``, and ``rope_scaling`` (transformers 4) or ``rope_parameters`` (transformers 5).

    Args:
        default_theta: where there is none; None refuses that.
        default_part: ``partial_rotary_factor`` where there is none, the part of a head's features that are rotated; None
            for a family that rotates all.

    Raises:
        UnsupportedError: another ``rope_type`` (``dynamic``, ``longrope``, ...), or a field that is missing, unknown or
            out of range.
    """
    field, parameters = _parameters(config)
    head_dim = _rotated(config, field, parameters, head_dim, default_part)
    entry = _Entry(config, field, parameters)
    max_length = config.positive_int("max_position_embeddings")
    if parameters.get("rope_theta") is None:
        theta = config.positive_float("rope_theta", default_theta)
    else:
        theta = entry.number("rope_theta")
    kind = _kind(parameters)
    match kind:
        case "default":
            entry.check_fields()
            return RotaryContext(rope.Rotary(head_dim, theta), max_length)
        case "linear":
            entry.check_fields("factor")
            scaling: rope.RotaryScaling = rope.LinearScaling(entry.factor())
            # As in vLLM.
            max_length = entry.lengthened(max_length, scaling.factor)
        case "llama3":
            entry.check_fields("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
            scaling = _llama3(entry, max_length)
        case "yarn":
            entry.check_fields(*(each.name for each in fields(rope.YarnScaling)), "mscale", "mscale_all_dim")
            if theta <= 1.0:
                config.refuse("rope_theta", theta, "yarn needs a number above 1")
            scaling = _yarn(entry, max_length)
            # Directories may give only the original length.
            max_length = max(max_length, entry.lengthened(scaling.original_max_position_embeddings, scaling.factor))
        case _:
            config.refuse(field, dict(parameters), f"rope_type {kind!r} is not one of default, linear, llama3 and yarn")
    return RotaryContext(rope.Rotary(head_dim, theta, scaling), max_length)


class _Entry(NamedTuple):
    config: HFConfig
    field: str
    parameters: Mapping[str, Any]

    def refuse(self, reason: str) -> NoReturn:
        self.config.refuse(self.field, dict(self.parameters), reason)

    def check_fields(self, *known: str) -> None:
        unknown = sorted(set(self.parameters) - {*known, "rope_type", "type", "rope_theta", "partial_rotary_factor"})
        if unknown:
            self.refuse(f"this rope_type has no {', '.join(unknown)}")

    def number(self, name: str, *, default: float | None = None, least: float = 0.0, inclusive: bool = False) -> float:
        value: Any = self.parameters.get(name)
        value = default if value is None else value
        if not is_finite(value) or value < least or (value == least and not inclusive):
            self.refuse(f"{name} is {value!r}; expected a finite number {'at least' if inclusive else 'above'} {least:g}")
        return float(value)

    def factor(self) -> float:
        return self.number("factor", least=1.0, inclusive=True)

    def original_length(self, max_length: int) -> int:
        # As in transformers, the field beside the object takes precedence over the one inside.
        if self.config.get("original_max_position_embeddings") is not None:
            return self.config.positive_int("original_max_position_embeddings")
        return int(self.number("original_max_position_embeddings", default=max_length, least=1.0, inclusive=True))

    def lengthened(self, length: int, factor: float) -> int:
        try:
            return int(length * factor)
        except OverflowError:
            self.refuse(f"a factor of {factor:g} makes {length} tokens more than can be counted")


def _parameters(config: HFConfig) -> tuple[str, Mapping[str, Any]]:
    found = {field: config.get(field) for field in ("rope_parameters", "rope_scaling") if config.get(field) is not None}
    for field, value in found.items():
        if not isinstance(value, Mapping):
            config.refuse(field, value, "expected an object")
    if len(found) == 2 and found["rope_parameters"] != found["rope_scaling"]:
        config.refuse("rope_scaling", dict(found["rope_scaling"]), "rope_parameters says something else; leave one out")
    return next(iter(found.items()), ("rope_parameters", {}))


def _kind(parameters: Mapping[str, Any]) -> Any:
    return parameters.get("rope_type", parameters.get("type", "default"))


def _rotated(config: HFConfig, field: str, parameters: Mapping[str, Any], head_dim: int, default_part: float | None) -> int:
    part, beside = parameters.get("partial_rotary_factor"), config.get("partial_rotary_factor")
    refused: tuple[str, Any] = (field, dict(parameters))
    if part is None:
        part = (1.0 if default_part is None else default_part) if beside is None else beside
        refused = ("partial_rotary_factor", part)
    elif beside not in (None, part) and _kind(parameters) != "default":
        # transformers takes the field beside the object where frequencies are scaled, and the one inside where not.
        config.refuse("partial_rotary_factor", beside, f"{field} says {part!r}; make them the same")
    if default_part is None and part != 1.0:
        config.refuse(*refused, "only a partial_rotary_factor of 1.0 is implemented")
    if not is_finite(part) or not 0.0 < part <= 1.0:
        config.refuse(*refused, "expected a partial_rotary_factor above 0 and at most 1")
    rotated = int(head_dim * part)
    if rotated % 2 or not rotated:
        reason = "rotary embedding needs an even number" + ("" if part == 1.0 else f", and rotates {rotated} with {part:g}")
        config.refuse("head_dim", head_dim, reason)
    return rotated


def _llama3(entry: _Entry, max_length: int) -> rope.Llama3Scaling:
    low, high = entry.number("low_freq_factor"), entry.number("high_freq_factor")
    if not high > low:
        entry.refuse("high_freq_factor must be above low_freq_factor")
    return rope.Llama3Scaling(entry.factor(), low, high, entry.original_length(max_length))


def _yarn(entry: _Entry, max_length: int) -> rope.YarnScaling:
    original = entry.original_length(max_length)
    factor = entry.factor() if entry.parameters.get("factor") is not None else max_length / original
    if factor < 1.0:
        entry.refuse(f"without a factor, max_position_embeddings={max_length} must be at least the original {original}")
    truncate = entry.parameters.get("truncate", True)
    if not isinstance(truncate, bool):
        entry.refuse("truncate must be true or false")
    mscale, mscale_all_dim = (entry.number(name, default=0.0, inclusive=True) for name in ("mscale", "mscale_all_dim"))
    attention_factor = rope.yarn_attention_factor(factor, mscale, mscale_all_dim)
    return rope.YarnScaling(
        factor,
        original,
        entry.number("attention_factor", default=attention_factor),
        entry.number("beta_fast", default=32.0),
        entry.number("beta_slow", default=1.0),
        truncate,
    )
