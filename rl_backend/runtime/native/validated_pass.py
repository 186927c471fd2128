"""Validated passes of a pipeline, which begin before it is known whether they count.

See :class:`~rl_backend.runtime.native.optimizer.PendingStep`.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rl_backend.contracts import BatchError, ForwardResult
from rl_backend.parallel.groups import ParallelGroups
from rl_backend.pipeline.executor import EmptyStages, PipelineExecutor
from rl_backend.runtime import batch_checks, saved_state
from rl_backend.runtime.native.forward_backward import abandoned_on_error
from rl_backend.runtime.native.handle import NativeHandle
from rl_backend.runtime.native.pipeline import PipelinePass, empty_hidden, pass_schedule
from rl_backend.runtime.passes import PassRequest


class Terms(NamedTuple):
    """The pass that a rank is asked to run.

    Attributes:
        refused: nothing runs.
        forward_only: nothing runs before all ranks have agreed.
        kind, checksum: as in :mod:`~rl_backend.runtime.batch_checks`.
        hidden_rows: for each micro-batch, the rows of hidden states between this rank and its neighbours.
    """

    refused: bool
    forward_only: bool
    kind: int
    checksum: int
    hidden_rows: tuple[int, ...]


class Agreement:
    """Agreement on a pass between the ranks of a pipeline, of which none waits for those after it.

    The terms of the first rank go down the pipeline ahead of its first activations, so that each rank knows before its first
    transfer what the rank before it does. Ranks of one stage, which compute in step anyway, agree by a collective. Whether
    any rank refuses is known at the end of the warm-up.

    Args:
        mine: what this rank was asked for.
        problem: why this rank refuses it.
        groups: with groups for validation.

    Attributes:
        terms: of the first rank: what the neighbours expect.
        runs: whether that is what all ranks of this stage want.
    """

    def __init__(self, mine: Terms, problem: BatchError | None, groups: ParallelGroups) -> None:
        assert groups.validation is not None, "the runtime opened them for post-validation"
        world, stage = groups.validation
        place, stride = groups.pp_group.rank(), world.size() // groups.pp_group.size()
        terms = mine if place == 0 else _receive(world, world.rank() - stride)
        problem = problem or _difference(mine, terms)
        if groups.token_group.size() > 1:
            difference = batch_checks.problem_in_replica(mine.checksum, groups.token_group, groups.device)
            problem = problem or difference
        stopped = problem
        if stage.size() > 1:
            count = len(mine.hidden_rows)
            stopped = batch_checks.problem_between_ranks(count, problem is not None, mine.kind, stage, groups.device)
            if stopped is not None and "rank" not in stopped.details:
                problem = stopped
        if place == 0:
            terms = terms._replace(refused=stopped is not None)
        self.terms = terms
        self.runs = stopped is None and not terms.refused
        self._departing = _send(terms, world, world.rank() + stride) if place + 1 < groups.pp_group.size() else []
        self._problem = problem
        self._refusing = torch.tensor([0 if problem is None else world.rank() + 1])
        self._known: dist.Work = dist.all_reduce(self._refusing, dist.ReduceOp.MAX, group=world, async_op=True)

    def problem(self) -> BatchError | None:
        """What is wrong on this rank, or which other rank refuses. Waits for all ranks; None on all or on none."""
        for work, _ in self._departing:
            work.wait()
        self._known.wait()
        refusing = int(self._refusing.item())
        return self._problem or (batch_checks.refused_by(refusing - 1) if refusing else None)


def _difference(mine: Terms, first: Terms) -> BatchError | None:
    if first.refused:
        return None
    if mine.kind != first.kind:
        return batch_checks.different_kinds()
    return batch_checks.different_in_replica() if mine != first else None


def _send(terms: Terms, group: dist.ProcessGroup, rank: int) -> list[tuple[dist.Work, Tensor]]:
    # Two messages: the receiver learns from the first how long the second is.
    head = [terms.refused, terms.forward_only, terms.kind, terms.checksum, len(terms.hidden_rows)]
    messages = [torch.tensor(numbers, dtype=torch.int64) for numbers in (head, terms.hidden_rows)]
    sent = [(dist.isend(message, group=group, group_dst=rank), message) for message in messages]
    return [(work, message) for work, message in sent if work is not None]


def _receive(group: dist.ProcessGroup, rank: int) -> Terms:
    head = torch.empty(5, dtype=torch.int64)
    dist.recv(head, group=group, group_src=rank)
    refused, forward_only, kind, checksum, count = head.tolist()
    hidden_rows = torch.empty(count, dtype=torch.int64)
    dist.recv(hidden_rows, group=group, group_src=rank)
    return Terms(bool(refused), bool(forward_only), kind, checksum, tuple(hidden_rows.tolist()))


def run_validated(handle: NativeHandle, request: PassRequest, problem: BatchError | None) -> ForwardResult:
    """As :func:`~rl_backend.runtime.native.pipeline.run_pipeline`, before all ranks have agreed and settled the last step.

    Forward passes of a training pass begin at once. Before the first loss and the first backward pass a rank waits until it
    knows that no rank refuses its data and that the last step was taken rightly. Otherwise the pass is abandoned on all
    ranks and, where only the step was wrong, runs again. A loss never sees outputs of weights that are taken back.

    Args:
        problem: why this rank refuses the data.

    Raises:
        BatchError: on every rank, when one refuses its data or has other data; nothing has changed.
    """
    one = None if problem is not None else PipelinePass(handle, request)
    terms = Terms(
        refused=problem is not None,
        forward_only=request.forward_only,
        kind=request.kind,
        checksum=batch_checks.checksum(request.data),
        hidden_rows=() if one is None else one.hidden_rows,
    )
    handle.num_passes += 1
    agreement = Agreement(terms, problem, handle.groups)
    if one is None or request.forward_only or not agreement.runs:
        _stand_in(handle, agreement)
        assert one is not None, "all ranks have raised"
    else:
        result = _warmed_up(handle, one, agreement)
        if result is not None:
            return result
        handle.num_passes += 1
        one = PipelinePass(handle, request)
    with abandoned_on_error(handle, request.forward_only):
        one.run()
    return one.result()


def _warmed_up(handle: NativeHandle, one: PipelinePass, agreement: Agreement) -> ForwardResult | None:
    """A training pass; None when it has been abandoned because the last step was wrong.

    Raises:
        BatchError: on every rank, when one refuses its data.
    """
    random = saved_state.random_state(handle.groups.device)
    with abandoned_on_error(handle, forward_only=False):
        one.warm_up()
        was_plain = handle.settle_everywhere()
        problem = agreement.problem()
        if problem is None and was_plain:
            one.run()
        else:
            one.abandon()
    if problem is not None:
        raise problem
    if was_plain:
        return one.result()
    saved_state.restore_random_state(random, handle.groups.device)
    return None


def _stand_in(handle: NativeHandle, agreement: Agreement) -> None:
    """Waits for all ranks; where others run a warm-up, takes part in its transfers.

    Raises:
        BatchError: on every rank, when one refuses its data.
    """
    handle.settle_everywhere()
    terms = agreement.terms
    executor = None
    if not (terms.refused or terms.forward_only):
        schedule = pass_schedule(handle, len(terms.hidden_rows), forward_only=False)
        hidden = [empty_hidden(handle, rows) for rows in terms.hidden_rows]
        executor = PipelineExecutor(schedule, handle.groups.pp_group, EmptyStages(hidden))
        executor.warm_up()
    problem = agreement.problem()
    if executor is not None:
        executor.abandon()
    if problem is not None:
        raise problem
