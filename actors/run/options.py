"""Options of a run: nested configurations, short names of their values, and values that follow from others."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from pydantic import ModelWrapValidatorHandler, SerializerFunctionWrapHandler, model_serializer, model_validator

from rl_backend.contracts import BaseConfig, ConfigError


@dataclass(frozen=True)
class Follows:
    """A value of a nested configuration that follows from other options unless it is given.

    Attributes:
        value: of the run's options.
        because: why the run decides it: another value is refused. Empty where a given value wins.
        until: stands in for a value that the nested configuration cannot be read without.
        shown: what can be said of the value where Ray does not run; None: the value needs no Ray.
    """

    value: Callable[[Any], Any]
    because: str = ""
    until: Any = None
    shown: Callable[[Any], Any] | None = None


class Options(BaseConfig):
    """A configuration of nested ones. A value is given by its place, or by a short name, to the constructor too::

        GRPOConfig(train={"backend_cfg": {"parallel": {"tp": 2}}})
        GRPOConfig(**{"train.backend_cfg.parallel.tp": 2})
        GRPOConfig(tp=2)

    Attributes:
        short: short name -> place.
        renamed: options of earlier versions -> place of their value now; they are refused with it.
        preset: place -> default, where it differs from that of the nested configuration.
        follows: place -> what it follows from. Such a value is saved only where it was given.
        repeated: places of lists whose flag is given once for each text, which is taken as it stands.
        help_groups: title -> options that help shows under it, by short name or place; ``lora.`` is a whole section. Those
            of base classes are kept; what is in none is under "training".
        metavars: option -> what help calls its value, where that is more than its type.
        example: options of a command line, for help.
    """

    short: ClassVar[Mapping[str, str]] = {}
    renamed: ClassVar[Mapping[str, str]] = {}
    preset: ClassVar[Mapping[str, Any]] = {}
    follows: ClassVar[Mapping[str, Follows]] = {}
    repeated: ClassVar[tuple[str, ...]] = ()
    help_groups: ClassVar[Mapping[str, Sequence[str]]] = {}
    metavars: ClassVar[Mapping[str, str]] = {}
    example: ClassVar[str] = ""

    @classmethod
    def all_groups(cls) -> dict[str, tuple[str, ...]]:
        """``help_groups`` of this class and its bases."""
        found: dict[str, tuple[str, ...]] = {}
        for each in reversed(cls.__mro__):
            for title, names in vars(each).get("help_groups", {}).items():
                found[title] = (*found.get(title, ()), *names)
        return found

    @classmethod
    def section_types(cls, values: Mapping[str, Any]) -> dict[str, type[BaseConfig]]:
        """Place -> type, of nested configurations whose type is decided by ``values``, as :meth:`nest` returns them."""
        return {}

    @classmethod
    def fitted(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Place -> default that depends on ``given``, as :meth:`nest` returns it; takes precedence over ``preset``."""
        return {}

    @classmethod
    def nest(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """``values`` in their places; a value by its short name wins over one in its place.

        Raises:
            ConfigError: an option of an earlier version.
        """
        nested: dict[str, Any] = {}
        for name in sorted(values, key=lambda name: name in cls.short or "." in name):
            value = values[name]
            if name in cls.renamed and (name not in cls.model_fields or not isinstance(value, Mapping | BaseConfig)):
                raise ConfigError.of(f"{cls.__name__}.{name}", value, f"is {cls.renamed[name]} now; set that")
            nested = merged(nested, at(cls.short.get(name, name), value))
        return nested

    @classmethod
    def overlaid(cls, below: Mapping[str, Any], above: Mapping[str, Any]) -> Self:
        """Of the values of both, in their places or by their short names; where both have one, that of ``above``."""
        values = cls.nest(below)
        return cls(**merged(values, cls.nest(above), dict(sections_of(cls, cls.section_types(values)))))

    @model_validator(mode="wrap")
    @classmethod
    def _read(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(values, Mapping):
            return handler(values)
        given = cls.nest(values)
        # A section that nothing is given of says itself which of its values must be.
        whole: dict[str, Any] = {
            name: {}
            for name, field in cls.model_fields.items()
            if field.is_required() and isinstance(field.annotation, type) and issubclass(field.annotation, BaseConfig)
        }
        stand_ins = {path: rule.until for path, rule in cls.follows.items() if rule.until is not None}
        for path, value in {**stand_ins, **cls.preset, **cls.fitted(given)}.items():
            whole = merged(whole, at(path, value))
        config = handler(merged(whole, given))
        for path, rule in cls.follows.items():
            if has(config, path) and (rule.because or (rule.until is not None and not has(given, path))):
                section, _, rest = path.partition(".")
                found, default = config.value_and_default(path)
                wanted = rule.value(config)
                if has(given, path) and found not in (default, wanted):
                    raise ConfigError.of(f"{cls.__name__}.{path}", found, rule.because)
                object.__setattr__(config, section, _with_value(getattr(config, section), rest, wanted, given=False))
        return config

    @model_serializer(mode="wrap")
    def _without_what_follows(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = handler(self)
        for path in self.follows:
            section, _, name = path.rpartition(".")
            if has(values, path) and not self.gives(path):
                get(values, section).pop(name)
        return values

    @classmethod
    def name_of(cls, path: str) -> str:
        """The short name of a place, or the place."""
        return next((name for name, place in cls.short.items() if place == path), path)

    def value_and_default(self, name: str) -> tuple[Any, Any]:
        """Of a short name or place; twice None where there is no such one."""
        path = self.short.get(name, name)
        section, _, field = path.rpartition(".")
        if not has(self, path):
            return None, None
        owner = type(get(self, section) if section else self)
        return get(self, path), owner.model_fields[field].get_default(call_default_factory=True)

    def gives(self, path: str) -> bool:
        """Whether a value of a nested configuration was given, even if it is the default."""
        section, _, name = path.rpartition(".")
        return name in get(self, section).model_fields_set

    def filled(self, section: str) -> Any:
        """A nested configuration with all that follows from other options, where it was not given."""
        config = getattr(self, section)
        for path, rule in self.follows.items():
            first, _, rest = path.partition(".")
            if first == section and has(self, path) and not self.gives(path):
                config = _with_value(config, rest, rule.value(self))
        return config

    def followed(self) -> Iterator[tuple[str, Any]]:
        """Place and value of what follows from other options and was not given."""
        for path, rule in self.follows.items():
            if has(self, path) and not self.gives(path):
                yield path, (rule.shown or rule.value)(self)


def declared(config_type: type[BaseConfig]) -> type[Options]:
    """What a configuration says of its options; nothing, where it is not :class:`Options`."""
    return config_type if issubclass(config_type, Options) else Options


def sections_of(
    kind: type[BaseConfig], types: Mapping[str, type[BaseConfig]], prefix: str = ""
) -> Iterator[tuple[str, type[BaseConfig]]]:
    """Prefix and type of a configuration and of all that are nested in it; ``types`` as :meth:`Options.section_types`."""
    yield prefix, kind
    for name, field in kind.model_fields.items():
        nested = types.get(prefix + name, field.annotation)
        if isinstance(nested, type) and issubclass(nested, BaseConfig):
            yield from sections_of(nested, types, f"{prefix}{name}.")


def merged(
    below: Mapping[str, Any], above: Mapping[str, Any], sections: Container[str] | None = None, prefix: str = ""
) -> dict[str, Any]:
    """Nested dictionaries; where both have a value, that of ``above``. Configurations become the values given to them.

    Args:
        sections: prefixes of configurations, as of :func:`sections_of`. Another dictionary is one value, such as reward
            functions by name: that of ``above`` has nothing of the one below. None: there is no such one.
        prefix: of what is merged.
    """
    values = dict(below)
    for name, value in above.items():
        if isinstance(value, BaseConfig):
            value = {each: getattr(value, each) for each in value.model_fields_set}
        if isinstance(value, Mapping):
            place = f"{prefix}{name}."
            there = values.get(name) if sections is None or place in sections else None
            value = merged(there if isinstance(there, Mapping) else {}, value, sections, place)
        values[name] = value
    return values


def at(path: str, value: Any) -> dict[str, Any]:
    """``a.b``, 1 -> ``{"a": {"b": 1}}``."""
    for name in reversed(path.split(".")):
        value = {name: value}
    return dict(value)


def get(values: Any, path: str) -> Any:
    """The value at a place of nested dictionaries or configurations."""
    for name in path.split("."):
        values = values[name] if isinstance(values, Mapping) else getattr(values, name)
    return values


def has(values: Any, path: str) -> bool:
    """Whether there is such a place."""
    for name in path.split("."):
        if not (name in values if isinstance(values, Mapping) else hasattr(values, name)):
            return False
        values = values[name] if isinstance(values, Mapping) else getattr(values, name)
    return True


def _with_value[C: BaseConfig](config: C, path: str, value: Any, *, given: bool = True) -> C:
    """A copy with one value changed; which values were given stays as it was, but for that one."""
    name, _, rest = path.partition(".")
    new = config.replace(**{name: _with_value(getattr(config, name), rest, value, given=given) if rest else value})
    was = set(config.model_fields_set) | {name}
    object.__setattr__(new, "__pydantic_fields_set__", was if rest or given else was - {name})
    return new
