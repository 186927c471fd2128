"""Rendering of the messages that follow a turn as token ids, and what a chat template does to past turns.

Dummy messages with a unique word in the model's place are rendered together with the new ones, and what follows the word is
encoded alone. So the ids of the past stay as they were sampled, and the new ones are what the template makes of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rl_backend.contracts import BatchError, ConfigError
from rl_backend.data.chat_template import ChatMessage, ChatTemplate, decode, special_token_ids
from rl_backend.environment.protocol import Message

WORD = "Zq7sentinel"
"""Stands for what the model wrote. No template treats a word by itself."""
_USER = {"role": "user", "content": "x"}


@dataclass(frozen=True)
class ChatRenderer:
    """A tokenizer's chat template, with its variables and the tools that it shows."""

    tokenizer: Any
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] = ()

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> ChatRenderer:
        return replace(self, tools=tuple(tools))

    def text(self, messages: Sequence[Message], *, generation_prompt: bool = True) -> str:
        template = ChatTemplate(self.tokenizer, self.chat_template_kwargs, self.tools)
        return template.render(messages, generation_prompt=generation_prompt)

    def encode(self, text: str) -> list[int]:
        token_ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        return decode(token_ids, self.tokenizer)

    def is_special(self, token_id: int) -> bool:
        return token_id in special_token_ids(self.tokenizer)

    def behind(self, messages: Sequence[Message]) -> str:
        """The text behind a turn that is followed by ``messages``, with the next generation prompt."""
        return self._behind({"role": "assistant", "content": WORD}, messages, generation_prompt=True)

    def behind_calls(self, names: Sequence[str], messages: Sequence[Message]) -> str:
        """As :meth:`behind`, of a turn that calls tools, ``names``: it begins with what closes the last call."""
        return self._behind(_calling(names, messages), messages, generation_prompt=True)

    def calls_end(self, names: Sequence[str], messages: Sequence[Message]) -> str:
        """What closes the last call of a turn that calls tools, and the turn, where nothing follows it."""
        return self._behind(_calling(names, messages), [], generation_prompt=False)

    def _behind(self, turn: ChatMessage, messages: Sequence[Message], *, generation_prompt: bool) -> str:
        rendered = self.text([_USER, turn, *messages], generation_prompt=generation_prompt)
        before, found, rest = rendered.rpartition(WORD)
        if not found or (WORD in before and not turn.get("tool_calls")):
            times = "leaves out" if not found else "repeats"
            raise BatchError(
                f"the chat template of {self.tokenizer.name_or_path} {times} what the model writes when "
                f"{', '.join(str(message['role']) for message in messages) or 'nothing'} follows"
            )
        return rest


def closing_length(token_ids: Sequence[int], end: int, renderer: ChatRenderer) -> int | None:
    """Tokens at the beginning of what is behind a turn that its sampled ``end`` stands for; None where it is another end."""
    # Some templates write white space before the token that ends a turn: the model wrote none.
    for place, token_id in enumerate(token_ids):
        if token_id == end:
            return place + 1
        if renderer.is_special(token_id) or renderer.decode([token_id]).strip():
            return None
    return None


def _calling(names: Sequence[str], messages: Sequence[Message]) -> ChatMessage:
    calls = []
    for index, name in enumerate(names):
        call: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": {"x": WORD}}}
        if index < len(messages) and "tool_call_id" in messages[index]:
            call["id"] = messages[index]["tool_call_id"]
        calls.append(call)
    return {"role": "assistant", "content": "", "tool_calls": calls}


type History = Literal["keep", "branch"]
"""What is done where the template would change the past: ``keep`` leaves it as it was sampled, so the episode stays one
sequence, with earlier thinking in it; ``branch`` gives the model what the template renders, which begins a new segment."""

_QUESTION = {"role": "user", "content": "What is 2+2?"}
_NEXT = {"role": "user", "content": "And Wk3question?"}
_RESULT = "Wk3result"
_ANSWER, _THOUGHT = "It is 4.", "\nhm\n</think>\n\nIt is 4."


@dataclass(frozen=True)
class HistoryCheck:
    """When a template changes the past, and whether results of tools can follow a turn given as text, or with its calls."""

    changes: Sequence[str] = ()
    results_behind_text: bool = False
    results_behind_calls: bool = False

    def choose(self, history: History | None, name: str) -> History:
        if self.changes and history is None:
            raise ConfigError.of(
                "history",
                None,
                f"the chat template of {name} does not leave earlier turns as they were sampled: {'; '.join(self.changes)}. "
                "Set keep (leave them: one sequence, which has all thinking) or branch (follow the template: a new "
                "sequence from each such turn on)",
            )
        return history or "keep"


def check_history(renderer: ChatRenderer) -> HistoryCheck:
    """Compares what is put behind turns with conversations that the template renders as a whole."""
    name = renderer.tokenizer.name_or_path
    try:
        changes = _changes_of_questions(renderer)
    except BatchError as error:
        raise ConfigError.of(
            "model", str(name), f"its chat template cannot be used for several turns: {error.message}"
        ) from error
    if not renderer.tools:
        return HistoryCheck(tuple(changes))
    tool = str(renderer.tools[0]["function"]["name"])
    behind_text, behind_calls = _results_behind_text(renderer, tool), _results_behind_calls(renderer, tool)
    if behind_text is behind_calls is None:
        raise ConfigError.of(
            "tools", [tool], f"the chat template of {name} does not render messages of the role tool; leave tools out"
        )
    # Calls that the template writes are what it expects; without them it is asked for turns as text.
    found = behind_calls if behind_calls is not None else behind_text
    return HistoryCheck(
        (*changes, *(found or ())),
        results_behind_text=behind_text is not None,
        results_behind_calls=behind_calls is not None,
    )


def _changes_of_questions(renderer: ChatRenderer) -> list[str]:
    thinks, thought = _answer(renderer, [_QUESTION])
    # Thinking is tried in every template: a model may think though its template does not ask for it.
    answers = {"an answer with thinking": thought if thinks else f"<think>{_THOUGHT}"}
    if not thinks:
        answers = {"an answer": _ANSWER, **answers}
    changes = []
    for kind, answer in answers.items():
        before = [_QUESTION, {"role": "assistant", "content": answer}]
        if not _same(renderer, [_QUESTION], before, answer, [_NEXT]):
            changes.append(f"{kind}, once a question follows it")
    return changes


def _results_behind_text(renderer: ChatRenderer, tool: str) -> list[str] | None:
    """Changes of the past, with turns given as text; None where the template does not take or show the result."""
    result = _result(tool)
    try:
        same = _same(renderer, [_QUESTION], [_QUESTION, {"role": "assistant", "content": _ANSWER}], _ANSWER, [result])
    except BatchError:
        return None
    return [] if same else ["a turn, once the result of a tool follows it"]


def _results_behind_calls(renderer: ChatRenderer, tool: str) -> list[str] | None:
    """The same with turns given with their calls."""
    changes: list[str] = []
    result = _result(tool)
    call = {"id": result["tool_call_id"], "type": "function", "function": {"name": tool, "arguments": {"x": "4"}}}
    calling: ChatMessage = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        rest = renderer.behind_calls([tool], [result])
        renderer.calls_end([tool], [result])
        if _RESULT not in rest:
            return None
        prompt = renderer.text([_QUESTION, calling, result])
        if not prompt.startswith(renderer.text([_QUESTION])):
            changes.append("a call of a tool, once its result follows it")
        before: list[ChatMessage] = [_QUESTION, calling, result]
        _, answer = _answer(renderer, before)
        if not _same(renderer, before, [*before, {"role": "assistant", "content": answer}], answer, [_NEXT]):
            changes.append("a call of a tool, once a question follows its result")
    except BatchError:
        return None
    return changes


def _same(
    renderer: ChatRenderer,
    prompt: Sequence[ChatMessage],
    answered: Sequence[ChatMessage],
    answer: str,
    following: Sequence[ChatMessage],
) -> bool:
    """Whether prompt, answer and what is put behind it are the whole conversation as the template renders it, as ids too."""
    rest = renderer.behind(following)
    if not all(str(message["content"]) in rest for message in following):
        roles = ", ".join(str(message["role"]) for message in following)
        raise BatchError(f"the chat template of {renderer.tokenizer.name_or_path} leaves out messages of the roles {roles}")
    whole = renderer.text([*answered, *following])
    token_ids, behind = renderer.encode(whole), renderer.encode(rest)
    return whole == renderer.text(prompt) + answer + rest and token_ids[-len(behind) :] == behind


def _answer(renderer: ChatRenderer, prompt: Sequence[ChatMessage]) -> tuple[bool, str]:
    """Whether the generation prompt begins the thinking, and an answer that fits."""
    opened = renderer.text(prompt).rstrip().endswith("<think>")
    return opened, _THOUGHT.lstrip("\n") if opened else _ANSWER


def _result(tool: str) -> ChatMessage:
    # Nine letters and digits: Mistral's templates refuse other ids.
    return {"role": "tool", "content": _RESULT, "name": tool, "tool_call_id": "abcdefgh1"}
