"""Base of every configuration: pydantic that refuses unknown fields and raises :class:`ConfigError`."""

import inspect
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, ValidationError, model_validator

from rl_backend.contracts.errors import ConfigError


@dataclass(frozen=True)
class HasEffect:
    """Metadata of a field: elsewhere than ``when``, a value other than the default has no effect and is refused.

    ``because`` says why, and what to do; ``{0.name}`` in it is a value of the configuration.
    """

    when: Callable[[Any], Any]
    because: str


@dataclass(frozen=True)
class OnResume:
    """Metadata of a field that may change in a run that continues from a checkpoint. Others must be the same.

    With ``same_contents`` the files that the value names must have the same contents.
    """

    same_contents: bool = False


MAY_CHANGE = OnResume()

SAME_CONTENTS = OnResume(same_contents=True)


class BaseConfig(BaseModel):
    """Frozen configuration; a wrong or unknown field, or one without effect, raises :class:`ConfigError`.

    ``model_dump_json`` and ``model_validate_json`` are inverses of each other for every subclass.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, protected_namespaces=(), ser_json_inf_nan="constants"
    )

    @model_validator(mode="wrap")
    @classmethod
    def _raise_config_error(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            config = handler(value)
        except ValidationError as error:
            blamed = _blamed(cls, error)
            message = "; ".join(field + problem for field, problem in blamed)
            # From None: pydantic's own error would repeat all of it, with addresses of its documentation.
            raise ConfigError(message, config=cls.__name__, blamed=blamed) from None
        # Only now: whether a field has an effect depends on the others.
        ConfigError.refuse_all(
            (f"{cls.__name__}.{name}", getattr(config, name), effect.because.format(config))
            for name, field in cls.model_fields.items()
            for effect in field.metadata
            if isinstance(effect, HasEffect) and config.is_set(name) and not effect.when(config)
        )
        return config

    def replace(self, **changes: Any) -> Self:
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self)(**{**fields, **changes})

    def is_set(self, name: str) -> bool:
        """Whether a field asks for something: its value is not its default, which saved configurations spell out."""
        return bool(getattr(self, name) != type(self).model_fields[name].get_default(call_default_factory=True))

    @classmethod
    def documented(cls) -> dict[str, str]:
        """Field -> text of ``Attributes:`` in the docstrings of this class and its bases, on one line."""
        docs = "\n".join(inspect.cleandoc(each.__doc__ or "") for each in reversed(cls.__mro__) if "__doc__" in vars(each))
        return {
            name: " ".join(text.replace("``", "").split()).rstrip(".")
            for names, text in re.findall(r"^    (\w[\w, ]*): (.+(?:\n {8}.+)*)", docs, re.MULTILINE)
            for name in names.split(", ")
        }

    def __reduce__(self) -> tuple[Any, ...]:
        # Built again where it arrives: pickle alone would put back the fields without checking them.
        return type(self).model_validate_json, (self.model_dump_json(),)


class ModelOptions(BaseConfig):
    """Base of the options of one model implementation; a family subclasses it and registers the subclass."""


def _blamed(cls: type[BaseConfig], error: ValidationError) -> list[tuple[str, str]]:
    blamed = []
    for problem in error.errors(include_url=False):
        location = ".".join(str(part) for part in problem["loc"])
        field = f"{cls.__name__}.{location}" if location else cls.__name__
        if problem["type"] == "extra_forbidden":
            known = ", ".join(sorted(cls.model_fields))
            blamed.append((field, f"={problem['input']!r}: unknown field; {cls.__name__} has {known}"))
        elif problem["type"] == "missing":
            blamed.append((field, ": required field is missing"))
        else:
            blamed.append((field, f"={_short(problem['input'])}: {problem['msg'][:1].lower()}{problem['msg'][1:]}"))
    return blamed


def _short(value: Any) -> str:
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
