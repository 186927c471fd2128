"""Chat templates: texts and messages as token ids, the same in rollouts, SFT and evaluation."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.meta

from rl_backend.contracts import BatchError, ConfigError, UnsupportedError

type ChatMessage = dict[str, Any]

TEXT_ALONE = "models are sampled and trained with text alone; leave out images, video and audio"

_SET_BY_US: Mapping[str, str] = {
    "messages": "are the row's; name their column with prompt_column",
    "tools": "belong in the rows, in the column that tools_column names, or for all rows in tools_file",
    "documents": "belong in the rows, in the column that documents_column names",
    "add_generation_prompt": "follows from what is rendered; leave it out",
}
_CLOCK = "strftime_now"
_ANSWER = "The answer is 4."
_MEDIA = ("image", "video", "audio")
_MARKER = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")


def encode_text(text: str, tokenizer: Any) -> list[int]:
    """The tokens of a text that continues, with what the tokenizer puts before one, such as a begin-of-text token, once."""
    # What the tokenizer puts behind a text, as some put an end, is left out: the model continues it.
    own, whole = tokenizer.encode(text, add_special_tokens=False), tokenizer.encode(text)
    found = next((place for place in range(len(whole) + 1) if whole[place : place + len(own)] == own), None)
    if found is None:
        problem = f"its tokenizer splits {text[:20]!r} in two ways, {own} and {whole}"
        raise ConfigError.of("model", str(tokenizer.name_or_path), problem)
    # A text that has its begin-of-text token already, as prompts of data sets do, does not get a second one.
    begins = whole[:found]
    has = next(length for length in range(len(begins), -1, -1) if own[:length] == begins[len(begins) - length :])
    bos = tokenizer.bos_token
    if begins and not has and bos and text.startswith(bos):  # which some tokenizers read as text
        return encode_text(text.removeprefix(bos), tokenizer)
    return [*begins, *own[has:]]


def encode_answer(prompt: str, answer: str, tokenizer: Any) -> tuple[list[int], list[int]]:
    """The tokens of a text prompt, and of the answer that follows it, which ends with the end-of-text token, once."""
    if answer.rstrip().endswith(tokenizer.eos_token):
        answer = answer.rstrip().removesuffix(tokenizer.eos_token)
    # Together: many tokenizers put a space before an answer that stands alone.
    before, whole = encode_text(prompt, tokenizer), encode_text(prompt + answer, tokenizer)
    if whole[: len(before)] != before:
        same = next(place for place, token in enumerate(before) if whole[place : place + 1] != [token])
        alone, both = (tokenizer.convert_ids_to_tokens(ids[same : same + 4]) for ids in (before, whole))
        raise BatchError(
            f"the prompt ends with {prompt[-20:]!r}, the answer begins with {answer[:20]!r}, and their tokens cannot be "
            f"told apart: the prompt alone has {alone} where both together have {both}, so no rollout would come to this "
            "answer; let the answer, not the prompt, have the white space between them, or set text_prompts to message"
        )
    if len(whole) == len(before):
        raise BatchError("the answer has no tokens but its end; there is nothing to imitate")
    return before, [*whole[len(before) :], tokenizer.eos_token_id]


def decode(token_ids: Sequence[int], tokenizer: Any, *, special: bool = True) -> str:
    # Some tokenizers' clean_up_tokenization_spaces takes spaces out of a text.
    text: str = tokenizer.decode(list(token_ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False)
    return text


def encode_messages(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    *,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] = (),
    documents: Sequence[Mapping[str, Any]] = (),
) -> list[int]:
    """The tokens of a conversation by the tokenizer's chat template::

        encode_messages([{"role": "user", "content": "2+2?"}], tokenizer)

    Args:
        messages: at least one, each with ``role`` and ``content``, and what else the template reads.
        chat_template_kwargs: variables of the template, such as ``{"enable_thinking": False}``. ``strftime_now`` is the day
            that a template writes as today's, such as ``"2026-01-31"``.
        generation_prompt: ends with what begins the assistant's next turn.
        tools: JSON schemas of functions that the model may call, as ``{"type": "function", "function": {...}}``.
        documents: what the model is to answer from, such as ``{"title": "...", "text": "..."}``.

    Raises:
        ConfigError: the tokenizer has no chat template, or the template does not read one of the variables, the tools or the
            documents; or it asks for today's date, and ``strftime_now`` is not given.
        BatchError: the template refuses the messages, leaves out their calls of tools, or writes the word None or null in
            place of content that is null.
        UnsupportedError: a message with images, video or audio.
    """
    template = ChatTemplate(tokenizer, chat_template_kwargs or {}, tools, documents)
    text = template.render(messages, generation_prompt=generation_prompt)
    template.require_calls(messages, text, generation_prompt=generation_prompt)
    token_ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return token_ids


def require_text(content: Any, place: str) -> None:
    """Raises :class:`UnsupportedError` for a message's content with images, video or audio."""
    for index, part in enumerate(content if isinstance(content, list) else ()):
        named = [name for name, value in part.items() if value is not None] if isinstance(part, Mapping) else []
        kinds = [str(part.get("type", "")), *named] if named else []
        found = next((kind for kind in kinds if any(medium in kind for medium in _MEDIA)), None)
        if found is not None:
            raise UnsupportedError(f"{place}.content[{index}] is a part with {found!r}: {TEXT_ALONE}", name=found)


def require_utf8(value: Any, place: str) -> None:
    """Raises :class:`BatchError` for half of a surrogate pair, which JSON can have, in a text or in what has texts."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise BatchError(
                f"{place}: character {error.start + 1} is {value[error.start]!r}, half of a surrogate pair, which UTF-8 "
                "cannot write; put the whole character there, or remove it"
            ) from None
    for name, each in value.items() if isinstance(value, Mapping) else ():
        require_utf8(each, f"{place}.{name}")
    for index, each in enumerate(value if isinstance(value, list | tuple) else ()):
        require_utf8(each, f"{place}[{index}]")


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer's chat template with its variables, and the tools and documents that it shows; errors are those of
    :func:`encode_messages`.
    """

    tokenizer: Any
    variables: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] = ()
    documents: Sequence[Mapping[str, Any]] = ()

    def render(self, messages: Sequence[Mapping[str, Any]], *, generation_prompt: bool = True) -> str:
        """The text whose tokens :func:`encode_messages` returns; calls may be left out of it."""
        for index, message in enumerate(messages):
            require_text(message.get("content"), f"messages[{index}]")
        inputs, name = self.inputs(), self.tokenizer.name_or_path

        def rendered(turns: Sequence[Mapping[str, Any]]) -> str:
            text: str = self.tokenizer.apply_chat_template(
                [dict(turn) for turn in turns], tokenize=False, add_generation_prompt=generation_prompt, **inputs
            )
            return text

        nulls = [index for index, message in enumerate(messages) if message.get("content", "") is None]
        try:
            text = rendered(messages)
            # Rendered with '' too: a template that writes the word None for null would train it.
            without = rendered([{**message, "content": message["content"] or ""} for message in messages]) if nulls else text
        except ConfigError:  # of the clock
            raise
        except Exception as error:  # a template is a program, which may raise anything on messages that it does not expect
            roles = ", ".join(str(message.get("role")) for message in messages)
            null = (
                f"; the content of message {nulls[0] + 1} is null: if that is why, give it the content ''" if nulls else ""
            )
            raise BatchError(
                f"the chat template of {name} refuses messages of the roles {roles}: {type(error).__name__}: {error}{null}"
            ) from error
        word = next((word for word in ("None", "null") if text.count(word) > without.count(word)), None)
        if word is not None:
            raise BatchError(
                f"the chat template of {name} writes the word {word} for the content of message {nulls[0] + 1}, which is "
                "null; give it the content ''"
            )
        return text

    def require_calls(
        self, messages: Sequence[Mapping[str, Any]], text: str, *, generation_prompt: bool = True, since: int = 0
    ) -> None:
        """Raises :class:`BatchError` for messages, from ``since`` on, whose calls leave no trace in their ``text``."""
        calling = [index for index, message in enumerate(messages) if index >= since and message.get("tool_calls")]
        if not calling:
            return
        # Rendered without the calls: where the text is the same, the template has left them out.
        bare = list(messages)
        for index in calling:
            kept = {name: value for name, value in messages[index].items() if name != "tool_calls"}
            bare[index] = kept | {"content": kept.get("content") or ""}
        try:
            without = self.render(bare, generation_prompt=generation_prompt)
        except BatchError:  # a template that asks for the calls writes them
            return
        if without == text:
            raise BatchError(
                f"the chat template of {self.tokenizer.name_or_path} leaves out tool_calls of message {calling[0] + 1}; use "
                "a model whose template writes calls, or write them into the content"
            )

    def turn_end(self, messages: Sequence[Mapping[str, Any]]) -> int | None:
        """The special token with which an answer to ``messages`` ends; None where it ends without one."""
        text = self.render([*messages, {"role": "assistant", "content": _ANSWER}], generation_prompt=False)
        # The template's own end: eos_token is another token in many models.
        behind: list[int] = self.tokenizer.encode(text.rpartition(_ANSWER)[2], add_special_tokens=False)
        return next((token for token in behind if token in special_token_ids(self.tokenizer)), None)

    def inputs(self) -> dict[str, Any]:
        read, whose = (
            template_variables(chat_template(self.tokenizer)),
            f"the chat template of {self.tokenizer.name_or_path}",
        )
        variables = dict(self.variables)
        wrong: list[tuple[str, Any, str]] = []
        for name, value in variables.items():
            if name in _SET_BY_US:
                wrong.append((f"chat_template_kwargs.{name}", value, f"is no option: {name} {_SET_BY_US[name]}"))
            elif name not in read:
                known = ", ".join(sorted(read - set(_SET_BY_US) - set(self.tokenizer.special_tokens_map))) or "no others"
                wrong.append((f"chat_template_kwargs.{name}", value, f"{whose} does not read it; it reads {known}"))
        if self.tools and "tools" not in read:
            problem = (
                f"{whose} does not read them: the model is not told what it may call; use a model whose template does, or "
                "describe the tools in a system message and set tools_column to none"
            )
            wrong.append(("tools", [tool_name(tool) for tool in self.tools], problem))
        if self.documents and "documents" not in read:
            problem = (
                f"{whose} does not read them: the model is not shown them; put them into a message and set documents_column "
                "to none, or use a model whose template does"
            )
            wrong.append(("documents", list(self.documents)[:1], problem))
        ConfigError.refuse_all(wrong)
        if _CLOCK in read:
            variables[_CLOCK] = _clock(variables.get(_CLOCK), whose)
        return {
            "tools": [dict(tool) for tool in self.tools] or None,
            "documents": [dict(document) for document in self.documents] or None,
            **variables,
        }


def tool_name(tool: Mapping[str, Any]) -> str:
    """The name in a JSON schema of a function or in a call of one, below ``function`` or not."""
    function = tool.get("function", tool)
    return str(function.get("name") if isinstance(function, Mapping) else function)


def _clock(given: Any, whose: str) -> Callable[[str], str]:
    option = f"chat_template_kwargs.{_CLOCK}"
    try:
        now = None if given is None else datetime.fromisoformat(str(given))
    except ValueError as error:
        raise ConfigError.of(option, given, f"is no day, {error}; give one such as 2026-01-31") from None

    def strftime_now(form: str) -> str:
        if now is None:
            raise ConfigError.of(
                option,
                None,
                f"{whose} writes today's date, so rows would be other tokens on another day; give the day that it writes, "
                f'as in --chat-template-kwargs \'{{"{_CLOCK}": "{date.today().isoformat()}"}}\', and give the same when the '
                "run is resumed and its model evaluated",
            )
        return now.strftime(form)

    return strftime_now


def chat_template(tokenizer: Any) -> str:
    """The Jinja text of a tokenizer's default chat template; raises :class:`ConfigError` where it has none."""
    named = tokenizer.chat_template
    found = named.get("default") if isinstance(named, Mapping) else named
    if found is None:
        raise ConfigError.of(
            "model",
            str(tokenizer.name_or_path),
            "its tokenizer has no chat template, which messages need: tokenizer_config.json has no chat_template, and there "
            "is no chat_template.jinja; add that file, from a model whose chats look the same, or give prompts as text",
        )
    return str(found)


@lru_cache(maxsize=16)
def template_variables(template: str) -> frozenset[str]:
    """The variables that a chat template reads and does not set itself."""
    # As transformers makes it; its generation marks are no Jinja, and set no variable.
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        tree = environment.parse(_MARKER.sub("", template))
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"the chat template is not Jinja, line {error.lineno}: {error.message}; repair it") from None
    return frozenset(jinja2.meta.find_undeclared_variables(tree))


def marks_answers(template: str) -> bool:
    """Whether a chat template says with ``{% generation %}`` which of its text the model writes."""
    return _MARKER.search(template) is not None


@lru_cache(maxsize=4)
def special_token_ids(tokenizer: Any) -> frozenset[int]:
    added = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset({*tokenizer.all_special_ids, *added})


@lru_cache(maxsize=4)
def known_token_ids(tokenizer: Any) -> frozenset[int]:
    """Ids that a tokenizer has a token for. A model often has more: its vocabulary is filled up to a round number."""
    return frozenset({*tokenizer.get_vocab().values(), *tokenizer.added_tokens_decoder})
