"""A command line made from a configuration: a flag for each value, and files of options."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

import yaml

from rl_backend.contracts import BaseConfig, ConfigError, RegistryError, RLBackendError
from rl_backend.options.help import Sections, alternatives, nearest, option_parser, shown
from rl_backend.options.option_set import (
    IS_SECTION,
    OptionSet,
    followed,
    has,
    merged,
    not_sections,
    options_of,
    sections_of,
)
from rl_backend.options.parser import CommandError


@dataclass(frozen=True)
class ConfigFile:
    """The values of a ``--config`` file.

    Attributes:
        lines: name of a value as the file has it, ``loss.name`` -> its line, from 1; empty where they cannot be told.
    """

    path: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    lines: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path | str) -> ConfigFile:
        """JSON by its suffix, else YAML."""
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
            values = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
            if not isinstance(values, dict):
                raise ValueError(f"it holds a {type(values).__name__}, not an object of options")
            lines = _lines(text, path)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            raise ConfigError(f"--config {path}, line {mark.line + 1 if mark else '?'}: {error.problem}") from None
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            raise ConfigError(f"--config {path}: {error}") from None
        return cls(str(path), {str(name): value for name, value in values.items()}, lines)

    def line_of(self, place: str, options: OptionSet) -> str | None:
        """``mine.yaml, line 3: name`` of the value at a place of the configuration; None where the file has none."""
        for name, line in self.lines.items():
            if options.place_of(name) == place:
                return f"--config {self.path}, line {line}: {name}"
        return None


def as_yaml(config: BaseConfig) -> str:
    """All values of a configuration, for ``--config``; what follows from others is a comment."""
    values = config.model_dump(mode="json")
    text: str = yaml.safe_dump(values, sort_keys=False, width=1 << 20, allow_unicode=True)
    comments = [f"#   {path}: {json.dumps(value)}\n" for path, value in followed(config)]
    return text + "".join(["# follows from the values above:\n", *comments] if comments else [])


def _lines(text: str, path: Path) -> dict[str, int]:
    found: dict[str, int] = {}
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError):  # JSON that is no YAML, for example with tabs: lines only help messages
        return {}
    for name, line in _keys(root, ""):
        if name in found:
            raise ConfigError(f"--config {path}, line {line}: {name} is there twice, first in line {found[name]}; keep one")
        found[name] = line
    return found


def _keys(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield f"{prefix}{key.value}", key.start_mark.line + 1
            yield from _keys(value, f"{prefix}{key.value}.")


def parse_config[C: BaseConfig](config_type: type[C], description: str, arguments: Sequence[str] | None = None) -> C:
    """Reads ``config_type`` from the command line; flags given there replace the values of ``--config``.

    A flag is the place of a value, ``--train.backend_cfg.parallel.tp``, or its short name, ``--tp``. With ``--print-config``
    all values are printed as YAML, for ``--config``, and the process ends.

    Raises:
        ConfigError: an unknown flag, a value that the configuration refuses, or a ``--config`` file that cannot be read.
    """
    words = [_spelled(word) for word in (sys.argv[1:] if arguments is None else arguments)]
    asks_help = not {"--help", "-h"}.isdisjoint(words)
    options, prog = options_of(config_type), _program()
    sections = dict(sections_of(config_type, {}))
    file, given = ConfigFile(), {}

    def meant(flag: str) -> str | None:
        near = nearest(flag, config_type, sections)
        return near and f"--{shown(near)}"

    try:
        # Values decide which options there are: first all are read that do not depend on it.
        parser = option_parser(prog, config_type, description, sections)
        found, _ = parser.parse_known_args([word for word in words if word not in ("--help", "-h")])
        if len(found.config) > 1:
            raise CommandError(f"--config: is given {len(found.config)} times; put all into one file")
        file = ConfigFile.read(found.config[0]) if found.config else file
        types = options.section_types(merged(options.nest(file.values), options.nest(_values(found, sections))))
        sections = dict(sections_of(config_type, types))
        parser = option_parser(prog, config_type, description, sections)
        # Help is shown beside a wrong flag too.
        if not asks_help:
            parser.refuse_unknown(words, meant)
        found = parser.parse_args(words)
        _refuse_unknown(file, config_type, sections)
        given = options.nest(_values(found, sections))
        config = config_type(**merged(options.nest(file.values), given, sections))
    except CommandError as error:
        raise ConfigError(str(error)) from None
    except RegistryError as error:
        raise ConfigError(f"--backend: {error}") from None
    except ConfigError as error:

        def name(place: str) -> str:
            of_file = None if has(given, place) else file.line_of(place, options)
            return of_file or f"--{shown(options.name_of(place))}"

        raise ConfigError(error.told(lambda field: name(place) if (place := _place(field, sections)) else field)) from None
    if found.print_config:
        print(as_yaml(config), end="")
        raise SystemExit(0)
    return config


def in_flags(error: RLBackendError, config: BaseConfig | None) -> str:
    """The message, with flags in place of the fields of a configuration that it blames."""
    if config is None or not isinstance(error, ConfigError):
        return str(error)
    options = options_of(type(config))
    sections = dict(sections_of(type(config), options.section_types(config.model_dump())))
    return error.told(lambda field: f"--{shown(options.name_of(place))}" if (place := _place(field, sections)) else field)


def _values(found: Any, sections: Sections) -> dict[str, Any]:
    values = {}
    kinds = {prefix + name: info.annotation for prefix, kind in sections.items() for name, info in kind.model_fields.items()}
    repeated = options_of(sections[""]).repeated
    for place, texts in vars(found).items():
        if place in kinds:
            values[place] = texts if place in repeated or isinstance(texts, bool) else _value(place, kinds[place], texts)
    return values


def _value(place: str, annotation: Any, texts: Sequence[str]) -> Any:
    found = list(alternatives(annotation))
    kinds = [kind for each in found if isinstance(kind := get_origin(each) or each, type)]
    is_object = any(issubclass(kind, Mapping | BaseConfig) for kind in kinds)
    is_list = any(issubclass(kind, list | tuple) for kind in kinds)
    if texts[-1] == "none" and not any("none" in get_args(each) for each in found):
        return None if NoneType in kinds or not (is_object or is_list) else [] if is_list else {}
    if not is_object and not is_list:
        return texts[-1]
    pieces = [_piece(place, text, is_object=is_object, is_list=is_list) for text in texts]
    if len(pieces) == 1:
        return pieces[0]
    if all(isinstance(piece, dict) for piece in pieces):
        return {name: value for piece in pieces for name, value in piece.items()}
    return [each for piece in pieces for each in (piece if isinstance(piece, list) else [piece])]


def _piece(place: str, text: str, *, is_object: bool, is_list: bool) -> Any:
    if text.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(text)
        except ValueError as error:
            raise CommandError(f"--{shown(place)} {text}: not JSON: {error}") from None
    if is_object and "=" in text:
        pairs = (pair.partition("=") for pair in text.split(","))
        return {name.strip(): value for name, _, value in pairs}
    if is_list:
        return [each.strip() for each in text.split(",") if each.strip()]
    return text or {}


def _refuse_unknown(file: ConfigFile, config_type: type[BaseConfig], sections: Sections) -> None:
    for name, value in not_sections(file.values, options_of(config_type), sections):
        where = f", line {file.lines[name]}" if name in file.lines else ""
        raise ConfigError(f"--config {file.path}{where}: {name}={json.dumps(value, default=str)}: {IS_SECTION}")
    for name, line in file.lines.items():
        prefix, dot, last = options_of(config_type).place_of(name).rpartition(".")
        kind = sections.get(prefix + dot)
        if kind is not None and last not in kind.model_fields:
            near = nearest(name, config_type, sections)
            advice = f"did you mean {near}?" if near else "see --help"
            raise ConfigError(f"--config {file.path}, line {line}: {name}: there is no such option; {advice}")


def _place(field: str, sections: Sections) -> str | None:
    """Where a field is that an error names by its class, or a base of it; None: in no section, or in several."""
    owner, _, name = field.partition(".")
    if field in sections[""].model_fields:
        return field
    exact = [prefix for prefix, kind in sections.items() if kind.__name__ == owner]
    prefixes = exact or [prefix for prefix, kind in sections.items() if owner in [base.__name__ for base in kind.__mro__]]
    return (prefixes[0] + name).removesuffix(".") or None if len(prefixes) == 1 else None


def _spelled(word: str) -> str:
    if not word.startswith("--"):
        return word
    flag, equals, value = word[2:].partition("=")
    no, name = ("no-", flag[3:]) if flag.startswith("no-") else ("", flag)
    return f"--{no}{shown(name)}{equals}{value}"


def _program() -> str:
    """How this process was called, without its options: ``rl-backend grpo``, ``python -m examples.grpo``."""
    _, *words = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1]
    if words and not words[0].startswith("-") and not words[0].endswith(".py"):
        return " ".join([Path(words[0]).name, *words[1:]])
    return " ".join(["python", *words])
