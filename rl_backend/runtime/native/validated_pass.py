"""A pipeline's pass that begins before it is known whether it counts; see :mod:`~rl_backend.runtime.native.pending_step`."""

from __future__ import annotations

from collections.abc import Sequence

from rl_backend.contracts import BatchError, ForwardResult, LossFn, PackedBatch
from rl_backend.pipeline.executor import EmptyStages, PipelineExecutor
from rl_backend.runtime import saved_state
from rl_backend.runtime.native.agreement import Agreement, Terms
from rl_backend.runtime.native.forward_backward import abandoned_on_error
from rl_backend.runtime.native.handle import NativeHandle
from rl_backend.runtime.native.pipeline import PipelinePass, empty_hidden, pass_schedule
from rl_backend.runtime.pass_checks import checksum, kind_of_pass
from rl_backend.runtime.router_replay import RouterReplay


def run_validated(
    handle: NativeHandle,
    data: Sequence[PackedBatch],
    loss_fn: LossFn | None,
    problem: BatchError | None,
    *,
    forward_only: bool,
    keep_gathered: bool,
    router_replay: RouterReplay,
) -> ForwardResult:
    """As :func:`~rl_backend.runtime.native.pipeline.run_pipeline`, before all ranks have agreed and settled the last step.

    Forward passes of a training pass begin at once. Before the first loss and the first backward pass a rank waits until it
    knows that no rank refuses its data and that the last step was taken rightly. Otherwise the pass is abandoned on all
    ranks and, where only the step was wrong, runs again. A loss never sees outputs of weights that are taken back.

    Args:
        problem: why this rank refuses ``data``.

    Raises:
        BatchError: on every rank, when one refuses its data or has other data; nothing has changed.
    """

    def new_pass() -> PipelinePass:
        return PipelinePass(
            handle, data, loss_fn, forward_only=forward_only, keep_gathered=keep_gathered, router_replay=router_replay
        )

    one = None if problem is not None else new_pass()
    terms = Terms(
        refused=problem is not None,
        forward_only=forward_only,
        kind=kind_of_pass(forward_only, router_replay),
        checksum=checksum(data),
        hidden_rows=() if one is None else one.hidden_rows,
    )
    handle.num_passes += 1
    agreement = Agreement(terms, problem, handle.groups)
    if one is None or forward_only or not agreement.runs:
        _stand_in(handle, agreement)
        assert one is not None, "all ranks have raised"
    else:
        result = _warmed_up(handle, one, agreement)
        if result is not None:
            return result
        handle.num_passes += 1
        one = new_pass()
    with abandoned_on_error(handle, forward_only):
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
    if terms.has_warm_up:
        schedule = pass_schedule(handle, len(terms.hidden_rows), forward_only=False)
        hidden = [empty_hidden(handle, rows) for rows in terms.hidden_rows]
        executor = PipelineExecutor(schedule, handle.groups.pp_group, EmptyStages(hidden))
        executor.warm_up()
    problem = agreement.problem()
    if executor is not None:
        executor.abandon()
    if problem is not None:
        raise problem
