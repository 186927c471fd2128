"""Sequences laid end to end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from rl_backend.contracts import BatchError, PackedBatch, TokenSequence

type FieldKind = Literal["token", "sequence"]


def pack(sequences: Sequence[TokenSequence], meta: Mapping[str, Any] | None = None) -> PackedBatch:
    """One micro-batch of B sequences, in the order given.

    Token fields are concatenated to (T, ...), sequence fields are stacked to (B, ...).

    Args:
        sequences: at least one, all with the same fields.
        meta: becomes ``PackedBatch.meta``.

    Raises:
        BatchError: no sequences, or fields whose names, shapes or dtypes differ between sequences; names the odd one.
    """
    check_same_fields(sequences)
    first = sequences[0]
    return PackedBatch(
        input_ids=torch.cat([sequence.input_ids for sequence in sequences]),
        seq_lens=torch.tensor([len(sequence) for sequence in sequences], dtype=torch.int64),
        token_fields={name: torch.cat([s.token_fields[name] for s in sequences]) for name in first.token_fields},
        sequence_fields={name: torch.stack([s.sequence_fields[name] for s in sequences]) for name in first.sequence_fields},
        meta=dict(meta or {}),
    )


def check_same_fields(sequences: Sequence[TokenSequence]) -> None:
    """Raises :class:`~rl_backend.contracts.BatchError` unless all sequences can be packed together."""
    if not sequences:
        raise BatchError("no sequences; a batch needs at least one")
    token_fields = [sequence.token_fields for sequence in sequences]
    sequence_fields = [sequence.sequence_fields for sequence in sequences]
    _check_names("token", token_fields)
    _check_names("sequence", sequence_fields)
    for name in token_fields[0]:
        _check_tensors("token", name, [fields[name] for fields in token_fields])
    for name in sequence_fields[0]:
        _check_tensors("sequence", name, [fields[name] for fields in sequence_fields])
    _check_tensors("token", "input_ids", [sequence.input_ids for sequence in sequences])


def _check_names(kind: FieldKind, fields: Sequence[Mapping[str, Tensor]]) -> None:
    names = [frozenset(entry) for entry in fields]
    usual = Counter(names).most_common(1)[0][0]
    for index, own in enumerate(names):
        if own != usual:
            differences = [f"lacks {sorted(usual - own)}"] if usual - own else []
            differences += [f"has {sorted(own - usual)} which the others lack"] if own - usual else []
            raise BatchError(
                f"sequence {index} {' and '.join(differences)} ({kind} fields); all sequences of a batch need the same "
                "fields",
                index=index,
                names=sorted(usual ^ own),
            )


def _check_tensors(kind: FieldKind, name: str, tensors: Sequence[Tensor]) -> None:
    skip = 1 if kind == "token" else 0
    layouts = [(tuple(tensor.shape[skip:]), tensor.dtype, tensor.device) for tensor in tensors]
    usual = Counter(layouts).most_common(1)[0][0]
    for index, own in enumerate(layouts):
        if own != usual:
            raise BatchError(
                f"{kind} field {name!r} of sequence {index} has {_layout(kind, own)}; the other sequences have "
                f"{_layout(kind, usual)}",
                index=index,
                name=name,
            )


def _layout(kind: FieldKind, layout: tuple[tuple[int, ...], torch.dtype, torch.device]) -> str:
    shape, dtype, device = layout
    sizes = ", ".join(["L", *map(str, shape)] if kind == "token" else map(str, shape))
    return f"shape ({sizes}), dtype {dtype}, device {device}"
