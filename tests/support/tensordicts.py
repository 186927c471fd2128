"""TensorDicts of sequences."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDict

from rl_backend.contracts import TokenSequence


def tensordict_of(sequences: Sequence[TokenSequence]) -> TensorDict:
    """``input_ids`` and token fields as jagged tensors, sequence fields as dense ones."""
    first = sequences[0]
    tokens = {"input_ids": [sequence.input_ids for sequence in sequences]}
    tokens |= {name: [sequence.token_fields[name] for sequence in sequences] for name in first.token_fields}
    ends = torch.tensor([0, *map(len, sequences)]).cumsum(0)
    fields = {name: torch.nested.nested_tensor_from_jagged(torch.cat(rows), ends) for name, rows in tokens.items()}
    fields |= {name: torch.stack([s.sequence_fields[name] for s in sequences]) for name in first.sequence_fields}
    return TensorDict(fields, batch_size=[len(sequences)])
