"""Help of a command line that is made from a configuration."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from difflib import get_close_matches
from types import NoneType
from typing import Annotated, Any, Literal, TypeAliasType, get_args, get_origin

from actors.run.options import declared
from rl_backend.contracts import BaseConfig

WIDTH, INDENT = 100, 30


def write_help(prog: str, config_type: type[BaseConfig], text: str, sections: Mapping[str, type[BaseConfig]]) -> str:
    """Usage, and a group of flags for each configuration: flag, short name, choices, what it is, default."""
    lines = [f"usage: {prog} [--config FILE] [--FLAG VALUE ...]", "", *_wrap(text, "")]
    rows = _row("--config FILE", "YAML or JSON with any of these values; flags on the command line replace them")
    groups = {"options": rows + _row("--help", "this text")}
    says = declared(config_type)
    for prefix, kind in sections.items():
        texts = kind.documented()
        title = f"{prefix[:-1]} ({kind.__name__})" if prefix else "options"
        rows = groups.setdefault(title, [])
        for name, field in kind.model_fields.items():
            path = prefix + name
            rule = says.follows.get(path)
            if f"{path}." in sections or (rule is not None and rule.because):
                continue
            default = says.preset.get(path, field.get_default(call_default_factory=True))
            if rule is not None:
                default = "follows from other options"
            shown = "required" if field.is_required() and path not in says.preset else f"default: {_plain(default)}"
            name_here = says.name_of(path)
            names = [name_here if "." in name_here else name_here.replace("_", "-"), *([path] if name_here != path else [])]
            flags = ", ".join(f"--{'[no-]' if field.annotation is bool else ''}{each}" for each in names)
            said = field.description or texts.get(name, "")
            rows += _row(f"{flags}{_value(field.annotation)}", f"{said} ({shown})".strip())
    for title, rows in groups.items():
        if rows:
            lines += ["", f"{title}:", *rows]
    return "\n".join(lines) + "\n"


def nearest(flag: str, config_type: type[BaseConfig], sections: Mapping[str, type[BaseConfig]]) -> str:
    """What to do about a flag that there is not."""
    if not flag.startswith("--"):
        return "is not a flag; flags begin with --, see --help"
    places = [prefix + name for prefix, kind in sections.items() for name in kind.model_fields]
    short = declared(config_type).short
    asked = flag.lstrip("-").replace("-", "_")
    ends = {place.rpartition(".")[2]: place for place in reversed(places)} | {name: name for name in short}
    near = get_close_matches(asked, places, n=1, cutoff=0.8) if "." in asked else []
    near = near or [ends[end] for end in get_close_matches(asked.rpartition(".")[2], ends, n=1)]
    if not near:
        return "there is no such flag; see --help"
    return f"there is no such flag; did you mean --{near[0] if '.' in near[0] else near[0].replace('_', '-')}?"


def _row(flags: str, text: str) -> list[str]:
    lines = _wrap(text, " " * INDENT)
    if len(flags) + 4 > INDENT:
        return [*_wrap(flags, "  "), *lines]
    return [f"  {flags}".ljust(INDENT) + lines[0][INDENT:], *lines[1:]]


def _wrap(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def _value(annotation: Any) -> str:
    """`` {auto,cpu}``, `` INT``: what stands after a flag."""
    if isinstance(annotation, TypeAliasType):
        return _value(annotation.__value__)
    if get_origin(annotation) is Annotated:
        return _value(get_args(annotation)[0])
    if annotation is bool:
        return ""
    if get_origin(annotation) is Literal:
        return f" {{{','.join(map(str, get_args(annotation)))}}}"
    kinds = [each for each in get_args(annotation) if each is not NoneType]
    if NoneType in get_args(annotation) and len(kinds) == 1:
        return _value(kinds[0])
    named = {int: " INT", float: " FLOAT", str: " TEXT"}
    if get_origin(annotation) in (tuple, list):
        return f"{_value(kinds[0])},..." if kinds[0] in named else " JSON"
    return named.get(annotation, " JSON")


def _plain(value: Any) -> str:
    if value in (None, (), {}, ""):
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)
