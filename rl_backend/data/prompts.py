"""Prompts: data files in verl's format, their tokens, and the order in which training sees them."""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_backend.contracts import BatchError, ConfigError, UnsupportedError

type ChatMessage = dict[str, Any]

_MEDIA_COLUMNS = ("images", "videos", "audios")


@dataclass(frozen=True)
class PromptExample:
    """One task.

    Attributes:
        prompt: plain text, or chat messages (``role``, ``content`` and the row's other keys) for a chat template.
        ground_truth: what the reward function compares with; any JSON value.
        data_source: name of the data set, for the reward function.
        extra_info: further facts for the reward function.
    """

    prompt: str | list[ChatMessage]
    ground_truth: Any
    data_source: str
    extra_info: Mapping[str, Any] = field(default_factory=dict)


def read_examples(path: Path | str) -> list[PromptExample]:
    """Reads a whole file.

    A row has:
        ``prompt``: text, or a list of chat messages with text content.
        the ground truth: ``reward_model.ground_truth`` (verl), else ``ground_truth``, else ``answer``.
        ``data_source``: text; without it, the file's name without suffix.
        ``extra_info``: an object, optional. Every other column (verl's ``ability`` too) is added to it
            for the reward function.

    Args:
        path: ``.parquet`` (needs pyarrow) or ``.jsonl`` (one JSON object per line; empty lines are skipped).

    Raises:
        ConfigError: the file does not exist or has another suffix.
        BatchError: the file cannot be read or has no rows, or a row has a missing or wrong field; names file, row and
            field. Rows of parquet are counted from 0, lines of jsonl from 1.
        UnsupportedError: images, videos or audio; or parquet without pyarrow.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError.of("dataset", str(path), "no such file; give a .parquet or .jsonl file")
    read = {".parquet": _parquet_rows, ".jsonl": _jsonl_rows}.get(path.suffix)
    if read is None:
        raise ConfigError.of("dataset", str(path), "unknown suffix; expected .parquet or .jsonl")
    examples = [_example(where, row, path.stem) for where, row in read(path)]
    if not examples:
        raise BatchError(f"{path}: no rows")
    return examples


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
    # Imported here: it takes seconds, and reading a command line needs none of it.
    from transformers import AutoTokenizer

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
    """The tokens of a text that continues: with the tokenizer's begin-of-text token if it has one, without an end."""
    token_ids: list[int] = tokenizer.encode(text)
    return token_ids[:-1] if token_ids and token_ids[-1] == tokenizer.eos_token_id else token_ids


def endless_batches[T](items: Sequence[T], size: int, seed: int) -> Iterator[list[T]]:
    """Endless batches of ``size``, each pass over ``items`` in a new order that follows from ``seed``.

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


def _parquet_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise UnsupportedError(f"{path}: parquet needs pyarrow ({error}); install rl-backend[examples]") from None
    try:
        table = pyarrow.parquet.read_table(path)
    except pyarrow.ArrowException as error:
        raise BatchError(f"{path}: not a readable parquet file: {error}") from None
    for index, row in enumerate(table.to_pylist()):
        yield f"{path}, row {index}", row


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise BatchError(f"{where}: not JSON: {error}") from None
            except RecursionError:
                raise BatchError(f"{where}: nested too deeply") from None
            if not isinstance(row, dict):
                raise BatchError(f"{where}: a {type(row).__name__}; expected one JSON object per line")
            yield where, row


def _example(where: str, columns: Mapping[str, Any], default_source: str) -> PromptExample:
    """Takes the known columns out of one row; the rest is ``extra_info``."""
    # A parquet column that a row leaves out reads as None.
    row = {name: value for name, value in columns.items() if value is not None}

    def missing(name: str) -> BatchError:
        return BatchError(f"{where}, field {name}: missing or null; the row has {sorted(columns)}", name=name)

    def require(name: str, value: Any, fits: bool, expected: str) -> None:
        if not fits:
            text = repr(value)
            shown = text if len(text) <= 80 else text[:77] + "..."
            raise BatchError(f"{where}, field {name}: is {shown}; expected {expected}", name=name)

    for name in _MEDIA_COLUMNS:
        if row.pop(name, None):
            raise UnsupportedError(f"{where}, field {name!r}: only text prompts are read; remove the column")

    prompt = row.pop("prompt", None)
    if prompt is None:
        raise missing("prompt")
    is_prompt = isinstance(prompt, str | list) and bool(prompt)
    require("prompt", prompt, is_prompt, "text or a list of chat messages, not empty")
    if isinstance(prompt, list):
        for index, message in enumerate(prompt):
            require(f"prompt[{index}]", message, isinstance(message, dict), "a message with role and content")
            for key in ("role", "content"):
                require(f"prompt[{index}].{key}", message.get(key), isinstance(message.get(key), str), "text")
        prompt = [{key: value for key, value in message.items() if value is not None} for message in prompt]

    reward_model = row.pop("reward_model", None)
    if reward_model is not None:
        require("reward_model", reward_model, isinstance(reward_model, dict), "an object with ground_truth")
        ground_truth = reward_model.get("ground_truth")
        if ground_truth is None:
            raise missing("reward_model.ground_truth")
    else:
        column = next((name for name in ("ground_truth", "answer") if name in row), None)
        if column is None:
            raise missing("reward_model.ground_truth, ground_truth or answer")
        ground_truth = row.pop(column)

    source = row.pop("data_source", default_source)
    require("data_source", source, isinstance(source, str), "text")
    extra_info = row.pop("extra_info", {})
    require("extra_info", extra_info, isinstance(extra_info, dict), "an object")
    for name, value in row.items():
        fits = extra_info.get(name) in (None, value)
        require(name, value, fits, f"the same as extra_info.{name}={extra_info.get(name)!r}, or another name")
    return PromptExample(prompt, ground_truth, source, {**extra_info, **row})
