"""Examples of a data set: the columns that are read and the rows that are kept."""

import json
import logging
import re
import warnings
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, overload

from pydantic import Field

from rl_backend.contracts import SAME_CONTENTS, BaseConfig, BatchError, ConfigError, UnsupportedError
from rl_backend.data.chat_template import TEXT_ALONE, ChatMessage, require_text, require_utf8
from rl_backend.data.datasets import open_rows
from rl_backend.data.rows import Rows

logger = logging.getLogger(__name__)

_MEDIA_COLUMNS = ("images", "videos", "audios", "image", "video", "audio")
_LIKE_MESSAGES = re.compile(r"""\s*\[\s*\{\s*['"](role|content)['"]\s*:""")


type TooLong = Literal["refuse", "filter", "cut"]


class DataConfig(BaseConfig):
    """How the rows of ``dataset`` and of held-out rows are read.

    Attributes:
        prompt_column: text or chat messages; a.b is field b of column a; none: prompt, else messages.
        answer_column: what the reward compares with, and what SFT imitates; none: reward_model.ground_truth, ground_truth
            or answer, else the assistant's message at the end of messages.
        tools_column: JSON schemas of the functions that the model may call, for the chat template; none: rows have no such
            column.
        tools_file: a JSON list of schemas for rows that have none of their own.
        documents_column: documents for the chat template; none: rows have no such column.
        text_prompts: prompts that are text are continued as they stand, or are a user's message for the chat template.
        system_prompt: begins conversations that have no system message.
        chat_template_kwargs: variables of the chat template, such as {"enable_thinking": false}; strftime_now is the day
            that a template writes as today's.
        too_long: what is done with prompts of more than max_prompt_tokens: refuse the run, filter them out, or cut off their
            beginnings. SFT cuts off the ends of answers that do not fit into max_tokens_per_micro_batch.
    """

    prompt_column: str | None = None
    answer_column: str | None = None
    tools_column: str | None = "tools"
    tools_file: Annotated[str | None, SAME_CONTENTS] = None
    documents_column: str | None = "documents"
    text_prompts: Literal["continue", "message"] = "continue"
    system_prompt: str | None = Field(default=None, min_length=1)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    too_long: TooLong = "refuse"


@dataclass(frozen=True)
class PromptExample:
    """One task.

    Attributes:
        prompt: plain text, or chat messages (``role``, ``content`` and the row's other keys) for a chat template.
        ground_truth: what the reward function compares with; any JSON value; None where the row has none.
        answer: the assistant's message that followed the prompt, of a row of ``messages`` that ends with one.
        columns: the row as it stands, for reward functions that take its columns by name.
    """

    prompt: str | list[ChatMessage]
    ground_truth: Any
    data_source: str
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    answer: ChatMessage | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    documents: Sequence[Mapping[str, Any]] = ()
    columns: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def messages(self) -> list[ChatMessage]:
        return [*([] if isinstance(self.prompt, str) else self.prompt), *([] if self.answer is None else [self.answer])]


def read_examples(path: Path | str, data: DataConfig | None = None, *, require_answer: bool = True) -> list[PromptExample]:
    """Reads all rows.

    A row has:
        ``prompt``: text, or a list of chat messages with text content; or ``messages``, a list of them. An assistant's
            message at the end of ``messages`` is the answer. A JSON text of messages is read as these.
        the ground truth: ``reward_model.ground_truth`` (verl), else ``ground_truth``, else ``answer``, else the content of
            the answer in ``messages``.
        ``data_source``: text; without it, the file's name without suffix.
        ``tools`` and ``documents``: lists of objects, or their JSON text, optional; see :class:`DataConfig`.
        ``extra_info``: an object, optional. Every other column (verl's ``ability`` too) is added to it
            for the reward function.

    Raises:
        BatchError: a row has a missing or wrong field; names file, line or row, counted from 1, and field.
        UnsupportedError: images, videos or audio. Others as of :func:`~rl_backend.data.datasets.open_rows`.
    """
    rows, data = open_rows(path), data or DataConfig()
    warn_of_padding(rows, data)
    tools = read_tools_file(data)
    return [read_example(rows, index, data, tools, require_answer=require_answer) for index in range(len(rows))]


def warn_of_padding(rows: Rows, data: DataConfig) -> None:
    rendered = {data.prompt_column or "prompt", "messages", data.tools_column, data.documents_column}
    padded = rows.padded_fields({column for column in rendered if column})
    if padded:
        logger.warning(
            "%s: %s are null in some rows; a table cannot say which rows leave them out, so reward functions get None",
            rows.source,
            ", ".join(padded),
        )


def read_example(
    rows: Rows,
    index: int,
    data: DataConfig,
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    require_answer: bool = True,
    require_columns: Sequence[str] = (),
) -> PromptExample:
    return _Reader(rows, index, data, require_columns).example(rows.name, tools, require_answer)


class _Reader:
    def __init__(self, rows: Rows, index: int, data: DataConfig, require_columns: Sequence[str]) -> None:
        self.given = columns = rows[index]
        self.where, self.columns, self.data = rows.where(index), sorted(columns), data
        if missing := [name for name in require_columns if name not in columns]:
            problem = f"the row has {self.columns}; rename its column, or give the parameter a default"
            raise BatchError(f"{self.where}: the reward function takes {', '.join(missing)}; {problem}")
        self.without_padding = rows.without_padding
        # A parquet column that a row leaves out reads as None.
        self.row: dict[str, Any] = {name: value for name, value in columns.items() if value is not None}

    def example(self, default_source: str, tools: Sequence[Mapping[str, Any]], require_answer: bool) -> PromptExample:
        row = self.row
        for name in _MEDIA_COLUMNS:
            value = row.pop(name, None)
            if value is not None and not (isinstance(value, str | list) and not value):
                raise UnsupportedError(f"{self.where}, field {name!r}: {TEXT_ALONE}: remove the column", name=name)
        prompt, answer = self.prompt()
        tools = self.shown("tools_column", prompt) or tools
        documents = self.shown("documents_column", prompt)
        ground_truth = self.ground_truth(answer, require_answer)
        source = row.pop("data_source", default_source)
        self.require("data_source", source, isinstance(source, str), "text")
        extra_info = row.pop("extra_info", {})
        self.require("extra_info", extra_info, isinstance(extra_info, dict), "an object")
        for name, value in row.items():
            # One would hide the other from the reward function.
            fits = extra_info.get(name) in (None, value)
            self.require(name, value, fits, f"the same as extra_info.{name}={extra_info.get(name)!r}, or another name")
        return PromptExample(prompt, ground_truth, source, {**extra_info, **row}, answer, tools, documents, self.given)

    def prompt(self) -> tuple[str | list[ChatMessage], ChatMessage | None]:
        name = self.data.prompt_column or ("prompt" if "prompt" in self.row or "messages" not in self.row else "messages")
        value = self.take(name)
        if value is None:
            raise self.missing(name, "prompt_column")
        value = self.without_padding(name, value)
        value = self.conversation(name, value) if isinstance(value, str) else value
        is_prompt = isinstance(value, str | list) and bool(value)
        self.require(name, value, is_prompt, "text or a list of chat messages, not empty")
        require_utf8(value, f"{self.where}, field {name}")
        if isinstance(value, str):
            return value, None
        messages = [self.message(f"{name}[{index}]", message) for index, message in enumerate(value)]
        if messages[-1]["role"] != "assistant":
            return messages, None
        if len(messages) == 1:
            raise BatchError(f"{self.where}, field {name}: has nothing before the assistant's message", name=name)
        return messages[:-1], messages[-1]

    def conversation(self, name: str, text: str) -> str | list[Any]:
        expected = "a list of chat messages, or its JSON text"
        try:
            found = json.loads(text) if text.lstrip().startswith("[") else text
        except (ValueError, RecursionError):
            self.require(name, text, not _LIKE_MESSAGES.match(text), f"{expected}, which json.dumps writes")
            found = text
        if isinstance(found, list) and found and all(isinstance(each, dict) and "role" in each for each in found):
            return found
        named = self.data.prompt_column is not None or name != "messages"
        self.require(name, text, named, f"{expected}; name a column of texts with prompt_column")
        return text

    def shown(
        self, option: Literal["tools_column", "documents_column"], prompt: str | list[ChatMessage]
    ) -> tuple[dict[str, Any], ...]:
        name: str | None = getattr(self.data, option)
        if name is None:
            return ()
        value = self.field(name)
        value = value if value is None else self.without_padding(name, value)
        # It stays in the row: a reward function is given the column too.
        if name in self.row:
            self.row[name] = value
        return shown_objects(value, f"{self.where}, field {name}", option, prompt, self.data)

    def message(self, place: str, message: Any) -> ChatMessage:
        self.require(place, message, isinstance(message, dict), "a message with role and content")
        self.require(f"{place}.role", message.get("role"), isinstance(message.get("role"), str), "text")
        content = message.get("content")
        require_text(content, f"{self.where}, field {place}")
        if isinstance(content, list) and content and all(_is_text(part) for part in content):
            content = "".join(part["text"] for part in content)
        calls = json_objects(message.get("tool_calls"), f"{self.where}, field {place}.tool_calls", "calls")
        # Some templates ask whether it is null, and write calls only then.
        is_content = isinstance(content, str) or (content is None and bool(calls))
        self.require(f"{place}.content", content, is_content, "text")
        whole = {key: value for key, value in message.items() if value is not None} | {"content": content}
        return whole | {"tool_calls": list(calls)} if calls else whole

    def ground_truth(self, answer: ChatMessage | None, required: bool) -> Any:
        name, reward_model = self.data.answer_column, None
        if name is not None:
            value = self.take(name)
        elif (reward_model := self.row.pop("reward_model", None)) is not None:
            name = "reward_model.ground_truth"
            self.require("reward_model", reward_model, isinstance(reward_model, dict), "an object with ground_truth")
            value = reward_model.get("ground_truth")
        else:
            name = "reward_model.ground_truth, ground_truth or answer"
            column = next((each for each in ("ground_truth", "answer") if each in self.row), None)
            value = self.row.pop(column) if column else answer["content"] if answer else None
        if value is None and required:
            raise self.missing(name, "answer_column")
        return value

    def take(self, path: str) -> Any:
        return self.row.pop(path) if path in self.row else self.field(path)

    def field(self, path: str) -> Any:
        if path in self.row:
            return self.row[path]
        name, *fields = path.split(".")
        value = self.row.get(name)
        for each in fields:
            value = value.get(each) if isinstance(value, dict) else None
        return value

    def missing(self, name: str, option: str) -> BatchError:
        return BatchError(
            f"{self.where}, field {name}: missing or null; the row has {self.columns}; name its column with {option}",
            name=name,
        )

    def require(self, name: str, value: Any, fits: bool, expected: str) -> None:
        if not fits:
            raise BatchError(f"{self.where}, field {name}: is {short_repr(value)}; expected {expected}", name=name)


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str)


def short_repr(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def json_objects(value: Any, place: str, what: str) -> tuple[dict[str, Any], ...]:
    """The objects of a list, or of its JSON text; none of null. Raises :class:`BatchError` for anything else."""
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
    """The tools or documents of a row; :class:`BatchError` for no list of objects, or a text that no template renders."""
    found = json_objects(value, place, "JSON schemas" if option == "tools_column" else "documents")
    if found and isinstance(prompt, str) and data.text_prompts == "continue":
        raise BatchError(
            f"{place}: the prompt is text, which is continued as it stands, so the model is not shown them; set "
            f"text_prompts to message, or {option} to none"
        )
    return found


def read_tools_file(data: DataConfig) -> tuple[dict[str, Any], ...]:
    """The tools of ``data.tools_file``; none without one. Raises :class:`ConfigError` for a file without any."""
    if data.tools_file is None:
        return ()
    found: tuple[dict[str, Any], ...] = ()
    problem = "has no tools; leave it out"
    try:
        found = json_objects(Path(data.tools_file).read_text(encoding="utf-8"), "the file", "JSON schemas")
    except (OSError, UnicodeDecodeError, BatchError) as error:
        problem = f"cannot be used: {error}"
    if not found:
        raise ConfigError.of("tools_file", data.tools_file, problem)
    return found


@dataclass
class UntoldCalls:
    """Rows of a data file whose messages call tools, although the model is told of none: their number, and the first."""

    rows: int = 0
    first: str = ""

    def add(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]], where: str) -> None:
        if not tools and any(message.get("tool_calls") or message["role"] == "tool" for message in messages):
            self.rows, self.first = self.rows + 1, self.first or where

    def warn(self, source: str, of: int, data: DataConfig) -> None:
        if self.rows:
            warnings.warn(
                f"{source}: {self.rows} of {of} rows call tools that the model is not told of, the first is {self.first}; "
                f"put their JSON schemas into the column {data.tools_column or 'tools'}, or for all rows into tools_file",
                stacklevel=3,
            )


class Length(NamedTuple):
    """Tokens of a part of an example, what limits them, and what to do about more."""

    tokens: int
    option: str
    most: int
    remedy: str = "raise it"


class Examples[T](Sequence[T]):
    """The examples of a data set, each made of its row when it is asked for: texts and tokens are not kept in memory.

    Args:
        make: the example of a row, and its lengths before any cut; it cuts where ``too_long`` asks for that.
        kind: what an example is, for messages.
        see: told of each example that is kept, and of its row in words, once.

    Attributes:
        note: how many were filtered or cut, and by which limit; empty where none was.

    Raises:
        BatchError: a row that ``make`` refuses, examples that are too long and not to be filtered or cut, or none is left.
    """

    def __init__(
        self,
        rows: Rows,
        make: Callable[[int], tuple[T, Sequence[Length]]],
        too_long: TooLong,
        kind: str = "prompt",
        see: Callable[[T, str], None] = lambda example, where: None,
    ) -> None:
        self._make, self._kept, self.note = make, array("Q"), ""
        # By what limits them: their number, the first, and the longest.
        found: dict[str, tuple[int, str, Length]] = {}
        for index in range(len(rows)):
            example, lengths = make(index)
            over = next((length for length in lengths if length.tokens > length.most), None)
            if over is not None:
                number, first, longest = found.get(over.option, (0, f"{rows.where(index)} with {over.tokens}", over))
                found[over.option] = number + 1, first, max(longest, over)
            if over is None or too_long == "cut":
                self._kept.append(index)
                see(example, rows.where(index))
        if not found:
            return
        some = [
            f"{number} of {len(rows)} {kind}s {'has' if number == 1 else 'have'} more tokens than {over.option}={over.most}"
            for number, _, over in found.values()
        ]
        if too_long == "refuse" or not self._kept:
            told = [
                f"{each} (the first is {first}, the longest has {over.tokens}); {over.remedy}"
                for each, (_, first, over) in zip(some, found.values(), strict=True)
            ]
            either = ", or set too_long to filter or cut" if too_long == "refuse" else ""
            raise BatchError(f"{rows.source}: {'; '.join(told)}{either}")
        self.note = f"{'; '.join(some)}: {'cut' if too_long == 'cut' else 'filtered'}"

    def __len__(self) -> int:
        return len(self._kept)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self._make(row)[0] for row in self._kept[index]]
        return self._make(self._kept[index])[0]


def open_dataset(path: Path | str, *, held_out: bool = False) -> Rows:
    return open_rows(path, field="eval_dataset", default_split=None) if held_out else open_rows(path)


def as_messages(prompt: str | Sequence[ChatMessage], data: DataConfig, where: str) -> list[ChatMessage] | None:
    """The conversation, with the system prompt; None for a text that is continued as it stands."""
    if isinstance(prompt, str):
        if data.text_prompts == "continue":
            given = [name for name in ("system_prompt", "chat_template_kwargs", "tools_file") if data.is_set(name)]
            problem = f"{where} is text, which is continued as it stands; set text_prompts to message, or leave it out"
            ConfigError.refuse_all((name, getattr(data, name), problem) for name in given)
            return None
        prompt = [{"role": "user", "content": prompt}]
    if data.system_prompt is None or any(message["role"] == "system" for message in prompt):
        return list(prompt)
    return [{"role": "system", "content": data.system_prompt}, *prompt]


def cut_prompt(token_ids: list[int], most: int, tokenizer: Any) -> list[int]:
    """The last ``most`` tokens, behind a begin-of-text token, which stays."""
    if len(token_ids) <= most:
        return token_ids
    begins = most > 1 and token_ids[0] == tokenizer.bos_token_id
    return [*token_ids[:begins], *token_ids[len(token_ids) - most + begins :]]
