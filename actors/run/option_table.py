"""The options of a configuration as rows of a table, for help and completion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Annotated, Any, Literal, TypeAliasType, get_args, get_origin

from rl_backend.contracts import BaseConfig
from rl_backend.options.option_set import options_of

ROOT_GROUP = "options"
"""Of options at the top of a configuration that has no groups."""

OWN_GROUP = "training"
"""Of those that are in no group of a configuration that has some: what the loop itself adds."""


@dataclass(frozen=True)
class OptionRow:
    """One option.

    Attributes:
        flags: without dashes: its short name, if it has one, and its place.
        group: under which help has it.
        metavar: of its value: ``INT``, ``{auto,cpu}``; empty for a switch, which also has a ``--no-`` form.
        choices: all values, where they can be listed.
        text: what it is.
        default: None where it must be given.
    """

    flags: tuple[str, ...]
    group: str
    metavar: str
    choices: tuple[str, ...]
    text: str
    default: str | None


def option_rows(config_type: type[BaseConfig], sections: Mapping[str, type[BaseConfig]]) -> list[OptionRow]:
    """All options that can be given, first those of groups in the order that these name them.

    Args:
        sections: as of :func:`~actors.run.options.sections_of`.
    """
    says = options_of(config_type)
    named = [(says.short.get(name, name), title) for title, names in says.groups.items() for name in names]
    groups, position = dict(named), {place: index for index, (place, _) in enumerate(named)}
    rows: list[tuple[int, OptionRow]] = []
    for prefix, kind in sections.items():
        texts = kind.documented()
        title = f"{prefix[:-1]} ({kind.__name__})" if prefix else OWN_GROUP if named else ROOT_GROUP
        for name, field in kind.model_fields.items():
            path = prefix + name
            rule = says.follows.get(path)
            if f"{path}." in sections or (rule is not None and rule.because):
                continue
            default = says.preset.get(path, field.get_default(call_default_factory=True))
            short = says.name_of(path)
            metavar = says.metavars.get(short, _metavar(field.annotation))
            grouped = path if path in groups else prefix
            required = field.is_required() and path not in says.preset and rule is None
            row = OptionRow(
                flags=(short if "." in short else short.replace("_", "-"), *([path] if short != path else [])),
                group=groups.get(grouped, title),
                metavar=metavar,
                choices=tuple(metavar[1:-1].split(",")) if metavar.startswith("{") else (),
                text=field.description or texts.get(name, ""),
                default=None if required else "follows from other options" if rule is not None else _plain(default),
            )
            rows.append((position.get(grouped, len(named)), row))
    return [row for _, row in sorted(rows, key=lambda each: each[0])]


def _metavar(annotation: Any) -> str:
    """``{auto,cpu}``, ``INT``; empty for a switch."""
    if isinstance(annotation, TypeAliasType):
        return _metavar(annotation.__value__)
    if get_origin(annotation) is Annotated:
        return _metavar(get_args(annotation)[0])
    if annotation is bool:
        return ""
    if get_origin(annotation) is Literal:
        return f"{{{','.join(map(str, get_args(annotation)))}}}"
    kinds = [each for each in get_args(annotation) if each is not NoneType]
    if NoneType in get_args(annotation) and len(kinds) == 1:
        return _metavar(kinds[0])
    named = {int: "INT", float: "FLOAT", str: "TEXT"}
    if get_origin(annotation) in (tuple, list):
        return f"{_metavar(kinds[0])},..." if kinds[0] in named else "JSON"
    return named.get(annotation, "JSON")


def _plain(value: Any) -> str:
    if value in (None, (), {}, ""):
        return "none"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
