"""Micro-batches: sequences packed end to end and split over ranks, and outputs put back into order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from rl_backend.contracts import EPISODE_SHARE, TARGET_IDS, BatchError, PackedBatch, TokenSequence
from rl_backend.contracts.lora import LORA_FIELD
from rl_backend.data.balance import MicroBatchPlan, plan_micro_batches

if TYPE_CHECKING:
    from tensordict import TensorDictBase

type FieldKind = Literal["token", "sequence"]


def pack(sequences: Sequence[TokenSequence], meta: Mapping[str, Any] | None = None) -> PackedBatch:
    """One micro-batch of B sequences, in the order given: token fields become (T, ...), sequence fields (B, ...).

    Raises:
        BatchError: no sequences, or fields whose names, shapes or dtypes differ between sequences; names the odd one.
    """
    check_same_fields(sequences)
    return _packed(sequences, meta)


def _packed(sequences: Sequence[TokenSequence], meta: Mapping[str, Any] | None) -> PackedBatch:
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
    # The odd one is blamed, not whichever differs from the first.
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
    # Lengths differ from sequence to sequence.
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


def sequences_from_tensordict(batch: TensorDictBase) -> list[TokenSequence]:
    """The B sequences of a TensorDict.

    Args:
        batch: batch size (B,). ``input_ids`` is jagged (``torch.nested`` with ``layout=torch.jagged``), (B, L_i) int64.
            Other jagged fields (B, L_i, ...) become token fields, dense ones (B, ...) sequence fields.

    Raises:
        BatchError: names the field: dense or missing ``input_ids``, a jagged field whose lengths are not those of
            ``input_ids``, a nested TensorDict, or data that is no tensor (facts of a whole batch belong in ``meta``).
    """
    token_fields: dict[str, tuple[Tensor, ...]] = {}
    sequence_fields: dict[str, Tensor] = {}
    for name in batch.keys():  # noqa: SIM118, a TensorDict iterates over its rows
        value = batch.get(name)
        if not isinstance(value, Tensor):
            raise BatchError(
                f"field {name!r} is a {type(value).__name__}, not a tensor; exclude it, and pass facts of the whole batch "
                "as meta",
                name=name,
            )
        if value.is_nested:
            token_fields[name] = tuple(value.unbind())
        else:
            sequence_fields[name] = value
    if "input_ids" not in token_fields:
        raise BatchError(
            f"input_ids is missing or dense; the TensorDict has {sorted(map(str, batch.keys()))}; expected a jagged one "
            "without padding: torch.nested.nested_tensor(rows, layout=torch.jagged)",
            name="input_ids",
        )
    input_ids = token_fields.pop("input_ids")
    return [
        TokenSequence(
            ids,
            {name: rows[index] for name, rows in token_fields.items()},
            {name: value[index] for name, value in sequence_fields.items()},
        )
        for index, ids in enumerate(input_ids)
    ]


def prepare_micro_batches(
    sequences: Sequence[TokenSequence], dp_size: int, max_tokens: int, meta: Mapping[str, Any] | None = None
) -> list[list[PackedBatch]]:
    """Plans and packs: the result's entry r holds the micro-batches of data-parallel rank r.

    ``plan_micro_batches`` with the same arguments is the plan that :func:`restore_order` needs.
    """
    check_same_fields(sequences)
    return pack_plan(sequences, plan_micro_batches([len(s) for s in sequences], dp_size, max_tokens), meta)


def pack_plan(
    sequences: Sequence[TokenSequence], plan: MicroBatchPlan, meta: Mapping[str, Any] | None = None
) -> list[list[PackedBatch]]:
    """Packs every micro-batch of a plan.

    The ``meta`` of each holds the caller's and: ``batch_num_tokens`` (float, sum of the token field ``loss_mask`` over all
    sequences of all ranks; absent without that field), ``global_batch_size`` (sequences of all ranks, or with the
    sequence field ``episode_share`` their episodes), ``dp_size`` and
    ``num_micro_batches`` (of one rank), and ``tenants``, those facts of each LoRA tenant's own sequences by ``lora_id``. A
    ``batch_num_tokens`` or ``global_batch_size`` of the caller's takes precedence, of several tenants one in ``tenants``:
    gradients that add up over several calls share the denominators of all of them.

    A filler of the plan has ``loss_mask`` and ``episode_share`` 0, and -100 for ``target_ids``. What a model adds to the
    loss by itself, as the balance of experts, counts it.

    Raises:
        BatchError: fields that differ between sequences, a ``loss_mask`` that is not 0 at a sequence's last position (it
            predicts nothing without ``target_ids``), a plan for another number of sequences, a ``dp_size`` or
            ``num_micro_batches`` in ``meta``, or one denominator for several tenants.
    """
    check_same_fields(sequences)
    if plan.num_sequences != len(sequences):
        raise BatchError(f"the plan is for {plan.num_sequences} sequences; got {len(sequences)}")
    if plan.fillers:
        # With a share of each, so that means over sequences leave the fillers out.
        shared_by = [_with_share(sequence, _share(sequence)) for sequence in sequences]
        sequences = [*shared_by, *(_filler(shared_by[index]) for index in plan.fillers)]
    given = dict(meta or {})
    for name in ("dp_size", "num_micro_batches"):
        if name in given:
            raise BatchError(f"meta[{name!r}]={given[name]!r}: set by dispatch, leave it out", name=name)
    facts: dict[str, Any] = {"global_batch_size": sum(map(_share, sequences))}
    if LORA_FIELD in sequences[0].sequence_fields:
        facts["tenants"] = _facts_of_tenants(sequences, plan, given)
        given.pop("tenants", None)
    if "loss_mask" in sequences[0].token_fields:
        for index, sequence in enumerate(sequences):
            last = sequence.token_fields["loss_mask"][-1]
            if bool((last != 0).any()) and TARGET_IDS not in sequence.token_fields:
                raise BatchError(
                    f"loss_mask of sequence {index} is {last.tolist()} at its last position, which predicts no token; it "
                    "must be 0 (TokenSequence.from_prompt_and_response places masks)",
                    index=index,
                    name="loss_mask",
                )
        facts["batch_num_tokens"] = float(sum(float(s.token_fields["loss_mask"].sum()) for s in sequences))
    # The caller's denominators replace ours: gradients that add up over several calls share those of all of them.
    shared = {**facts, **given, "dp_size": plan.dp_size, "num_micro_batches": plan.num_micro_batches}
    return [
        [_packed([sequences[index] for index in micro_batch], shared) for micro_batch in rank] for rank in plan.micro_batches
    ]


def _filler(source: TokenSequence) -> TokenSequence:
    empty = {"loss_mask": 0, TARGET_IDS: -100}
    fields = {name: torch.full_like(v, empty[name]) if name in empty else v for name, v in source.token_fields.items()}
    # No loss reads it, and means over sequences do not count it.
    return _with_share(TokenSequence(source.input_ids, fields, source.sequence_fields), 0.0)


def _with_share(sequence: TokenSequence, share: float) -> TokenSequence:
    shares = {EPISODE_SHARE: torch.tensor(share, dtype=torch.float64)}
    return TokenSequence(sequence.input_ids, sequence.token_fields, {**sequence.sequence_fields, **shares})


def _share(sequence: TokenSequence) -> float:
    share = sequence.sequence_fields.get(EPISODE_SHARE)
    return 1 if share is None else share.item()


def _facts_of_tenants(
    sequences: Sequence[TokenSequence], plan: MicroBatchPlan, given: Mapping[str, Any]
) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    ids = [int(sequence.sequence_fields[LORA_FIELD]) for sequence in sequences]
    for key, sequence in zip(ids, sequences, strict=True):
        own = found.setdefault(key, {"global_batch_size": 0, "num_micro_batches": 0})
        own["global_batch_size"] += _share(sequence)
        if "loss_mask" in sequence.token_fields:
            own["batch_num_tokens"] = own.get("batch_num_tokens", 0.0) + float(sequence.token_fields["loss_mask"].sum())
    for micro_batch in plan.micro_batches[0]:
        for key in {ids[index] for index in micro_batch}:
            found[key]["num_micro_batches"] += 1
    whole = {name: given[name] for name in ("batch_num_tokens", "global_batch_size") if name in given}
    if whole and len(found) > 1:
        name, value = next(iter(whole.items()))
        raise BatchError(
            f"meta[{name!r}]={value!r}: sequences of several LoRA tenants have a denominator each; give "
            f"meta['tenants'] = {{lora_id: {{{name!r}: ...}}}}",
            name=name,
        )
    own_given = given.get("tenants", {})
    return {key: {**facts, **whole, **own_given.get(key, {})} for key, facts in found.items()}


def restore_order[T](plan: MicroBatchPlan, per_rank: Sequence[Sequence[T]]) -> list[T]:
    """[rank][sequence in the order of its micro-batches] -> one value per sequence of the caller's, in their order."""
    ordered: dict[int, T] = {}
    for rank, values in zip(range(plan.dp_size), per_rank, strict=True):
        ordered.update(zip(plan.rank_indices(rank), values, strict=True))
    return [ordered[index] for index in range(plan.num_sequences)]
