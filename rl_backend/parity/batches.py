"""The batch that both sides train on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rl_backend.contracts import ConfigError, TokenSequence
from rl_backend.data import MicroBatchPlan
from rl_backend.parity.config import ParityConfig


def make_sequences(config: ParityConfig, hf_config: Mapping[str, Any]) -> list[TokenSequence]:
    """Random tokens in sequences of mixed lengths, of which all but the first token is trained.

    The padding token is left out: transformers gives its embedding no gradient.

    Raises:
        ConfigError: ``max_length`` is more than the model has positions, or ``config.json`` has no ``vocab_size``.
    """
    text = hf_config.get("text_config", hf_config)
    vocab_size, positions = text.get("vocab_size"), text.get("max_position_embeddings")
    if not isinstance(vocab_size, int) or vocab_size < 2:
        raise ConfigError.of("config.json vocab_size", vocab_size, "expected a whole number of at least 2")
    if isinstance(positions, int) and config.max_length > positions:
        raise ConfigError.of("ParityConfig.max_length", config.max_length, f"the model has {positions} positions")
    generator = torch.Generator().manual_seed(config.seed)
    tokens = torch.arange(vocab_size)
    if (padding := text.get("pad_token_id")) is not None:
        tokens = tokens[tokens != padding]
    lengths = torch.linspace(2, config.max_length, config.num_sequences).round().long()
    lengths = lengths[torch.randperm(config.num_sequences, generator=generator)]
    return [
        TokenSequence.from_prompt_and_response(row[:1], row[1:])
        for row in (tokens[torch.randint(len(tokens), (length,), generator=generator)] for length in lengths.tolist())
    ]


def plan_batch(config: ParityConfig, data_parallel_size: int) -> MicroBatchPlan:
    """Deals the sequences out in turn, so that every rank has the same number of micro-batches."""
    bins = data_parallel_size * config.num_micro_batches
    dealt = [tuple(range(start, config.num_sequences, bins)) for start in range(bins)]
    return MicroBatchPlan(tuple(tuple(dealt[rank::data_parallel_size]) for rank in range(data_parallel_size)))
