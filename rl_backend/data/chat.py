"""The renderer: texts and chat messages become the token ids that a model sees, the same in rollouts, SFT and evaluation."""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.meta

from rl_backend.contracts import BatchError, ConfigError, UnsupportedError

type ChatMessage = dict[str, Any]

TEXT_ALONE = "models are sampled and trained with text alone; leave out images, video and audio"

_SET_BY_US = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_ANSWER = "The answer is 4."
_MEDIA = ("image", "video", "audio")
_MARKER = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")


def encode_text(text: str, tokenizer: Any) -> list[int]:
    """The tokens of a text that continues: with what the tokenizer puts before a text, such as its begin-of-text token.

    A text that begins with these tokens does not get them twice. What the tokenizer puts behind a text is left out.

    Raises:
        ConfigError: the tokenizer has other tokens for the text where it puts some before it.
    """
    own, whole = tokenizer.encode(text, add_special_tokens=False), tokenizer.encode(text)
    found = next((place for place in range(len(whole) + 1) if whole[place : place + len(own)] == own), None)
    if found is None:
        problem = f"its tokenizer splits {text[:20]!r} in two ways, {own} and {whole}"
        raise ConfigError.of("model", str(tokenizer.name_or_path), problem)
    begins = whole[:found]
    has = next(length for length in range(len(begins), -1, -1) if own[:length] == begins[len(begins) - length :])
    bos = tokenizer.bos_token
    if begins and not has and bos and text.startswith(bos):  # which some tokenizers read as text
        return encode_text(text.removeprefix(bos), tokenizer)
    return [*begins, *own[has:]]


def encode_answer(prompt: str, answer: str, tokenizer: Any) -> tuple[list[int], list[int]]:
    """The tokens of a text prompt, and of the answer that follows it, which ends with the end-of-text token, once.

    The answer's tokens are those that both texts together have behind the prompt's. Alone, many tokenizers would put a space
    before it.

    Raises:
        BatchError: prompt and answer together do not begin with the tokens of the prompt, or the answer has no tokens.
    """
    if answer.rstrip().endswith(tokenizer.eos_token):
        answer = answer.rstrip().removesuffix(tokenizer.eos_token)
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
    """The text of tokens, as they stand: no tokenizer's ``clean_up_tokenization_spaces`` takes spaces out of it.

    Args:
        special: with special tokens.
    """
    text: str = tokenizer.decode(list(token_ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False)
    return text


def encode_messages(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    *,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[int]:
    """The tokens of a conversation by the tokenizer's chat template::

        encode_messages([{"role": "user", "content": "2+2?"}], tokenizer)

    Args:
        messages: at least one, each with ``role`` and ``content``, and what else the template reads.
        tokenizer: of Hugging Face, with a chat template; see :func:`~rl_backend.data.prompts.load_tokenizer`.
        chat_template_kwargs: variables of the template, such as ``{"enable_thinking": False}``.
        generation_prompt: ends with what begins the assistant's next turn.
        tools: JSON schemas of functions that the model may call, as ``{"type": "function", "function": {...}}``.

    Raises:
        ConfigError: the tokenizer has no chat template, or the template does not read one of the variables, or the tools.
        BatchError: the template refuses the messages.
        UnsupportedError: a message with images, video or audio.
    """
    text = render_messages(
        messages,
        tokenizer,
        chat_template_kwargs=chat_template_kwargs,
        generation_prompt=generation_prompt,
        tools=tools,
    )
    token_ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return token_ids


def require_text(content: Any, place: str) -> None:
    """Refuses a message with images, video or audio, which a chat template would turn into tokens that stand for nothing.

    Args:
        content: of a message; a list has parts of several types.
        place: of the message, for the error.

    Raises:
        UnsupportedError: names the part and its type.
    """
    for index, part in enumerate(content if isinstance(content, list) else ()):
        named = [name for name, value in part.items() if value is not None] if isinstance(part, Mapping) else []
        kinds = [str(part.get("type", "")), *named] if named else []
        found = next((kind for kind in kinds if any(medium in kind for medium in _MEDIA)), None)
        if found is not None:
            raise UnsupportedError(f"{place}.content[{index}] is a part with {found!r}: {TEXT_ALONE}", name=found)


def require_utf8(value: Any, place: str) -> None:
    """Refuses half of a surrogate pair, which JSON can have and tokenizers cannot read, in a text or in what has texts.

    Args:
        place: of the value, for the error.

    Raises:
        BatchError: names place and character.
    """
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


def render_messages(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    *,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    """The text whose tokens :func:`encode_messages` returns; arguments and errors as there."""
    for index, message in enumerate(messages):
        require_text(message.get("content"), f"messages[{index}]")
    template, variables = chat_template(tokenizer), dict(chat_template_kwargs or {})
    unread = sorted(set(variables) - template_variables(template))
    if unread:
        known = (
            ", ".join(sorted(template_variables(template) - _SET_BY_US - set(tokenizer.special_tokens_map))) or "no others"
        )
        raise ConfigError.of(
            f"chat_template_kwargs.{unread[0]}",
            variables[unread[0]],
            f"the chat template of {tokenizer.name_or_path} does not read it; it reads {known}",
        )
    if tools and "tools" not in template_variables(template):
        raise ConfigError.of(
            "tools",
            [tool["function"]["name"] for tool in tools],
            f"the chat template of {tokenizer.name_or_path} does not read them: the model is not told what it may call; use "
            "a model whose template does, or describe the tools in a system message",
        )
    try:
        text: str = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=[dict(tool) for tool in tools] or None,
            tokenize=False,
            add_generation_prompt=generation_prompt,
            **variables,
        )
    except Exception as error:  # a template is a program, which may raise anything on messages that it does not expect
        roles = ", ".join(str(message.get("role")) for message in messages)
        raise BatchError(
            f"the chat template of {tokenizer.name_or_path} refuses messages of the roles {roles}: "
            f"{type(error).__name__}: {error}"
        ) from error
    return text


def chat_template(tokenizer: Any) -> str:
    """The Jinja text of a tokenizer's default chat template.

    Raises:
        ConfigError: it has none.
    """
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
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        tree = environment.parse(_MARKER.sub("", template))
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"the chat template is not Jinja, line {error.lineno}: {error.message}; repair it") from None
    return frozenset(jinja2.meta.find_undeclared_variables(tree))


def marks_answers(template: str) -> bool:
    """Whether a chat template says with ``{% generation %}`` which of its text the model writes."""
    return _MARKER.search(template) is not None


def turn_end(
    messages: Sequence[Mapping[str, Any]], tokenizer: Any, *, chat_template_kwargs: Mapping[str, Any] | None = None
) -> int | None:
    """The special token with which the chat template ends an answer to ``messages``; None where it ends it without one."""
    text = render_messages(
        [*messages, {"role": "assistant", "content": _ANSWER}],
        tokenizer,
        chat_template_kwargs=chat_template_kwargs,
        generation_prompt=False,
    )
    behind: list[int] = tokenizer.encode(text.rpartition(_ANSWER)[2], add_special_tokens=False)
    return next((token for token in behind if token in special_token_ids(tokenizer)), None)


@lru_cache(maxsize=4)
def special_token_ids(tokenizer: Any) -> frozenset[int]:
    """Ids of a tokenizer's special tokens, with those that have no role of their own."""
    added = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset({*tokenizer.all_special_ids, *added})


@lru_cache(maxsize=4)
def known_token_ids(tokenizer: Any) -> frozenset[int]:
    """Ids that a tokenizer has a token for. A model often has more: its vocabulary is filled up to a round number."""
    return frozenset({*tokenizer.get_vocab().values(), *tokenizer.added_tokens_decoder})
