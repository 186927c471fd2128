"""The demo's task: add two two-digit numbers, answer written from the last digit on, as one adds by hand."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PAD, END = "<pad>", "<end>"
CHARACTERS = "0123456789+="
HELD_OUT, VALIDATION = 512, 256


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> float:
    """1.0 for exactly the right answer, else 0.0; verl's reward signature."""
    return float(solution_str == ground_truth)


def write_task(folder: Path, seed: int) -> None:
    """Writes ``model/`` (random weights, tokenizer) and ``train``, ``validation`` and ``held_out.jsonl``, all disjoint."""
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder / "model", seed)
    pairs = [(first, second) for first in range(10, 100) for second in range(10, 100)]
    random.Random(seed).shuffle(pairs)
    write_jsonl(folder / "held_out.jsonl", pairs[:HELD_OUT])
    write_jsonl(folder / "validation.jsonl", pairs[HELD_OUT : HELD_OUT + VALIDATION])
    write_jsonl(folder / "train.jsonl", pairs[HELD_OUT + VALIDATION :])


def write_jsonl(path: Path, pairs: list[tuple[int, int]]) -> None:
    rows = ({"prompt": f"{first}+{second}=", "answer": str(first + second)[::-1]} for first, second in pairs)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_model(path: Path, seed: int) -> None:
    """A Qwen3 of 0.6M parameters and a tokenizer with a token per character."""
    tokenizer = character_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    Qwen3ForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)


def character_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {token: index for index, token in enumerate([PAD, END, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, clean_up_tokenization_spaces=False
    )
