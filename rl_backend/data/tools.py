"""Tools and documents that the model is shown beside messages: those of a row, and the tools of a whole run."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rl_backend.contracts import BatchError, ConfigError
from rl_backend.data.chat import ChatMessage, require_utf8, tool_name
from rl_backend.data.config import DataConfig


def short_repr(value: Any) -> str:
    """A value of a row for an error: at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def json_objects(value: Any, place: str, what: str) -> tuple[dict[str, Any], ...]:
    """The objects of a list, or of its JSON text; none of null.

    Args:
        value: of a row.
        place: of it, for the error.
        what: the list has, for the error.

    Raises:
        BatchError: it is something else.
    """
    found = value
    if isinstance(value, str):
        try:
            found = json.loads(value)
        except (ValueError, RecursionError):
            found = value
    if found is None:
        return ()
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise BatchError(f"{place}: is {short_repr(value)}; expected a list of {what}, each an object, or its JSON text")
    require_utf8(found, place)
    return tuple(found)


def shown_objects(
    value: Any, place: str, option: Literal["tools_column", "documents_column"], prompt: Any, data: DataConfig
) -> tuple[dict[str, Any], ...]:
    """The tools or documents of a row, for the chat template.

    Args:
        value: of the column.
        place: of it, for the error.
        option: that names the column.
        prompt: of the row: a text, or messages.

    Raises:
        BatchError: it is no list of objects, or the prompt is a text that no chat template renders.
    """
    found = json_objects(value, place, "JSON schemas" if option == "tools_column" else "documents")
    if found and isinstance(prompt, str) and data.text_prompts == "continue":
        raise BatchError(
            f"{place}: the prompt is text, which is continued as it stands, so the model is not shown them; set "
            f"text_prompts to message, or {option} to none"
        )
    return found


def read_tools_file(data: DataConfig) -> tuple[dict[str, Any], ...]:
    """The tools of ``data.tools_file``; none without one.

    Raises:
        ConfigError: the file cannot be read, or has something else.
    """
    if data.tools_file is None:
        return ()
    try:
        found = json_objects(Path(data.tools_file).read_text(encoding="utf-8"), "the file", "JSON schemas")
    except (OSError, UnicodeDecodeError, BatchError) as error:
        raise ConfigError.of("tools_file", data.tools_file, f"cannot be used: {error}") from None
    if not found:
        raise ConfigError.of("tools_file", data.tools_file, "has no tools; leave it out")
    return found


def require_given(tools: Any, given: Sequence[str]) -> None:
    """Refuses a row of an environment whose column ``tools`` has schemas of functions that the environment does not give.

    Args:
        tools: the column. Where it has no schemas it is the environment's own business.
        given: names of the environment's tools.

    Raises:
        BatchError: names the tools.
    """
    try:
        names = [tool_name(tool) for tool in json_objects(tools, "", "")]
    except BatchError:
        return
    missing = [name for name in names if name not in given]
    if missing:
        raise BatchError(
            f"field tools: the row has {', '.join(missing)}, and the environment gives {', '.join(given) or 'no tools'}; "
            "the model is told of the environment's tools alone: give them there, or rename the column"
        )


@dataclass
class UntoldCalls:
    """Rows of a data file whose messages call tools, although the model is told of none.

    Attributes:
        rows: how many.
        first: where the first is.
    """

    rows: int = 0
    first: str = ""

    def add(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]], where: str) -> None:
        """Looks at a row."""
        if not tools and any(message.get("tool_calls") or message["role"] == "tool" for message in messages):
            self.rows, self.first = self.rows + 1, self.first or where

    def warn(self, source: str, of: int, data: DataConfig) -> None:
        """Warns once, when all ``of`` rows have been looked at."""
        if self.rows:
            warnings.warn(
                f"{source}: {self.rows} of {of} rows call tools that the model is not told of, the first is {self.first}; "
                f"put their JSON schemas into the column {data.tools_column or 'tools'}, or for all rows into tools_file",
                stacklevel=3,
            )
