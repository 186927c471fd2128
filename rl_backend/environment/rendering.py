"""Renders the messages that follow a turn of the model as token ids, without rendering the past again.

Dummy messages with a unique word in the model's place are rendered together with the new ones, and what follows the word is
encoded alone. So the ids of the past stay as they were sampled, and the new ones are what the template makes of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rl_backend.contracts import BatchError
from rl_backend.data.chat import ChatMessage, decode, render_messages, special_token_ids
from rl_backend.environment.episode import Message

WORD = "Zq7sentinel"
"""Stands for what the model wrote. No template treats a word by itself."""
_USER = {"role": "user", "content": "x"}


@dataclass(frozen=True)
class ChatRenderer:
    """A tokenizer's chat template, with its variables and the tools that it shows.

    Attributes:
        tokenizer: of Hugging Face.
        chat_template_kwargs: variables of the template.
        tools: JSON schemas of functions.
    """

    tokenizer: Any
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] = ()

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> ChatRenderer:
        return replace(self, tools=tuple(tools))

    def text(self, messages: Sequence[Message], *, generation_prompt: bool = True) -> str:
        """Raises :class:`BatchError` where the template refuses the messages."""
        return render_messages(
            messages,
            self.tokenizer,
            chat_template_kwargs=self.chat_template_kwargs,
            generation_prompt=generation_prompt,
            tools=self.tools,
        )

    def encode(self, text: str) -> list[int]:
        token_ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text, with special tokens."""
        return decode(token_ids, self.tokenizer)

    def is_special(self, token_id: int) -> bool:
        return token_id in special_token_ids(self.tokenizer)

    def behind(self, messages: Sequence[Message]) -> str:
        """The text behind a turn that is followed by ``messages``, with the next generation prompt.

        Raises:
            BatchError: the template refuses the messages, or changes or repeats what the model writes.
        """
        return self._behind({"role": "assistant", "content": WORD}, messages, generation_prompt=True)

    def behind_calls(self, names: Sequence[str], messages: Sequence[Message]) -> str:
        """As :meth:`behind`, of a turn that calls tools: it begins with what closes the last call.

        Args:
            names: of the tools that are called, in order.
            messages: what they answered, in the same order, and what follows.
        """
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
    """Tokens at the beginning of what is behind a turn that its sampled ``end`` stands for; None where it is another end.

    Some templates write white space before the token that ends a turn: the model wrote none.
    """
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
