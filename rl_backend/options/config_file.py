"""Files of options, YAML or JSON: read with the line of every name, and written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rl_backend.contracts import BaseConfig, ConfigError
from rl_backend.options.option_set import OptionSet, followed


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
