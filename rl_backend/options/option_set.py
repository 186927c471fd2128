"""What a configuration says of its options: short names, defaults, and values that follow from others."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ModelWrapValidatorHandler, SerializerFunctionWrapHandler

from rl_backend.contracts import BaseConfig, ConfigError

type SectionTypes = Mapping[str, type[BaseConfig]]
"""Place -> type, of nested configurations whose type is decided by other values."""


@dataclass(frozen=True)
class Follows:
    """A value of a nested configuration that follows from other options unless it is given.

    Attributes:
        value: computed from the whole configuration.
        because: why the run decides it: another value is refused. Empty where a given value wins.
        until: stands in for a value that the nested configuration cannot be read without.
        shown: what can be said of the value where Ray does not run; None: the value needs no Ray.
        text: the default, in words for help.
    """

    value: Callable[[Any], Any]
    because: str = ""
    until: Any = None
    shown: Callable[[Any], Any] | None = None
    text: str = "follows from other options"


@dataclass(frozen=True)
class OptionSet:
    """What a configuration says of its options; ``a | b`` is both, and ``b`` wins.

    Attributes:
        short: short name -> place. Flags, files and the constructor take either.
        preset: place -> default, where it differs from that of the nested configuration.
        follows: place -> what it follows from. Such a value is saved only where it was given.
        fitted: from the configuration's type and what is given to it, place -> default; takes precedence over ``preset``.
        section_types: from what is given, the nested configurations whose type depends on it.
        repeated: places of lists whose flag is given once for each text, which is taken as it stands.
        groups: title -> options that help shows under it, by short name or place; ``lora.`` is a whole section. What is in
            none is under "training".
        metavars: option -> what help calls its value, where that is more than its type.
        example: options of a command line, for help.
    """

    short: Mapping[str, str] = field(default_factory=dict)
    preset: Mapping[str, Any] = field(default_factory=dict)
    follows: Mapping[str, Follows] = field(default_factory=dict)
    fitted: Callable[[type[BaseModel], Mapping[str, Any]], Mapping[str, Any]] = lambda _, __: {}
    section_types: Callable[[Mapping[str, Any]], SectionTypes] = lambda _: {}
    repeated: tuple[str, ...] = ()
    groups: Mapping[str, Sequence[str]] = field(default_factory=dict)
    metavars: Mapping[str, str] = field(default_factory=dict)
    example: str = ""

    def __or__(self, other: OptionSet) -> OptionSet:
        titles = {**self.groups, **other.groups}
        return OptionSet(
            short={**self.short, **other.short},
            preset={**self.preset, **other.preset},
            follows={**self.follows, **other.follows},
            fitted=self.fitted if other.fitted is OptionSet.fitted else other.fitted,
            section_types=self.section_types if other.section_types is OptionSet.section_types else other.section_types,
            repeated=(*self.repeated, *other.repeated),
            groups={title: (*self.groups.get(title, ()), *other.groups.get(title, ())) for title in titles},
            metavars={**self.metavars, **other.metavars},
            example=other.example or self.example,
        )

    def nest(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """``values`` in their places; a short name wins over a place."""
        nested: dict[str, Any] = {}
        # Short names come last, and so win over places.
        for name in sorted(values, key=lambda name: name in self.short or "." in name):
            nested = merged(nested, at(self.place_of(name), values[name]))
        return nested

    def place_of(self, name: str) -> str:
        """The place of a short name, or of a name in a section that has one: ``tp``, ``loss.name``."""
        first, dot, rest = name.partition(".")
        return self.short.get(name) or f"{self.short.get(first, first)}{dot}{rest}"

    def name_of(self, place: str) -> str:
        """The short name of a place, or the place."""
        return next((name for name, each in self.short.items() if each == place), place)


def options_of(kind: type[BaseModel]) -> OptionSet:
    """The ``option_set`` of a configuration, empty where it has none."""
    return getattr(kind, "option_set", None) or OptionSet()


def read_options[C: BaseModel](cls: type[C], values: Any, handler: ModelWrapValidatorHandler[C]) -> C:
    """Wrap validator of a configuration with an ``option_set``: values are given by place or by short name, ``tp=2``."""
    if not isinstance(values, Mapping):
        return handler(values)
    options = options_of(cls)
    given = options.nest(values)
    # A section that nothing is given of says itself which of its values must be.
    required = [name for name, info in cls.model_fields.items() if info.is_required() and _is_config(info.annotation)]
    whole: dict[str, Any] = {name: {} for name in required}
    stand_ins = {path: rule.until for path, rule in options.follows.items() if rule.until is not None}
    for path, value in {**stand_ins, **options.preset, **options.fitted(cls, given)}.items():
        whole = merged(whole, at(path, value))
    config = handler(merged(whole, given))
    for path, rule in options.follows.items():
        if has(config, path) and (rule.because or (rule.until is not None and not has(given, path))):
            section, _, rest = path.partition(".")
            found, default = value_and_default(config, path)
            wanted = rule.value(config)
            if has(given, path) and found not in (default, wanted):
                raise ConfigError.of(f"{cls.__name__}.{path}", found, rule.because)
            object.__setattr__(config, section, _with_value(getattr(config, section), rest, wanted, given=False))
    return config


def write_options(self: BaseModel, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
    """Wrap serializer of a configuration with an ``option_set``: values that follow from others are left out."""
    values: dict[str, Any] = handler(self)
    # A run that continues with other options must compute them anew.
    for path in options_of(type(self)).follows:
        section, _, name = path.rpartition(".")
        if has(values, path) and not gives(self, path):
            get(values, section).pop(name)
    return values


def overlaid[C: BaseModel](kind: type[C], below: Mapping[str, Any], above: Mapping[str, Any]) -> C:
    """A configuration of the values of both, by place or short name; ``above`` wins."""
    options = options_of(kind)
    values = options.nest(below)
    sections = dict(sections_of(kind, options.section_types(values)))
    wrong = (*not_sections(below, options, sections), *not_sections(above, options, sections))
    ConfigError.refuse_all((f"{kind.__name__}.{name}", value, IS_SECTION) for name, value in wrong)
    return kind(**merged(values, options.nest(above), sections))


IS_SECTION = "these are several options; give each its own value (name: value), or leave it out"


def not_sections(
    values: Mapping[str, Any], options: OptionSet, sections: Container[str], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Name and value of what is given in the place of a nested configuration, and would be lost under one of its values.

    Args:
        sections: prefixes of configurations, as of :func:`sections_of`.
    """
    for name, value in values.items():
        place = f"{options.place_of(f'{prefix}{name}')}."
        if place not in sections or isinstance(value, BaseConfig):
            continue
        if isinstance(value, Mapping):
            yield from not_sections(value, options, sections, place)
        else:
            yield f"{prefix}{name}", value


def value_and_default(config: BaseModel, name: str) -> tuple[Any, Any]:
    path = options_of(type(config)).place_of(name)
    section, _, last = path.rpartition(".")
    if not has(config, path):
        return None, None
    owner = type(get(config, section) if section else config)
    return get(config, path), owner.model_fields[last].get_default(call_default_factory=True)


def gives(config: BaseModel, path: str) -> bool:
    """Whether the value at a place was given, even if it is the default."""
    section, _, name = path.rpartition(".")
    return name in get(config, section).model_fields_set


def filled(config: BaseModel, section: str) -> Any:
    """A nested configuration, with values that follow from other options in place of those not given."""
    found = getattr(config, section)
    for path, rule in options_of(type(config)).follows.items():
        first, _, rest = path.partition(".")
        if first == section and has(config, path) and not gives(config, path):
            found = _with_value(found, rest, rule.value(config))
    return found


def followed(config: BaseModel) -> Iterator[tuple[str, Any]]:
    """Place and value of each option that follows from others and was not given."""
    for path, rule in options_of(type(config)).follows.items():
        if has(config, path) and not gives(config, path):
            yield path, (rule.shown or rule.value)(config)


def sections_of(kind: type[BaseModel], types: SectionTypes, prefix: str = "") -> Iterator[tuple[str, type[Any]]]:
    """Prefix and type of a configuration and of all that are nested in it; ``types`` as of ``OptionSet.section_types``."""
    yield prefix, kind
    for name, info in kind.model_fields.items():
        nested: Any = types.get(prefix + name, info.annotation)
        if _is_config(nested):
            yield from sections_of(nested, types, f"{prefix}{name}.")


def merged(
    below: Mapping[str, Any], above: Mapping[str, Any], sections: Container[str] | None = None, prefix: str = ""
) -> dict[str, Any]:
    """Nested dictionaries of both; ``above`` wins. Configurations become the values given to them.

    Args:
        sections: prefixes of configurations, as of :func:`sections_of`. Any other dictionary is one value, such as reward
            functions by name, and replaces the one below; None merges all.
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
    for name in path.split("."):
        values = values[name] if isinstance(values, Mapping) else getattr(values, name)
    return values


def has(values: Any, path: str) -> bool:
    try:
        get(values, path)
    except (KeyError, AttributeError):
        return False
    return True


def _is_config(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseConfig)


def _with_value[C: BaseConfig](config: C, path: str, value: Any, *, given: bool = True) -> C:
    """A copy with one value changed, which counts as given or not; the others count as before."""
    name, _, rest = path.partition(".")
    new = config.replace(**{name: _with_value(getattr(config, name), rest, value, given=given) if rest else value})
    # A validated copy counts every field as given.
    was = set(config.model_fields_set) | {name}
    object.__setattr__(new, "__pydantic_fields_set__", was if rest or given else was - {name})
    return new
