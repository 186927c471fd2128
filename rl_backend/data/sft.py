"""SFT examples: the token ids before each turn of the model, and those of the turn, which are trained.

A turn is rendered as the model meets it: the messages before it with the template's generation prompt, then the turn. A
template that rewrites earlier turns, as Qwen3's drops their thinking, gives a sequence for each turn; with others they share
one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import torch

from rl_backend.contracts import BatchError, ConfigError, TokenSequence
from rl_backend.data.chat_template import (
    ChatMessage,
    ChatTemplate,
    chat_template,
    decode,
    encode_answer,
    marks_answers,
    require_utf8,
    special_token_ids,
)
from rl_backend.data.examples import (
    DataConfig,
    Examples,
    Length,
    PromptExample,
    UntoldCalls,
    as_messages,
    cut_prompt,
    open_dataset,
    read_example,
    read_tools_file,
)

type TrainOn = Literal["all", "last"]


@dataclass(frozen=True)
class TrainedTokens:
    """A sequence, and which of its tokens, never the first, are imitated."""

    token_ids: list[int]
    trained: list[bool]

    @property
    def prompt_tokens(self) -> int:
        return self.trained.index(True)

    def cut(self, max_prompt_tokens: int, max_tokens: int, tokenizer: Any) -> Self:
        first = self.prompt_tokens
        prompt = cut_prompt(self.token_ids[:first], min(max_prompt_tokens, max_tokens - 1), tokenizer)
        token_ids = [*prompt, *self.token_ids[first:]][:max_tokens]
        return type(self)(token_ids, [*[False] * len(prompt), *self.trained[first:]][:max_tokens])

    def sequence(self) -> TokenSequence:
        mask = torch.tensor([*self.trained[1:], False], dtype=torch.float32)
        return TokenSequence(torch.tensor(self.token_ids, dtype=torch.int64), {"loss_mask": mask})


def load_sft_examples(
    path: Path | str,
    tokenizer: Any,
    max_prompt_tokens: int,
    max_tokens: int,
    data: DataConfig | None = None,
    *,
    positions: int | None = None,
    train_on: TrainOn = "all",
    held_out: bool = False,
) -> Examples[list[TokenSequence]]:
    """The examples of a data set, each with the sequences that it makes.

    Args:
        max_prompt_tokens: most tokens before the first that is trained.
        max_tokens: of a sequence.
        positions: of the model, which bound a sequence too; None where nothing limits it.
        train_on: of rows of ``messages``, all turns of the assistant or the last. Of other rows it is the answer.

    Raises:
        as :func:`~rl_backend.data.prompts.load_prompts`; ConfigError: the chat template ends no turn.
    """
    rows = open_dataset(path, held_out=held_out)
    data = data or DataConfig()
    tools, untold = read_tools_file(data), UntoldCalls()
    limit = "max_tokens_per_micro_batch", max_tokens, "raise it"
    if positions is not None and positions < max_tokens:
        limit = "the model's positions", positions, "shorten them"

    def make(index: int) -> tuple[list[TokenSequence], Sequence[Length]]:
        example = read_example(rows, index, data, tools, require_answer=data.answer_column is not None)
        where = rows.where(index)
        untold.add(example.messages, example.tools, where)
        try:
            found = example_tokens(example, tokenizer, data, train_on, where)
        except BatchError as error:
            raise BatchError(f"{where}: {error.message}") from error
        lengths = [Length(each.prompt_tokens, "max_prompt_tokens", max_prompt_tokens) for each in found]
        lengths += [Length(len(each.token_ids), *limit) for each in found]
        return [each.cut(max_prompt_tokens, limit[1], tokenizer).sequence() for each in found], lengths

    examples = Examples(rows, make, data.too_long, "example")
    untold.warn(rows.source, len(rows), data)
    return examples


def example_tokens(
    example: PromptExample, tokenizer: Any, data: DataConfig, train_on: TrainOn = "all", where: str = "example"
) -> list[TrainedTokens]:
    """What an example trains: the turns of the assistant in its messages, or the answer in a column."""
    messages = as_messages(example.prompt, data, where)
    answer = example.answer if data.answer_column is None else None
    if answer is None and example.ground_truth is not None:
        train_on = "last"
        if not isinstance(example.ground_truth, str):
            raise BatchError(f"the answer is {example.ground_truth!r}; SFT needs text")
        require_utf8(example.ground_truth, f"field {data.answer_column}" if data.answer_column else "the answer")
        answer = {"role": "assistant", "content": example.ground_truth}
    if messages is not None:
        turns = [*messages, answer] if answer else messages
        return conversation_tokens(
            turns,
            tokenizer,
            train_on,
            chat_template_kwargs=data.chat_template_kwargs,
            tools=example.tools,
            documents=example.documents,
        )
    if answer is None:
        raise BatchError("there is no answer to imitate; name its column with answer_column")
    prompt_ids, answer_ids = encode_answer(str(example.prompt), answer["content"], tokenizer)
    return [TrainedTokens([*prompt_ids, *answer_ids], [*[False] * len(prompt_ids), *[True] * len(answer_ids)])]


def conversation_tokens(
    messages: Sequence[ChatMessage],
    tokenizer: Any,
    train_on: TrainOn = "all",
    *,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
    documents: Sequence[Mapping[str, Any]] = (),
) -> list[TrainedTokens]:
    """The turns of the assistant in a conversation, each after what the model sees before it.

    A turn goes up to the token that ends it. Where the template marks with ``{% generation %}`` what the model writes, only
    that and the end token is trained. There is one sequence for as many turns as the template leaves as they were when the
    next is made.

    Raises:
        ConfigError: the template ends no turn with a special token.
        BatchError: no turn, or one of the end token alone, or the template refuses the messages or does not render a turn as
            an answer to its own prompt.
    """
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns or not turns[0]:
        raise BatchError("messages need a turn of the assistant, and one before it; there is nothing to imitate")
    template = ChatTemplate(tokenizer, chat_template_kwargs or {}, tools, documents)
    found: list[TrainedTokens] = []
    for turn in turns if train_on == "all" else turns[-1:]:
        prompt, response, trained = _turn(messages[: turn + 1], template)
        # Joined to the sequence before where the template has left that as it was.
        begun = found.pop() if found and prompt[: len(found[-1].token_ids)] == found[-1].token_ids else TrainedTokens([], [])
        between = len(prompt) - len(begun.token_ids)
        found.append(TrainedTokens([*prompt, *response], [*begun.trained, *[False] * between, *trained]))
    return found


def _turn(messages: Sequence[ChatMessage], template: ChatTemplate) -> tuple[list[int], list[int], list[bool]]:
    tokenizer = template.tokenizer
    before = template.render(messages[:-1])
    whole = template.render(messages, generation_prompt=False)
    if not whole.startswith(before):
        raise BatchError(
            f"the chat template of {tokenizer.name_or_path} does not render message {len(messages)} as an answer to its own "
            f"generation prompt, which ends with {before[-40:]!r}; change chat_template_kwargs, the message or the template"
        )
    template.require_calls(messages, whole, generation_prompt=False, since=len(messages) - 1)
    prompt: list[int] = tokenizer.encode(before, add_special_tokens=False)
    response: list[int] = tokenizer.encode(whole, add_special_tokens=False)
    shared = response[: len(prompt)] == prompt
    # A token over the border of prompt and answer is none that the model could have written.
    response = response[len(prompt) :] if shared else tokenizer.encode(whole[len(before) :], add_special_tokens=False)
    if not shared and _spaces(tokenizer.convert_ids_to_tokens(response)) > _spaces(whole[len(before) :]):
        raise BatchError(
            f"message {len(messages)} begins with {whole[len(before) :][:20]!r}, which the tokenizer joins with the end of "
            f"the prompt, {before[-20:]!r}, and gives a space where it stands alone; begin it with another text"
        )
    end = _end(response, messages[-1], whole, tokenizer)
    if end is None or decode(response[end + 1 :], tokenizer, special=False).strip():
        raise ConfigError.of(
            "model",
            str(tokenizer.name_or_path),
            f"its chat template ends a turn of the assistant with {whole[-20:]!r}, without a special token: a model trained "
            "on it would never end a turn; end turns with the tokenizer's eos_token, or with another special token",
        )
    written = response[: end + 1]
    if not decode(written[:-1], tokenizer).strip():
        raise BatchError(
            f"message {len(messages)} has nothing to imitate but the token that ends it: it is empty, or the chat template "
            f"of {tokenizer.name_or_path} leaves out {' and '.join(sorted(set(messages[-1]) - {'role'}))}; remove the row"
        )
    # The model would learn to write the end twice.
    if written[-1] == written[-2]:
        raise BatchError(
            f"message {len(messages)} ends with {tokenizer.convert_ids_to_tokens(written[-1])}, which the chat template of "
            f"{tokenizer.name_or_path} writes behind it too; leave it out of the message"
        )
    trained = [True] * len(written)
    if marks_answers(chat_template(tokenizer)):
        text = whole if shared else whole[len(before) :]
        marked = _marked(text, len(whole), _marked_spans(template, messages), tokenizer)
        trained = [each or index == end for index, each in enumerate(marked[-len(response) :][: end + 1])]
        if not any(trained[:end]):
            raise BatchError(
                f"the chat template of {tokenizer.name_or_path} marks nothing of message {len(messages)} as generated; put "
                "{% generation %} around all that the model writes"
            )
    return prompt, written, trained


def _marked_spans(template: ChatTemplate, messages: Sequence[ChatMessage]) -> list[tuple[int, int]]:
    # Imported here: it takes seconds, and few templates have marks.
    from transformers.utils.chat_template_utils import render_jinja_template

    _, (spans,) = render_jinja_template(
        conversations=[[dict(message) for message in messages]],
        chat_template=chat_template(template.tokenizer),
        return_assistant_tokens_mask=True,
        **{**template.tokenizer.special_tokens_map, **template.inputs()},
    )
    return list(spans)


def _spaces(text: str | Sequence[str]) -> int:
    joined = "".join(text)
    return len(joined) - len(joined.lstrip(" \u2581\u0120"))


def _end(response: Sequence[int], message: ChatMessage, whole: str, tokenizer: Any) -> int | None:
    """Place of the token that ends a turn: the first special one behind its content, else the last."""
    special = special_token_ids(tokenizer)
    places = [index for index, token in enumerate(response) if token in special]
    content = (message["content"] or "").strip()
    if content in whole and not message.get("tool_calls"):
        behind = tokenizer.encode(whole[whole.rindex(content) + len(content) :], add_special_tokens=False)
        if behind and list(response[-len(behind) :]) == behind:
            places = [index for index in places if index >= len(response) - len(behind)][:1]
    return places[-1] if places else None


def _marked(text: str, length: int, spans: Sequence[tuple[int, int]], tokenizer: Any) -> list[bool]:
    """Of each token of ``text``, with which the rendered messages of ``length`` characters end: whether a span has of it."""
    skipped = length - len(text)
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    return [any(start + skipped < stop and first < end + skipped for first, stop in spans) for start, end in offsets]
