"""A conversation as token ids: the prompt after each of the model's turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal

from rl_backend.contracts import EpisodeEndError
from rl_backend.environment.protocol import Finish, Message
from rl_backend.environment.rendering import ChatRenderer, History, HistoryCheck, check_history, closing_length

type OtherEnd = Literal["replace", "keep"]
"""What is done with a sampled stop token with which the template does not end a turn: ``replace`` writes the template's own
end in its place, which begins a new segment; ``keep`` leaves the sampled one in the place of the template's."""


@dataclass(frozen=True)
class ChatFormat:
    """How a run's conversations become ids. ``check`` is what the template does with the past, ``history`` what is done."""

    renderer: ChatRenderer
    check: HistoryCheck
    history: History
    other_end: OtherEnd
    stop_token_ids: Sequence[int]


def chat_format(
    renderer: ChatRenderer,
    *,
    history: History | None = None,
    other_end: OtherEnd = "replace",
    stop_token_ids: Sequence[int] = (),
) -> ChatFormat:
    """Checks a model's template, and how it ends turns; ``stop_token_ids`` are beside those of tokenizer and template."""
    check = check_history(renderer)
    chosen = check.choose(history, str(renderer.tokenizer.name_or_path))
    stops = dict.fromkeys([renderer.tokenizer.eos_token_id, *_ends(renderer, check), *stop_token_ids])
    return ChatFormat(renderer, check, chosen, other_end, tuple(stops))


def id_format(renderer: ChatRenderer, stop_token_ids: Sequence[int] = ()) -> ChatFormat:
    stops = dict.fromkeys([renderer.tokenizer.eos_token_id, *stop_token_ids])
    return ChatFormat(renderer, HistoryCheck(), "keep", "replace", tuple(stops))


@dataclass
class Conversation:
    """The messages of one episode, and the ids that the model has been given and has sampled.

    ``format`` is that of ids until there are messages; ``branches`` counts how often the past was rendered anew.
    """

    format: ChatFormat
    messages: list[Message] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    branches: int = 0
    _text: str = ""
    _end: int | None = None
    _ends_as_text: bool = False

    def start(self, messages: Sequence[Message]) -> list[int]:
        self.messages = list(messages)
        return self._render()

    def start_with_ids(self, token_ids: Sequence[int]) -> list[int]:
        self.messages, self.token_ids = [], list(token_ids)
        self._text = self.format.renderer.decode(token_ids)
        return self.token_ids

    def add_turn(self, token_ids: Sequence[int], finish: Finish) -> str:
        """Adds what the model sampled, and returns its text, without the special token that ended it."""
        # A turn that a stop string ended has no end token: its last one is text, as that of a stop token may be.
        special = self.format.renderer.is_special(token_ids[-1])
        stopped = finish == "stop" and (special or token_ids[-1] in self.format.stop_token_ids)
        self._end, self._ends_as_text = token_ids[-1] if stopped else None, stopped and not special
        self.token_ids = [*self.token_ids, *token_ids]
        written = self.format.renderer.decode(token_ids[:-1] if stopped and special else token_ids)
        self._text += written
        self.messages.append({"role": "assistant", "content": written})
        return written

    def go_on(self, messages: Sequence[Message], answered: Message | None = None) -> list[int]:
        """The ids of the next prompt.

        ``answered`` is the model's turn as it was parsed, if ``messages`` begin with results of its calls. Raises
        :class:`EpisodeEndError` where the template has no place for results behind a turn that ended so.
        """
        renderer = self.format.renderer
        called = [str(call["function"]["name"]) for call in (answered or {}).get("tool_calls", ())]
        if answered is not None and called and not self.format.check.results_behind_text:
            self.messages[-1] = answered
        behind = self._behind(messages, called)
        self.messages += messages
        if self.format.history == "branch":
            # The template may have rewritten earlier turns, as Qwen3's drops their thinking.
            whole = renderer.text(self.messages)
            if whole != self._text + behind.text:
                self.branches += 1
                return self._render(whole)
        self.token_ids = [*(self.token_ids[:-1] if behind.replaces_end else self.token_ids), *behind.token_ids]
        self._text += behind.text
        return self.token_ids

    def _render(self, text: str | None = None) -> list[int]:
        self._text = self.format.renderer.text(self.messages) if text is None else text
        self.token_ids = self.format.renderer.encode(self._text)
        return self.token_ids

    def _behind(self, messages: Sequence[Message], called: Sequence[str]) -> _Behind:
        renderer, check, end = self.format.renderer, self.format.check, self._end
        if called and end is not None and check.results_behind_calls:
            text, closing = renderer.behind_calls(called, messages), renderer.calls_end(called, messages)
            token_ids = renderer.encode(text)
            # The end of the calls, or the marker that follows them in templates without one.
            pairs = zip(token_ids, renderer.encode(closing), strict=False)
            most = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) + 1
            if end in token_ids[:most]:
                _, found, after = text.partition(renderer.decode([end]))
                return _Behind(token_ids[token_ids.index(end) + 1 :], after if self._ends_as_text else found + after)
        if called and not check.results_behind_text:
            raise EpisodeEndError(
                f"a turn that calls tools {'was cut' if end is None else f'ended with {renderer.decode([end])}'}, and the "
                f"chat template of {renderer.tokenizer.name_or_path} has no place for results behind that",
                stop="length" if end is None else "parse",
            )
        text = renderer.behind(messages)
        token_ids = renderer.encode(text)
        if end is None or self._ends_as_text:
            return _Behind(token_ids, text)
        length = closing_length(token_ids, end, renderer)
        if length is not None:
            return _Behind(token_ids[length:], text)
        if self.format.other_end == "replace":
            return _Behind(token_ids, text, replaces_end=True)
        own = next((place for place, each in enumerate(token_ids) if renderer.is_special(each)), -1)
        return _Behind(token_ids[own + 1 :], text)


@dataclass(frozen=True)
class _Behind:
    """What comes behind what the model sampled; with ``replaces_end`` in place of the last sampled token."""

    token_ids: list[int]
    text: str
    replaces_end: bool = False


def _ends(renderer: ChatRenderer, check: HistoryCheck) -> list[int]:
    """Tokens with which the template ends turns: the first special one behind an answer, and the last of a call's end."""
    question = {"role": "user", "content": "x"}
    found = [next((each for each in renderer.encode(renderer.behind([question])) if renderer.is_special(each)), None)]
    if check.results_behind_calls:
        tool = str(renderer.tools[0]["function"]["name"])
        result = {"role": "tool", "content": "x", "name": tool, "tool_call_id": "abcdefgh1"}
        closing = [each for each in renderer.encode(renderer.calls_end([tool], [result])) if renderer.is_special(each)]
        behind = [each for each in renderer.encode(renderer.behind_calls([tool], [result])) if renderer.is_special(each)]
        found.append([*closing[-1:], *behind[:1]][0] if closing or behind else None)
    return [each for each in found if each is not None]
