"""Small models and demonstrations for the environments of ``examples/episodes.py``: a byte-pair tokenizer whose decoding and
encoding differ, a chat template, and careless answers to imitate.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

type Task = Literal["guess", "calculator"]

END, PAD = "<|end|>", "<|pad|>"
ROLES = ("<|user|>", "<|assistant|>", "<|tool|>")
CALL = ('<tool_call>{"name": "calculate", "arguments": {"expression": "', '"}}</tool_call>')
HIGH, TURNS = 14, 4
HELD_OUT, ROWS, DEMONSTRATIONS = 128, 512, 3000
# Tools are read and not listed: the model knows the only one from its demonstrations.
_TEMPLATE = (
    "{%- if tools -%}{%- endif -%}{%- for message in messages -%}<|{{ message.role }}|>{{ message.content }}"
    "{%- for call in message.tool_calls or [] -%}<tool_call>{{ call.function | tojson }}</tool_call>{%- endfor -%}<|end|>"
    "{%- endfor -%}{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)


def bpe_tokenizer() -> PreTrainedTokenizerFast:
    """Pairs of digits, and the text around a call, are a token each; so are their parts, which a model may sample as well:
    text then encodes to other tokens than those that it was decoded from.
    """
    characters = sorted(set("0123456789?*<>-" + "".join(CALL)))
    vocabulary = {token: index for index, token in enumerate([PAD, END, *ROLES, *characters])}
    merges: list[tuple[str, str]] = []

    def merge(left: str, right: str) -> None:
        if left + right not in vocabulary:
            vocabulary[left + right] = len(vocabulary)
            merges.append((left, right))

    for text in CALL:
        for end in range(1, len(text)):
            merge(text[:end], text[end])
    for first, second in product("0123456789", repeat=2):
        merge(first, second)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=list(ROLES),
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = _TEMPLATE
    return made


def qwen3_config(tokenizer: PreTrainedTokenizerFast, **changed: Any) -> Any:
    """A small Qwen3 for a tokenizer."""
    config = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return AutoConfig.for_model("qwen3", **config | changed)


def write_task(folder: Path, task: Task, seed: int = 0) -> Path:
    """``model/`` (random weights and the tokenizer), ``demonstrations.jsonl``, ``train.jsonl`` and ``held_out.jsonl``."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = bpe_tokenizer()
    torch.manual_seed(seed)
    disable_progress_bar()
    AutoModelForCausalLM.from_config(qwen3_config(tokenizer)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows, demonstrations = (_guess if task == "guess" else _calculator)(random.Random(seed))
    write_jsonl(folder / "train.jsonl", rows[HELD_OUT:])
    write_jsonl(folder / "held_out.jsonl", rows[:HELD_OUT])
    write_jsonl(folder / "demonstrations.jsonl", [{"messages": each} for each in demonstrations])
    return folder


def write_jsonl(path: Path, rows: Sequence[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _guess(generator: random.Random, halves: float = 0.3) -> tuple[list[Any], list[Any]]:
    """Some halve the range that is left, which finds every number; the others guess anywhere."""

    def played() -> Iterator[dict[str, str]]:
        number, low, high = generator.randint(0, HIGH), 0, HIGH
        careful = generator.random() < halves
        yield _said("user", "?")
        for turn in range(TURNS):
            guess = (low + high) // 2 if careful else generator.randint(0, HIGH)
            yield _said("assistant", f"{guess:02d}")
            if guess == number or turn == TURNS - 1:
                return
            if number > guess:
                low = max(low, guess + 1)
            else:
                high = min(high, guess - 1)
            yield _said("user", ">" if number > guess else "<")

    return [{"high": HIGH, "turns": TURNS}] * (HELD_OUT + ROWS), [list(played()) for _ in range(DEMONSTRATIONS)]


def _calculator(generator: random.Random, calls: float = 0.3) -> tuple[list[Any], list[Any]]:
    """Some use the tool, the others guess near."""
    pairs = [(first, second) for first in range(10, 100) for second in range(10, 100)]
    generator.shuffle(pairs)
    rows = [{"prompt": f"{first}*{second}?", "answer": str(first * second)} for first, second in pairs]

    def played(first: int, second: int) -> Iterator[dict[str, str]]:
        yield _said("user", f"{first}*{second}?")
        if generator.random() < calls:
            yield _said("assistant", f"{CALL[0]}{first}*{second}{CALL[1]}")
            yield _said("tool", str(first * second))
            yield _said("assistant", str(first * second))
        else:
            yield _said("assistant", str(max(first * second + generator.randint(-300, 300), 0)))

    train = pairs[HELD_OUT : HELD_OUT + ROWS]
    demonstrations = [list(played(*pair)) for pair in pairs[HELD_OUT:][:DEMONSTRATIONS]]
    return rows[: HELD_OUT + len(train)], demonstrations
