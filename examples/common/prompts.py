"""Prompts and answers of a data file as token ids, and the order in which training sees them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from adapters.verl.dataset import PromptExample, read_examples
from rl_backend.contracts import BatchError, ConfigError


@dataclass(frozen=True)
class Prompt:
    """An example with its tokens."""

    example: PromptExample
    token_ids: list[int]


def load_tokenizer(model: str) -> Any:
    """The tokenizer of a local Hugging Face directory; it must name an end-of-text token.

    Raises:
        ConfigError: there is none, its files are damaged, or it does not name one.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    except Exception as error:  # a damaged tokenizer.json or tokenizer_config.json raises any type in transformers
        raise ConfigError.of(
            "model",
            model,
            f"has no tokenizer that can be loaded, {type(error).__name__}: {error}; check tokenizer.json and "
            "tokenizer_config.json",
        ) from error
    # Without its files transformers makes one of the class that config.json stands for, with special tokens alone.
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
        raise ConfigError.of("model", model, "has no tokenizer with any text; add tokenizer.json and tokenizer_config.json")
    if tokenizer.eos_token_id is None:
        raise ConfigError.of("model", model, "its tokenizer has no eos_token; responses would never end")
    return tokenizer


def load_prompts(path: Path | str, tokenizer: Any, max_prompt_tokens: int) -> list[Prompt]:
    """Reads a ``.jsonl`` or verl-style ``.parquet`` file; chat prompts go through the tokenizer's chat template.

    Raises:
        BatchError: a prompt without tokens, or with more than ``max_prompt_tokens``.
    """
    prompts = []
    for index, example in enumerate(read_examples(path)):
        if isinstance(example.prompt, str):
            token_ids = encode_text(example.prompt, tokenizer)
        else:
            token_ids = tokenizer.apply_chat_template(
                example.prompt, tokenize=True, add_generation_prompt=True, return_dict=False
            )
        if not 1 <= len(token_ids) <= max_prompt_tokens:
            raise BatchError(
                f"{path}, example {index}: a prompt of {len(token_ids)} tokens; expected 1 to "
                f"max_prompt_tokens={max_prompt_tokens}"
            )
        prompts.append(Prompt(example, list(token_ids)))
    return prompts


def encode_text(text: str, tokenizer: Any) -> list[int]:
    """The tokens of a text that goes on: with the tokenizer's begin-of-text token if it has one, without an end."""
    token_ids: list[int] = tokenizer.encode(text)
    return token_ids[:-1] if token_ids and token_ids[-1] == tokenizer.eos_token_id else token_ids


def endless_batches[T](items: Sequence[T], size: int, seed: int) -> Iterator[list[T]]:
    """Batches of ``size`` for ever, each pass over ``items`` in a new order that follows from ``seed``.

    Raises:
        ConfigError: fewer items than one batch.
    """
    if len(items) < size:
        raise ConfigError(f"a batch of {size} needs at least as many examples; the data has {len(items)}")
    return _passes(list(items), size, random.Random(seed))


def _passes[T](order: list[T], size: int, generator: random.Random) -> Iterator[list[T]]:
    while True:
        generator.shuffle(order)
        for start in range(0, len(order) - size + 1, size):
            yield order[start : start + size]
