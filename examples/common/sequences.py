"""Training sequences from samples, and advantages onto them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from actors import Sample
from rl_backend import TokenSequence
from rl_backend.algorithm import (
    ADVANTAGE_ESTIMATORS,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
    token_rewards,
)

type Advantage = Literal["grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]


def to_sequences(samples: Sequence[Sample]) -> list[TokenSequence]:
    """Prompt and response of each sample, with ``loss_mask`` and ``rollout_log_probs``."""
    return [
        TokenSequence.from_prompt_and_response(
            sample.prompt_ids, sample.response_ids, response_fields={"rollout_log_probs": sample.log_probs}
        )
        for sample in samples
    ]


def with_field(sequences: Sequence[TokenSequence], name: str, values: Sequence[Tensor]) -> list[TokenSequence]:
    """Adds a token field, given as one (L,) tensor for each sequence."""
    return [sequence.with_fields({name: value}) for sequence, value in zip(sequences, values, strict=True)]


def with_advantages(
    sequences: Sequence[TokenSequence], rewards: Sequence[float], advantage: Advantage, group_size: int
) -> list[TokenSequence]:
    """Adds ``advantages``: a sequence field where all tokens of a response have the same, else a token field.

    Args:
        sequences: those of one prompt next to each other.
        rewards: one of each sequence.
        advantage: the estimator.
        group_size: sequences of each prompt.
    """
    if advantage == "reinforce_plus_plus":
        return with_packed_fields(
            sequences,
            lambda fields, seq_lens: {
                "advantages": reinforce_plus_plus_advantages(
                    token_rewards(rewards, fields["loss_mask"], seq_lens), fields["loss_mask"], seq_lens
                )
            },
        )
    if advantage == "reinforce_plus_plus_baseline":
        return with_packed_fields(
            sequences,
            lambda fields, seq_lens: {
                "advantages": reinforce_plus_plus_baseline_advantages(
                    rewards, fields["loss_mask"], seq_lens, group_size=group_size
                )
            },
        )
    advantages = ADVANTAGE_ESTIMATORS[advantage](torch.tensor(rewards), group_size=group_size)
    return [
        sequence.with_fields(sequence_fields={"advantages": value})
        for sequence, value in zip(sequences, advantages, strict=True)
    ]


def with_packed_fields(
    sequences: Sequence[TokenSequence], function: Callable[[dict[str, Tensor], Tensor], dict[str, Tensor]]
) -> list[TokenSequence]:
    """Adds token fields that depend on the whole batch.

    Args:
        sequences: with equal fields.
        function: (token fields of all sequences end to end, (T, ...) each; their lengths, (B,)) -> new fields, (T, ...).
    """
    seq_lens = torch.tensor([len(sequence) for sequence in sequences])
    names = sequences[0].token_fields
    packed = {name: torch.cat([sequence.token_fields[name] for sequence in sequences]) for name in names}
    split = {name: value.split(seq_lens.tolist()) for name, value in function(packed, seq_lens).items()}
    return [
        sequence.with_fields({name: values[index] for name, values in split.items()})
        for index, sequence in enumerate(sequences)
    ]
