"""Random sequences with the fields that RL losses read, and their packed and padded layouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rl_backend.contracts import ModelOutput, PackedBatch, TokenSequence

LENGTHS = ((3, 5), (1, 1), (4, 9), (2, 2), (6, 7), (1, 12))
"""(prompt, response) tokens of each sequence."""


def random_sequences(seed: int = 0, dtype: torch.dtype = torch.float64) -> list[TokenSequence]:
    """Sequences with log-probs around those of an old policy; some response tokens, and one whole sequence, masked.

    The fields ``log_probs``, ``entropy`` and ``values`` hold what a model would return.
    """
    generator, critic = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed + 1000)

    def noise(rows: int, scale: float, source: torch.Generator = generator) -> Tensor:
        return scale * torch.randn(rows, generator=source, dtype=dtype)

    sequences = []
    for index, (prompt, response) in enumerate(LENGTHS):
        old = -noise(response, 2.0).abs()
        fields = {
            "old_log_probs": old,
            "log_probs": old + noise(response, 0.7),
            "ref_log_probs": old + noise(response, 0.7),
            "rollout_log_probs": old + noise(response, 0.4),
            "entropy": noise(response, 1.0).abs(),
            "advantages": noise(1, 1.5).expand(response),
        }
        old_values = noise(response, 1.0, critic)
        fields |= {
            "old_values": old_values,
            "values": old_values + noise(response, 0.8, critic),
            "returns": old_values + noise(response, 1.0, critic),
            "token_rewards": noise(response, 1.0, critic),
        }
        ids = torch.randint(0, 50, (prompt + response,), generator=generator).tolist()
        sequence = TokenSequence.from_prompt_and_response(ids[:prompt], ids[prompt:], response_fields=fields)
        mask = sequence.token_fields["loss_mask"].to(dtype)
        if index == 3:
            mask = torch.zeros_like(mask)
        if index in (2, 5):
            mask[prompt + 1 : prompt + 4] = 0.0
        sequences.append(sequence.with_fields({"loss_mask": mask}))
    return sequences


def batch_meta(sequences: Sequence[TokenSequence], dp_size: int = 1) -> dict[str, Any]:
    """The denominators of losses over ``sequences``, which are those of all ranks."""
    return {
        "batch_num_tokens": sum(int((sequence.token_fields["loss_mask"] != 0).sum()) for sequence in sequences),
        "global_batch_size": len(sequences),
        "dp_size": dp_size,
    }


def pack(sequences: Sequence[TokenSequence], meta: dict[str, Any]) -> tuple[ModelOutput, PackedBatch]:
    """One micro-batch, and the model output whose leaves (T,) require gradients."""
    fields = {name: torch.cat([sequence.token_fields[name] for sequence in sequences]) for name in sequences[0].token_fields}
    given = {name: fields.pop(name) for name in ("log_probs", "entropy", "values") if name in fields}
    output = ModelOutput(**{name: value.clone().requires_grad_() for name, value in given.items()})
    batch = PackedBatch(
        torch.cat([sequence.input_ids for sequence in sequences]),
        torch.tensor([len(sequence) for sequence in sequences]),
        fields,
        {},
        meta,
    )
    return output, batch


def pad(packed: Tensor, batch: PackedBatch) -> Tensor:
    """(T,) -> (B, longest), zeros at the end; differentiable."""
    return torch.nn.utils.rnn.pad_sequence(list(batch.split(packed)), batch_first=True)
