"""Prompts: data sets as token ids, and the order in which training sees them."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_backend.contracts import BatchError, ConfigError
from rl_backend.data.chat_template import ChatMessage, encode_messages, encode_text
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
    warn_of_padding,
)
from rl_backend.data.hub import local_model

_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_ADD = "add tokenizer.json and tokenizer_config.json, from the model that this one was made of"


@dataclass(frozen=True)
class Prompt:
    """An example with its tokens."""

    example: PromptExample
    token_ids: list[int]


def load_tokenizer(model: str) -> Any:
    """The tokenizer of a local directory or a model on the Hub; :class:`ConfigError` without one that ends texts."""
    folder = local_model(model)
    # Imported here: it takes seconds, and reading a command line needs none of it.
    from transformers import AutoTokenizer

    problem = ""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # noqa: BLE001, a damaged file of a tokenizer raises any type in transformers
        problem = (
            f"has no tokenizer that can be loaded, {type(error).__name__}: {' '.join(str(error).split())}; check "
            "tokenizer.json and tokenizer_config.json"
        )
        if not any((Path(folder) / name).is_file() for name in _VOCABULARIES):
            problem = f"has no tokenizer (none of {', '.join(_VOCABULARIES)}); {_ADD}"
    else:
        # Without its files transformers makes one of the class that config.json stands for, with special tokens alone.
        if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
            problem = f"has no tokenizer with any text; {_ADD}"
        elif tokenizer.eos_token_id is None:
            problem = "its tokenizer has no eos_token; responses would never end; set it in tokenizer_config.json"
    if problem:
        raise ConfigError.of("model", model, problem)
    return tokenizer


def load_prompts(
    path: Path | str,
    tokenizer: Any,
    max_prompt_tokens: int,
    data: DataConfig | None = None,
    *,
    require_answer: bool = True,
    require_columns: Sequence[str] = (),
    held_out: bool = False,
    see: Callable[[Prompt, str], None] = lambda prompt, where: None,
) -> Examples[Prompt]:
    """The prompts of a data set. Chat messages go through the tokenizer's chat template.

    Args:
        require_columns: that each row needs, or is refused.
        held_out: it is named by ``eval_dataset``, and of several splits one must be chosen.
        see: see :class:`~rl_backend.data.examples.Examples`.

    Raises:
        ConfigError, UnsupportedError: the data set or the chat template is missing, or does not fit ``data``.
        BatchError: a row that cannot be used, a prompt without tokens, or prompts that are too long.
    """
    rows = open_dataset(path, held_out=held_out)
    data = data or DataConfig()
    warn_of_padding(rows, data)
    tools, untold = read_tools_file(data), UntoldCalls()

    def make(index: int) -> tuple[Prompt, Sequence[Length]]:
        example = read_example(rows, index, data, tools, require_answer=require_answer, require_columns=require_columns)
        where = rows.where(index)
        shown = {"tools": example.tools, "documents": example.documents}
        token_ids = encode_prompt(example.prompt, tokenizer, data, where, **shown)
        untold.add(example.messages, example.tools, where)
        length = Length(len(token_ids), "max_prompt_tokens", max_prompt_tokens)
        return Prompt(example, cut_prompt(token_ids, max_prompt_tokens, tokenizer)), [length]

    examples = Examples(rows, make, data.too_long, see=see)
    untold.warn(rows.source, len(rows), data)
    return examples


def encode_prompt(
    prompt: str | Sequence[ChatMessage],
    tokenizer: Any,
    data: DataConfig,
    where: str = "prompt",
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    documents: Sequence[Mapping[str, Any]] = (),
) -> list[int]:
    """The tokens that a model continues: those of a text, or of messages by the chat template; ``where`` is for messages.

    Raises:
        ConfigError: options of chat templates, and a text that does not go through one; or as of
            :func:`~rl_backend.data.chat_template.encode_messages`.
        BatchError: no tokens, or messages that the template refuses.
    """
    messages = as_messages(prompt, data, where)
    try:
        if messages is None:
            token_ids = encode_text(str(prompt), tokenizer)
        else:
            token_ids = encode_messages(
                messages,
                tokenizer,
                chat_template_kwargs=data.chat_template_kwargs,
                tools=tools,
                documents=documents,
            )
    except BatchError as error:
        raise BatchError(f"{where}: {error.message}") from error
    if not token_ids:
        raise BatchError(f"{where}: a prompt of 0 tokens; remove the row")
    return token_ids


def endless_batches[T](items: Sequence[T], size: int, seed: int, *, start: int = 0) -> Iterator[list[T]]:
    """Endless batches from batch ``start`` on, each pass over ``items`` in a new order that follows from ``seed``.

    Raises :class:`ConfigError` for fewer items than one batch.
    """
    if len(items) < size:
        raise ConfigError(f"a batch of {size} needs at least as many examples; the data has {len(items)}")
    return _passes(items, [size] * (len(items) // size), random.Random(seed), start)


def epoch_batches[T](items: Sequence[T], size: int, seed: int, *, start: int = 0) -> Iterator[list[T]]:
    """As :func:`endless_batches`, but every item is in each pass once: batches of at most ``size``, as even as can be."""
    count = batches_per_epoch(len(items), size)
    sizes = [len(items) * (each + 1) // count - len(items) * each // count for each in range(count)]
    return _passes(items, sizes, random.Random(seed), start)


def batches_per_epoch(items: int, size: int) -> int:
    return -(-items // size)


def _passes[T](items: Sequence[T], sizes: Sequence[int], generator: random.Random, left_out: int) -> Iterator[list[T]]:
    # One generator for all passes: a resumed run goes through the earlier ones to be where it was.
    order = list(range(len(items)))
    while True:
        generator.shuffle(order)
        start = 0
        for size in sizes:
            if left_out:
                left_out -= 1
            else:
                yield [items[index] for index in order[start : start + size]]
            start += size
