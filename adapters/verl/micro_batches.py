"""verl's batch as the micro-batches that a runtime takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.dataset_utils import DatasetPadMode
from verl.workers.engine.utils import prepare_micro_batches

from rl_backend.contracts import BatchError, PackedBatch, UnsupportedError
from rl_backend.runtime import RankPlace

_UNSUPPORTED = {
    "distillation_use_topk": "top-k distillation reads logits, which are never kept",
    "distillation_only": "top-k distillation reads logits, which are never kept",
    "calculate_sum_pi_squared": "the sum of squared probabilities is not computed",
}


type FurtherFields = Callable[[TensorDict], tuple[Mapping[str, Tensor], Mapping[str, Any]]]
"""Token fields and meta of a micro-batch."""


@dataclass(frozen=True)
class MicroBatch:
    """What rides in ``PackedBatch.payload``: verl's own micro-batch, for verl's own loss.

    Attributes:
        index: its place among the micro-batches of the pass.
        data: as verl cut it.
    """

    index: int
    data: TensorDict


@dataclass(frozen=True)
class MicroBatches:
    """A batch, cut.

    Attributes:
        packed: one for each micro-batch, as many on every data-parallel rank.
        order: row of the batch of each sequence of ``packed``, in their order.
    """

    packed: list[PackedBatch]
    order: list[int]


def cut_batch(
    data: TensorDict,
    place: RankPlace,
    *,
    multiple: int,
    cp_size: int,
    further: FurtherFields = lambda _: ({}, {}),
) -> MicroBatches:
    """Cuts this rank's batch as verl does, and packs it.

    ``data`` and every micro-batch are given what verl's losses read: ``dp_size``, ``batch_num_tokens`` (``loss_mask`` summed
    over the data-parallel ranks) and ``num_micro_batch``. A collective over the data-parallel ranks.

    Args:
        data: ``input_ids`` jagged (B, L_i); ``loss_mask`` jagged over all tokens or over the response, or dense.
        multiple: with ``use_dynamic_bsz``, the number of micro-batches is one of its multiples.
        cp_size: ranks that share a micro-batch; verl's ``max_token_len_per_gpu`` is for each of them.
        further: what a micro-batch carries beside its tokens.

    Raises:
        BatchError: ``input_ids`` that are not jagged, positions that do not count each sequence's tokens from 0.
        UnsupportedError: what the model or the losses would need and do not get.
    """
    _require_supported(data)
    mask = data["loss_mask"]
    num_tokens = (mask.values() if mask.is_nested else mask).sum().to(place.device)
    if place.data_parallel_size > 1:
        dist.all_reduce(num_tokens, group=place.data_parallel_group)
    tu.assign_non_tensor(data, sp_size=cp_size, dp_size=place.data_parallel_size, batch_num_tokens=num_tokens.item())
    micro_batches, indices = prepare_micro_batches(
        data,
        dp_group=place.data_parallel_group,
        num_batches_divided_by=multiple if multiple > 1 else None,
        same_micro_num_in_dp=True,
    )
    for each in (data, *micro_batches):
        tu.assign_non_tensor(each, num_micro_batch=len(micro_batches))
    packed = [_pack(MicroBatch(index, each), *further(each)) for index, each in enumerate(micro_batches)]
    return MicroBatches(packed, list(chain.from_iterable(indices)) if indices else list(range(len(data))))


def _pack(micro_batch: MicroBatch, token_fields: Mapping[str, Tensor], further_meta: Mapping[str, Any]) -> PackedBatch:
    data = micro_batch.data
    input_ids = data["input_ids"]
    calculate_entropy = bool(tu.get(data, "calculate_entropy", False))
    meta: dict[str, Any] = {**further_meta, "calculate_entropy": calculate_entropy}
    sequence_fields = {}
    temperature = torch.as_tensor(tu.get(data, "temperature", 1.0), dtype=torch.float32)
    if temperature.dim() > 0:
        sequence_fields["temperature"] = temperature.reshape(len(data))
    else:
        meta["temperature"] = float(temperature)
    packed = PackedBatch(
        input_ids.values().to(torch.int64),
        input_ids.offsets().diff().cpu(),
        token_fields=token_fields,
        sequence_fields=sequence_fields,
        meta=meta,
        payload=micro_batch,
    )
    positions = data.get("position_ids", None)
    if positions is not None and positions.is_nested and not torch.equal(positions.values(), packed.position_ids):
        raise BatchError(
            "position_ids do not count the tokens of each sequence from 0; the models here always do", name="position_ids"
        )
    return packed


def _require_supported(data: TensorDict) -> None:
    input_ids = data["input_ids"]
    if not (input_ids.is_nested and input_ids.layout == torch.jagged):
        raise BatchError(
            f"input_ids is a dense tensor of shape {tuple(input_ids.shape)}; expected a jagged one, as verl's "
            "left_right_2_no_padding makes it",
            name="input_ids",
        )
    pad_mode = tu.get(data, "pad_mode", DatasetPadMode.NO_PADDING)
    if pad_mode != DatasetPadMode.NO_PADDING:
        raise UnsupportedError(
            f"pad_mode={str(pad_mode)!r}: engines of verl take 'no_padding'; set data.pad_mode=no_padding"
        )
    for name, reason in _UNSUPPORTED.items():
        if tu.get(data, name, False):
            raise UnsupportedError(f"{name}=True: {reason}; switch it off", name=name)
    positions = data.get("position_ids", None)
    if positions is not None and positions.dim() > 2:
        raise UnsupportedError(
            f"position_ids of {positions.dim()} dimensions: models of images or video are not supported", name="position_ids"
        )
    if any(tu.get(data, "multi_modal_inputs") or ()):
        raise UnsupportedError("multi_modal_inputs: models of images or video are not supported", name="multi_modal_inputs")
