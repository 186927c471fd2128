"""verl's batches as a runtime takes them, with routes to replay, and the runtime's outputs as verl takes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.dataset_utils import DatasetPadMode
from verl.utils.py_functional import append_to_dict
from verl.workers.engine.utils import detach_tree, prepare_micro_batches

from adapters.verl.options.settings import RouterReplayMode
from rl_backend.contracts import (
    TOKENS_COMPUTED,
    BatchError,
    ForwardResult,
    ModelOutput,
    PackedBatch,
    RLBackendError,
    UnsupportedError,
)
from rl_backend.contracts.replay import ROUTES, ROUTES_LAYERS, ROUTES_MASK, route_fields
from rl_backend.data import compared_tokens, plan_micro_batches, plan_shared
from rl_backend.data.chat_template import TEXT_ALONE
from rl_backend.runtime import RankPlace, RouterReplay

_UNSUPPORTED = {
    "distillation_use_topk": "top-k distillation reads logits, which are never kept",
    "distillation_only": "top-k distillation reads logits, which are never kept",
    "calculate_sum_pi_squared": "the sum of squared probabilities is not computed",
}
# Inputs that a processor of images gives for text too.
_OF_TEXT = frozenset({"mm_token_type_ids"})


@dataclass(frozen=True)
class MicroBatch:
    """The payload of a ``PackedBatch``: verl's own micro-batch, for verl's own loss, and its place in the pass."""

    index: int
    data: TensorDict


@dataclass(frozen=True)
class MicroBatches:
    """Attributes:
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
    routes: BatchRoutes | None = None,
    by_computed: bool = False,
) -> MicroBatches:
    """Cuts this rank's batch as verl does, and packs it.

    ``data`` and every micro-batch are given what verl's losses read: ``dp_size``, ``batch_num_tokens`` (``loss_mask`` summed
    over the data-parallel ranks) and ``num_micro_batch``. A collective over the data-parallel ranks, which refuse together.

    Args:
        data: ``input_ids`` jagged (B, L_i); ``loss_mask`` jagged over all tokens or over the response, or dense.
        multiple: with ``use_dynamic_bsz``, the number of micro-batches is one of its multiples.
        cp_size: ranks that share a micro-batch; verl's ``max_token_len_per_gpu`` is for each of them.
        routes: the routes of the batch, for a replay.
        by_computed: with ``use_dynamic_bsz``, tokens that sequences of a micro-batch share count once, and these stay
            together; verl's own cut counts every sequence, and spreads those that are alike.

    Raises:
        BatchError: positions that do not count each sequence's tokens from 0, sequences longer than a micro-batch, a number
            of them that micro-batches do not divide, wrong routes; or another rank refused its batch.
        UnsupportedError: the model or the losses would need something that they do not get.
    """
    num_tokens = _agreed_num_tokens(data, place, _problem(data, cp_size, routes))
    tu.assign_non_tensor(data, sp_size=cp_size, dp_size=place.data_parallel_size, batch_num_tokens=num_tokens)
    indices = _cut_by_computed(data, place, multiple, routes) if by_computed else None
    if indices is not None:
        micro_batches = [tu.index_select_tensor_dict(data, list(rows)) for rows in indices]
    else:
        micro_batches, indices = prepare_micro_batches(
            data,
            dp_group=place.data_parallel_group,
            num_batches_divided_by=multiple if multiple > 1 else None,
            same_micro_num_in_dp=True,
        )
    for each in (data, *micro_batches):
        tu.assign_non_tensor(each, num_micro_batch=len(micro_batches))
    packed = [_pack(MicroBatch(index, each), routes) for index, each in enumerate(micro_batches)]
    return MicroBatches(packed, list(chain.from_iterable(indices)) if indices else list(range(len(data))))


def _cut_by_computed(
    data: TensorDict, place: RankPlace, multiple: int, routes: BatchRoutes | None
) -> Sequence[Sequence[int]] | None:
    """The rows of each micro-batch; None where verl does not cut by tokens alone, or a rank finds nothing that fits."""
    if not tu.get(data, "use_dynamic_bsz", True) or tu.get(data, "force_group_size", 1) > 1:
        return None
    input_ids, fields = data["input_ids"], {} if routes is None else routes.of(data)[0]
    tokens = compared_tokens(input_ids.values().to(torch.int64), fields, replays=routes is not None)
    sequences = tokens.cpu().split(input_ids.offsets().diff().tolist())
    while True:
        found = _fewest(sequences, tu.get(data, "max_token_len_per_gpu"), multiple)
        numbers = torch.tensor([len(found), -len(found)], device=place.device)
        if place.data_parallel_size > 1:
            dist.all_reduce(numbers, dist.ReduceOp.MAX, group=place.data_parallel_group)
        most, fewest = int(numbers[0]), -int(numbers[1])
        if fewest in (0, most):
            return found if fewest else None
        # All ranks run as many, and a group is divided where a rank has too few.
        multiple = most


def _fewest(sequences: Sequence[Tensor], max_tokens: int, multiple: int) -> Sequence[Sequence[int]]:
    try:
        plan = plan_shared(sequences, 1, max_tokens, multiple_of=multiple)
        plan = plan or plan_micro_batches([len(each) for each in sequences], 1, max_tokens, multiple_of=multiple)
    except BatchError:
        # verl's own cut then says the same on every rank.
        return ()
    return plan.micro_batches[0]


def _problem(data: TensorDict, cp_size: int, routes: BatchRoutes | None) -> RLBackendError | None:
    try:
        _require_supported(data)
        _require_positions(data)
        _require_cuttable(data, cp_size)
        if routes is not None:
            routes.require(data)
    except RLBackendError as error:
        return error
    return None


def _agreed_num_tokens(data: TensorDict, place: RankPlace, problem: RLBackendError | None) -> float:
    mask = data["loss_mask"]
    num_tokens = (mask.values() if mask.is_nested else mask).sum().to(place.device)
    # One collective also tells each rank of the others' errors: none then waits for one that refused its batch.
    facts = torch.stack([num_tokens, torch.full_like(num_tokens, problem is not None)])
    if place.data_parallel_size > 1:
        dist.all_reduce(facts, group=place.data_parallel_group)
    total, refusing = facts.tolist()
    if problem is not None:
        raise problem
    if refusing:
        raise BatchError(
            f"{refusing:.0f} of {place.data_parallel_size} data-parallel ranks refused their batches; nothing ran on any"
        )
    return float(total)


def _pack(micro_batch: MicroBatch, routes: BatchRoutes | None) -> PackedBatch:
    data = micro_batch.data
    input_ids = data["input_ids"]
    meta: dict[str, Any] = {"calculate_entropy": bool(tu.get(data, "calculate_entropy", False))}
    token_fields: dict[str, Tensor] = {}
    if routes is not None:
        token_fields, meta[ROUTES_LAYERS] = routes.of(data)
    sequence_fields = {}
    temperature = torch.as_tensor(tu.get(data, "temperature", 1.0), dtype=torch.float32)
    if temperature.dim() > 0:
        sequence_fields["temperature"] = temperature.reshape(len(data))
    else:
        meta["temperature"] = float(temperature)
    return PackedBatch(
        input_ids.values().to(torch.int64),
        input_ids.offsets().diff().cpu(),
        token_fields=token_fields,
        sequence_fields=sequence_fields,
        meta=meta,
        payload=micro_batch,
    )


def _require_positions(data: TensorDict) -> None:
    positions = data.get("position_ids", None)
    if positions is None or not (positions.is_nested or positions.dim() > 2):
        return
    offsets = data["input_ids"].offsets()
    starts = offsets[:-1].repeat_interleave(offsets.diff())
    if not positions.is_nested or not _are_counted(
        positions.values(), torch.arange(len(starts), device=starts.device) - starts
    ):
        raise BatchError(
            "position_ids do not count the tokens of each sequence from 0, as those of text do and the models here always; "
            + TEXT_ALONE,
            name="position_ids",
        )


def _are_counted(positions: Tensor, counted: Tensor) -> bool:
    """Whether every row of positions is ``counted``: of models that read images those of time, height and width too."""
    # Sequences of one length are jagged in their rows: then each row is one sequence.
    whole = positions.shape[-1] == len(counted)
    expected = counted if whole else torch.arange(positions.shape[-1], device=positions.device)
    return torch.equal(positions, expected.expand_as(positions))


def _require_cuttable(data: TensorDict, cp_size: int) -> None:
    # verl asserts these sizes on one rank, while the others already wait in a collective.
    if tu.get(data, "use_dynamic_bsz", True):
        name, longest = "max_token_len_per_gpu", int(data["input_ids"].offsets().diff().max())
        limit = tu.get(data, name)
        fits = limit is not None and longest <= limit * cp_size
        problem = f"times {cp_size} context-parallel ranks does not hold the longest sequence, of {longest} tokens; raise it"
    else:
        name, group = "micro_batch_size_per_gpu", tu.get(data, "force_group_size", 1)
        limit = tu.get(data, name)
        fits = limit and len(data) % (limit * group) == 0
        problem = f"times force_group_size={group} does not divide {len(data)} sequences"
    if not fits:
        raise BatchError(f"{name}={limit} {problem}", name=name)


def _require_supported(data: TensorDict) -> None:
    problems = [
        f"{name}=True: {reason}; switch it off" for name, reason in _UNSUPPORTED.items() if tu.get(data, name, False)
    ]
    pad_mode = tu.get(data, "pad_mode", DatasetPadMode.NO_PADDING)
    if pad_mode != DatasetPadMode.NO_PADDING:
        problems.append(f"pad_mode={str(pad_mode)!r}: set data.pad_mode=no_padding, which engines of verl take")
    for index, inputs in enumerate(tu.get(data, "multi_modal_inputs") or ()):
        media = sorted(name for name in inputs or () if name not in _OF_TEXT)
        if media:
            problems.append(f"multi_modal_inputs of sequence {index} has {', '.join(media)}: {TEXT_ALONE}")
            break
    if problems:
        raise UnsupportedError("; ".join(problems))


def router_replay(data: TensorDict, mode: RouterReplayMode, *, forward_only: bool) -> RouterReplay:
    """Use of routes in a pass: R2 records them with log-probs and replays them in later passes; R3 replays in both."""
    # verl sets enable_routing_replay in the batches of the actor, and not in those of the reference.
    if mode == "disabled" or not tu.get(data, "enable_routing_replay", False):
        return "off"
    if mode == "R2" and forward_only and data.get(ROUTES, None) is None:
        return "record"
    return "replay"


@dataclass(frozen=True)
class BatchRoutes:
    """The routes that a batch brings for a replay, jagged (B, L_i or L_i - 1, layers, top_k).

    Attributes:
        mode: ``R2`` or ``R3``.
        num_layers: of the model; routes of as many layers are indexed by them, others by layers with experts.
    """

    mode: RouterReplayMode
    num_layers: int

    def require(self, data: TensorDict) -> None:
        """Raises :class:`BatchError` for routes that are missing, no integers, or of another number of tokens."""
        routes = data.get(ROUTES, None)
        if routes is None:
            source = (
                "compute_log_prob records"
                if self.mode == "R2"
                else "the rollout returns (enable_rollout_routing_replay=True)"
            )
            raise BatchError(f"router_replay.mode={self.mode!r}: the batch has no {ROUTES!r}, which {source}", name=ROUTES)
        route_fields(routes.values()[:0], 0)
        counts, lengths = (data[name].offsets().diff().tolist() for name in (ROUTES, "input_ids"))
        for index, (known, length) in enumerate(zip(counts, lengths, strict=True)):
            if known != length and not (self.mode == "R3" and known == length - 1):
                raise BatchError(
                    f"{ROUTES} of sequence {index} has {known} rows for {length} tokens; expected as many"
                    + (", or one less" if self.mode == "R3" else ""),
                    name=ROUTES,
                    sequence=index,
                )

    def of(self, data: TensorDict) -> tuple[dict[str, Tensor], str]:
        """Token fields, (T, ...), of a micro-batch of a batch with such routes, and which layers they are for."""
        routes = data[ROUTES]
        lengths = data["input_ids"].offsets().diff().tolist()
        responses = _response_lengths(data) if self.mode == "R3" else lengths
        rows: list[dict[str, Tensor]] = []
        for row, length, response in zip(routes.unbind(), lengths, responses, strict=True):
            fields = route_fields(row, length)
            if self.mode == "R3":
                # A rollout has no routes for the last token, and verl's padding, without response, none: the router chooses.
                fields[ROUTES_MASK][length - 1 if response else 0 :] = False
            rows.append(fields)
        fields = {name: torch.cat([row[name] for row in rows]) for name in (ROUTES, ROUTES_MASK)}
        return fields, "all" if routes.shape[-2] == self.num_layers else "moe"


def _response_lengths(data: TensorDict) -> list[int]:
    mask = data["response_mask"]
    rows = mask.unbind() if mask.is_nested else mask
    return [int(row.sum()) for row in rows]


type VerlLoss = Callable[..., tuple[Tensor, Mapping[str, Any]]]
"""verl's ``loss(model_output=, data=, dp_group=)``. It is multiplied by ``dp_size``, so that gradients are averaged."""


class MicroBatchLoss:
    """verl's loss as a runtime calls it, on verl's own micro-batch; ``metrics`` are those of each, without their graphs."""

    def __init__(self, loss: VerlLoss) -> None:
        self._loss = loss
        self.metrics: dict[int, Mapping[str, Any]] = {}

    def __call__(
        self, model_output: ModelOutput, data: PackedBatch, dp_group: Any = None
    ) -> tuple[Tensor, Mapping[str, Any]]:
        micro_batch = data.payload
        assert isinstance(micro_batch, MicroBatch), "cut_batch packed it"
        outputs = jagged_outputs(model_output, data)
        loss, metrics = self._loss(model_output=outputs, data=micro_batch.data.to(data.device), dp_group=dp_group)
        self.metrics[micro_batch.index] = detach_tree(metrics)
        return loss, {}


def jagged_outputs(model_output: ModelOutput, data: PackedBatch) -> dict[str, Tensor]:
    offsets = data.cu_seqlens.to(torch.int64)
    return {
        name: torch.nested.nested_tensor_from_jagged(value, offsets)
        for name, value in model_output._asdict().items()
        if value is not None
    }


def as_verl_output(result: ForwardResult, batch: MicroBatches, loss: MicroBatchLoss | None) -> dict[str, Any]:
    """The result of ``forward_backward_batch`` on a source rank.

    Returns:
        ``model_output``: name -> jagged (B, L_i, ...), detached, in the order of verl's batch; ``loss``: one number for each
        micro-batch; ``metrics``: name -> what each micro-batch gave, and fractions of this rank's tokens: in a replay
        ``router_replay/replayed_fraction``, and where prefixes may be shared ``shared_prefixes/computed_fraction``.
    """
    model_output = {}
    for name, sequences in result.outputs.items():
        rows: list[Tensor] = [sequences[0]] * len(batch.order)
        for row, sequence in zip(batch.order, sequences, strict=True):
            rows[row] = sequence
        model_output[name] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    metrics: dict[str, Any] = {}
    given = {} if loss is None else loss.metrics
    for index in sorted(given):
        append_to_dict(metrics, given[index])
    masks = [each.token_fields[ROUTES_MASK] for each in batch.packed if ROUTES_MASK in each.token_fields]
    if loss is not None and masks:
        metrics["router_replay/replayed_fraction"] = [float(torch.cat(masks).float().mean())]
    if loss is not None and TOKENS_COMPUTED in result.metrics:
        metrics["shared_prefixes/computed_fraction"] = [result.metrics[TOKENS_COMPUTED].mean]
    return {"model_output": model_output, "loss": list(result.losses), "metrics": metrics}
