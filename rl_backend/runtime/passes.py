"""A pass in every engine: its request, the checks of its micro-batches, and their losses, metrics and outputs."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from rl_backend.contracts import (
    SAMPLING_MASK,
    TARGET_IDS,
    TOKENS_COMPUTED,
    BatchError,
    ForwardResult,
    Head,
    LossFn,
    Metric,
    MetricValue,
    ModelOutput,
    PackedBatch,
    UnsupportedError,
    check_keys,
    check_mask,
    check_routes,
    merge_metrics,
)
from rl_backend.contracts.replay import KEYS, ROUTES, ROUTES_MASK
from rl_backend.data.prefixes import shared_prefixes
from rl_backend.primitive.adapters import AdapterRun
from rl_backend.primitive.log_prob import IGNORE_LABEL
from rl_backend.primitive.prefix_tree import PrefixTree
from rl_backend.runtime.handle import GuardedHandle
from rl_backend.runtime.interface import REPLAY_MODES, RouterReplay

TOP, CUT = ("top_ids", "top_log_probs"), "mask_disagreement"
"""Outputs that the meta of a batch asks for."""


class PassAdapters(Protocol):
    """The adapters of a pass."""

    heads: Sequence[Head]  # the outputs of the pass, the same for all of its micro-batches and ranks

    def runs(self, index: int, batch: PackedBatch, sequence_rows: Sequence[int]) -> tuple[AdapterRun, ...]:
        """Which adapters work on which rows of micro-batch ``index``; each sequence has ``sequence_rows`` on this rank."""
        ...

    def sharing(self, batch: PackedBatch) -> Sequence[int]:
        """A number for each sequence; those with another share no prefix with it."""
        ...

    def problem(self, data: Sequence[PackedBatch]) -> BatchError | None:
        """Why these adapters cannot work on this rank's micro-batches."""
        ...

    def fingerprint(self, data: Sequence[PackedBatch]) -> int:
        """What ranks with other sequences must have in common, as a number of up to 32 bits."""
        ...

    def begin(self, data: Sequence[PackedBatch]) -> None:
        """The micro-batches have been checked on every rank, and run next."""
        ...


class PassRequest(NamedTuple):
    """One ``forward_backward``, as the runtime asks for it."""

    data: Sequence[PackedBatch]
    loss_fn: LossFn | None  # None in a forward-only pass without a loss
    forward_only: bool
    router_replay: RouterReplay = "off"
    adapters: PassAdapters | None = None  # None without LoRA

    def runs(self, index: int, batch: PackedBatch, sequence_rows: Sequence[int]) -> tuple[AdapterRun, ...]:
        return () if self.adapters is None else self.adapters.runs(index, batch, sequence_rows)

    def begin(self) -> None:
        if self.adapters is not None:
            self.adapters.begin(self.data)

    def prefix_tree(self, handle: GuardedHandle, index: int) -> PrefixTree | None:
        """What the sequences of a micro-batch share and ``handle`` computes once; None where that is nothing."""
        if not handle.shares_prefixes:
            return None
        batch = self.data[index]
        owners = () if self.adapters is None else self.adapters.sharing(batch)
        return shared_prefixes(batch, replays=self.router_replay == "replay", owners=owners)

    @property
    def heads(self) -> Sequence[Head]:
        """As :attr:`~rl_backend.model.ModelInput.heads`."""
        return () if self.adapters is None else self.adapters.heads

    @property
    def kind(self) -> int:
        """A number that ranks compare."""
        adapters = 0 if self.adapters is None else self.adapters.fingerprint(self.data)
        # One number, so that one collective compares all of it.
        return (adapters * len(REPLAY_MODES) + REPLAY_MODES.index(self.router_replay)) * 2 + self.forward_only


@dataclass
class PassResults:
    """What the micro-batches of one pass gave, in whatever order they were computed."""

    request: PassRequest
    dp_group: dist.ProcessGroup  # for the loss
    keeps_outputs: bool  # whether this rank is the one of its replica that returns outputs
    _losses: dict[int, Tensor] = field(default_factory=dict)
    _metrics: dict[int, Mapping[str, MetricValue]] = field(default_factory=dict)
    _outputs: dict[int, Mapping[str, list[Tensor]]] = field(default_factory=dict)
    _computed: dict[int, Metric] = field(default_factory=dict)

    def add(self, index: int, batch: PackedBatch, output: ModelOutput, computed: int | None = None) -> Tensor | None:
        """The loss of micro-batch ``index``, with its graph; None where there is none.

        ``computed``: how many tokens were, where prefixes may be shared.

        Raises:
            BatchError: as :func:`check_returned`.
            UnsupportedError: the model gave something else than a number for each token, or for each of its targets, or no
                likeliest tokens where they were asked for.
        """
        shapes = {"log_probs": tuple(batch.token_fields.get(TARGET_IDS, batch.input_ids).shape)}
        shapes |= dict.fromkeys(TOP, (batch.num_tokens, batch.num_top))
        for name, value in output._asdict().items():
            found, expected = None if value is None else tuple(value.shape), shapes.get(name, (batch.num_tokens,))
            asked = (name in TOP and batch.num_top > 0) or (name == CUT and batch.cuts is not None)
            if found != expected and (found is not None or (asked and output.log_probs is not None)):
                # Losses would spread it over the tokens in silence.
                raise UnsupportedError(
                    f"the model returned {name} of shape {found} for micro-batch {index}; expected {expected}"
                )
        if computed is not None:
            self._computed[index] = Metric(computed, batch.num_tokens)
        if self.keeps_outputs:
            # Copies: a loss may change what it is given, and a view would keep the outputs of the whole micro-batch.
            # Detached: the graph of a micro-batch must not outlive its backward pass.
            given = {name: value.detach() for name, value in output._asdict().items() if value is not None}
            self._outputs[index] = {name: [part.clone() for part in batch.split(value)] for name, value in given.items()}
        if self.request.loss_fn is None:
            return None
        loss, metrics = self.request.loss_fn(output, batch, self.dp_group)
        check_returned(f"loss_fn for micro-batch {index}", loss, metrics, forward_only=self.request.forward_only)
        self._metrics[index] = tree_map_only(Tensor, Tensor.detach, dict(metrics))
        if loss is not None:
            self._losses[index] = loss.detach().float()
        return loss

    def result(self, routes: Mapping[str, list[Tensor]]) -> ForwardResult:
        outputs = dict[str, list[Tensor]]()
        for index in sorted(self._outputs):
            for name, parts in self._outputs[index].items():
                outputs.setdefault(name, []).extend(parts)
        # In the order of the request: a pipeline computes them in another.
        losses = [self._losses[index] for index in sorted(self._losses)]
        computed = merge_metrics([{TOKENS_COMPUTED: each} for each in self._computed.values()])
        return ForwardResult(
            losses=tuple(torch.stack(losses).tolist()) if losses else (),
            metrics=computed | merge_metrics([_as_metrics(self._metrics[index]) for index in sorted(self._metrics)]),
            outputs={**outputs, **routes},
        )


def check_returned(whose: str, loss: object, metrics: object, *, forward_only: bool) -> None:
    """Refuses what is no loss (a 0-d tensor with a gradient; in a forward-only pass any 0-d tensor or None) or no metrics.

    Args:
        whose: begins the message.

    Raises:
        BatchError: without a wait for the device.
    """
    is_loss = isinstance(loss, Tensor) and loss.dim() == 0 and (forward_only or loss.requires_grad)
    if not is_loss and not (loss is None and forward_only):
        raise BatchError(
            f"{whose} returned {loss!r}; expected a 0-d tensor with a gradient: compute it from model_output, or pass "
            "forward_only=True"
        )
    bad = metrics
    if isinstance(metrics, Mapping):
        bad = {name: value for name, value in metrics.items() if not _is_metric(value)}
    if bad or not isinstance(metrics, Mapping):
        raise BatchError(f"{whose}: metrics must be a dict of numbers or (sum, weight) pairs; found {bad!r}")


def _is_metric(value: object) -> bool:
    pair = value if isinstance(value, tuple) else (value, 1.0)
    return len(pair) == 2 and all(map(_is_number, pair))


def _is_number(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    try:
        float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    return True


def _as_metrics(values: Mapping[str, MetricValue]) -> dict[str, Metric]:
    pairs = {name: value if isinstance(value, tuple) else (value, 1.0) for name, value in values.items()}
    return {name: Metric(float(total), float(weight)) for name, (total, weight) in pairs.items()}


def check_micro_batches(handle: GuardedHandle, request: PassRequest) -> None:
    """Refuses data that cannot run, on every rank together: no rank is left waiting in a collective.

    Raises:
        BatchError: what :func:`problem_on_rank` finds, here or on another rank; other data on another rank of the replica;
            another number of micro-batches or another kind of pass on another rank; a number that the engine cannot run.
    """
    data, groups = request.data, handle.groups
    world, replica = groups.world_group, groups.replica_group
    problem = problem_on_rank(handle, request)
    if replica.size() > 1:
        difference = problem_in_replica(checksum(data), replica, groups.device)
        # Every rank takes part in every collective, one with a problem too.
        problem = problem or difference
    if world.size() > 1:
        ranks_problem = problem_between_ranks(len(data), problem is not None, request.kind, world, groups.device)
        problem = problem or ranks_problem
    if problem is not None:
        raise problem
    # Afterwards: by then all ranks have the same number, and none raises alone.
    handle.require_schedulable(len(data), forward_only=request.forward_only)


def problem_on_rank(handle: GuardedHandle, request: PassRequest) -> BatchError | None:
    """What is wrong with this rank's micro-batches by themselves."""
    data, vocab_size, max_length = request.data, handle.vocab_size, handle.max_length
    if not data:
        return BatchError("forward_backward without micro-batches; every rank needs at least one")
    for index, batch in enumerate(data):
        longest = int(batch.seq_lens.max())
        if max_length is not None and longest > max_length:
            return BatchError(
                f"micro-batch {index} has a sequence of {longest} tokens; the model has {max_length} positions",
                micro_batch=index,
                longest=longest,
            )
        least, most = (int(value) for value in torch.aminmax(batch.input_ids))
        if least < 0 or most >= vocab_size:
            return BatchError(
                f"micro-batch {index} has token {least if least < 0 else most}; the vocabulary has {vocab_size} tokens, "
                f"0 to {vocab_size - 1}",
                micro_batch=index,
            )
        targets = batch.token_fields.get(TARGET_IDS, batch.input_ids)
        least, most = (int(value) for value in torch.aminmax(targets.where(targets != IGNORE_LABEL, 0)))
        if least < 0 or most >= vocab_size:
            return BatchError(
                f"micro-batch {index} has {TARGET_IDS} {least if least < 0 else most}; the vocabulary has {vocab_size} "
                f"tokens, 0 to {vocab_size - 1}, and {IGNORE_LABEL} asks for none",
                micro_batch=index,
                name=TARGET_IDS,
            )
        try:
            temperature, num_top, _ = batch.temperature, batch.num_top, batch.cuts
        except BatchError as error:
            return _of_micro_batch(index, error)
        if num_top > vocab_size:
            return BatchError(
                f"micro-batch {index}: meta['top_log_probs'] is {num_top}; the vocabulary has {vocab_size} tokens",
                micro_batch=index,
            )
        if isinstance(temperature, Tensor) and not bool((temperature > 0).all()):
            lowest = float(temperature.min())
            return BatchError(f"micro-batch {index}: temperature {lowest}; it must be above 0", micro_batch=index)
    for index, batch in enumerate(data):
        try:
            if KEYS in batch.token_fields:
                check_keys(batch, handle.indexed_layers)
            if SAMPLING_MASK in batch.token_fields:
                check_mask(batch, vocab_size)
            if request.router_replay == "replay" and handle.routed_layers is not None:
                check_routes(batch, handle.routed_layers)
        except BatchError as error:
            return _of_micro_batch(index, error)
        # Here, because which tokens are the same depends on their routes.
        if (too_many := _too_many_tokens(handle, request, index)) is not None:
            return too_many
    return None if request.adapters is None else request.adapters.problem(data)


def _too_many_tokens(handle: GuardedHandle, request: PassRequest, index: int) -> BatchError | None:
    num_tokens, most = request.data[index].num_tokens, handle.config.max_tokens_per_micro_batch
    if num_tokens > most and (tree := request.prefix_tree(handle, index)) is not None:
        num_tokens = tree.num_rows
    if num_tokens <= most:
        return None
    return BatchError(
        f"micro-batch {index} has {num_tokens} tokens; max_tokens_per_micro_batch={most}; split it or raise the limit",
        micro_batch=index,
        num_tokens=num_tokens,
    )


def checksum(data: Sequence[PackedBatch]) -> int:
    """Of what the ranks of a replica must have in common."""
    found = 0
    for batch in data:
        names = (ROUTES, ROUTES_MASK, KEYS, TARGET_IDS, SAMPLING_MASK)
        recorded = [batch.token_fields[name] for name in names if name in batch.token_fields]
        for tensor in (batch.seq_lens, batch.input_ids, *recorded):
            # Bytes, because numpy lacks types that these may have before they are refused.
            found = zlib.crc32(tensor.cpu().contiguous().view(torch.uint8).numpy(), found)
    return found


def _of_micro_batch(index: int, error: BatchError) -> BatchError:
    return BatchError(f"micro-batch {index}: {error}", **{**error.details, "micro_batch": index})


def problem_in_replica(checksum: int, group: dist.ProcessGroup, device: torch.device) -> BatchError | None:
    extremes = torch.tensor([checksum, -checksum], dtype=torch.int64, device=device)
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    largest, smallest = extremes.tolist()
    if largest == -smallest:
        return None
    return BatchError(
        "the ranks of one model replica (tensor, pipeline and context parallel) have different micro-batches; give each of "
        "them the same"
    )


def problem_between_ranks(
    count: int, refused: bool, kind: int, group: dist.ProcessGroup, device: torch.device
) -> BatchError | None:
    """Whether another rank of ``group`` refused its data, or has another number or kind of it. A collective."""
    # The largest negative is the smallest: one collective gives both ends of every fact.
    facts = [count, kind, group.rank() + 1 if refused else 0]
    extremes = torch.tensor([*facts, *(-fact for fact in facts)], device=device)
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    most_count, largest_kind, last_refusing, least_count, smallest_kind, _ = extremes.tolist()
    if last_refusing:
        rank = last_refusing - 1
        return BatchError(f"rank {rank} refused its micro-batches; nothing ran on any rank", rank=rank)
    if most_count != -least_count:
        return BatchError(
            f"this rank ({dist.get_rank()}) has {count} micro-batches, others have {-least_count} to "
            f"{most_count}; every rank needs the same number",
            micro_batches=count,
            least=-least_count,
            most=most_count,
        )
    if largest_kind != -smallest_kind:
        return BatchError(
            "forward_only, router_replay or the LoRA tenants with a loss differ between ranks; every rank must run the same "
            "kind of pass, with at least one sequence of each tenant"
        )
    return None
