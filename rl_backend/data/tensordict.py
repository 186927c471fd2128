"""The one conversion between TensorDict and sequences."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from rl_backend.contracts import BatchError, TokenSequence
from rl_backend.data.packing import check_same_fields


def sequences_from_tensordict(batch: TensorDictBase) -> list[TokenSequence]:
    """The B sequences of a TensorDict.

    Args:
        batch: batch size (B,). ``input_ids`` is jagged (``torch.nested`` with ``layout=torch.jagged``), (B, L_i) int64.
            Other jagged fields (B, L_i, ...) become token fields, dense ones (B, ...) sequence fields.

    Raises:
        BatchError: names the field: dense or missing ``input_ids``, a jagged field whose lengths are not those of
            ``input_ids``, a nested TensorDict, or data that is no tensor (facts of a whole batch belong in ``meta``).
    """
    if len(batch.batch_size) != 1 or batch.batch_size[0] == 0:
        raise BatchError(f"a TensorDict of batch size {tuple(batch.batch_size)}; expected (B,) with B >= 1")
    if "input_ids" not in batch.keys():  # noqa: SIM118, a TensorDict iterates over its rows
        raise BatchError(f"the TensorDict has no input_ids; it has {sorted(map(str, batch.keys()))}", name="input_ids")
    token_fields: dict[str, tuple[Tensor, ...]] = {}
    sequence_fields: dict[str, Tensor] = {}
    for name in batch.keys():  # noqa: SIM118
        value = batch.get(name)
        if not isinstance(value, Tensor):
            raise BatchError(
                f"field {name!r} is a {type(value).__name__}, not a tensor; exclude it, and pass facts of the whole batch "
                "as meta",
                name=name,
            )
        if value.is_nested:
            token_fields[name] = _rows(name, value)
        else:
            sequence_fields[name] = value
    if "input_ids" not in token_fields:
        raise BatchError(
            f"input_ids is a dense tensor of shape {tuple(sequence_fields['input_ids'].shape)}; expected a jagged one "
            "without padding: torch.nested.nested_tensor(rows, layout=torch.jagged)",
            name="input_ids",
        )
    input_ids = token_fields.pop("input_ids")
    for name, rows in token_fields.items():
        for index, (row, ids) in enumerate(zip(rows, input_ids, strict=True)):
            if row.shape[0] != ids.shape[0]:
                raise BatchError(
                    f"jagged field {name!r} has {row.shape[0]} entries for the {ids.shape[0]} tokens of sequence {index}; "
                    "exclude it or lay it out over all tokens",
                    name=name,
                    index=index,
                )
    return [
        TokenSequence(
            ids,
            {name: rows[index] for name, rows in token_fields.items()},
            {name: value[index] for name, value in sequence_fields.items()},
        )
        for index, ids in enumerate(input_ids)
    ]


def tensordict_from_sequences(sequences: Sequence[TokenSequence]) -> TensorDict:
    """The inverse of :func:`sequences_from_tensordict`; raises BatchError when fields differ between sequences."""
    check_same_fields(sequences)
    first = sequences[0]
    for name in ("input_ids", *first.token_fields):
        if name in first.sequence_fields or (name == "input_ids" and name in first.token_fields):
            raise BatchError(f"field {name!r} appears twice; a TensorDict holds each name once", name=name)
    ends = torch.tensor([0, *(len(sequence) for sequence in sequences)]).cumsum(0).to(first.input_ids.device)
    fields = {"input_ids": torch.cat([sequence.input_ids for sequence in sequences])}
    for name in first.token_fields:
        fields[name] = torch.cat([sequence.token_fields[name] for sequence in sequences])
    return TensorDict(
        {
            **{name: torch.nested.nested_tensor_from_jagged(value, ends) for name, value in fields.items()},
            **{name: torch.stack([s.sequence_fields[name] for s in sequences]) for name in first.sequence_fields},
        },
        batch_size=[len(sequences)],
    )


def _rows(name: str, value: Tensor) -> tuple[Tensor, ...]:
    if value.layout != torch.jagged:
        raise BatchError(f"field {name!r} is nested with layout {value.layout}; expected torch.jagged", name=name)
    return tuple(value.unbind())
