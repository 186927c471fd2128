"""Random token sequences with what the SFT loss reads."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rl_backend.contracts import PackedBatch, TokenSequence
from rl_backend.data.micro_batches import pack


def random_token_sequences(lengths: Sequence[int], vocab_size: int, seed: int = 0) -> list[TokenSequence]:
    """One sequence per length (at least 2); everything after the first token is the response."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths]
    return [TokenSequence.from_prompt_and_response(row[:1], row[1:]) for row in rows]


def sft_micro_batches(
    sequences: Sequence[TokenSequence], size: int, *, dp_rank: int = 0, dp_size: int = 1
) -> list[PackedBatch]:
    """This rank's share of ``sequences`` in micro-batches of ``size`` sequences; the denominators count all ranks."""
    meta = {
        "batch_num_tokens": float(sum(float(sequence.token_fields["loss_mask"].sum()) for sequence in sequences)),
        "global_batch_size": len(sequences),
        "dp_size": dp_size,
    }
    own = sequences[dp_rank::dp_size]
    return [pack(own[start : start + size], meta) for start in range(0, len(own), size)]
