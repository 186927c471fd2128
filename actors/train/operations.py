"""The atoms as calls on a group of training ranks: each waits for its result, or is submitted for a future."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Literal, overload

from actors.train.context import HandleRef
from actors.train.dispatch import join, split
from actors.train.loss import LossSender
from actors.train.ranks import TrainRanks
from rl_backend.contracts import (
    ForwardResult,
    HandleError,
    Head,
    LossFn,
    OptimizerConfig,
    PendingStepResult,
    RuntimeConfig,
    StepResult,
    TokenSequence,
)
from rl_backend.contracts.operations import ATOMS, Operation
from rl_backend.runtime import RouterReplay

if TYPE_CHECKING:
    from tensordict import TensorDictBase


class GroupFuture[R]:
    """Result of a submitted operation."""

    def __init__(self, name: str, wait: Callable[[float | None], R], ready: Callable[[], bool]) -> None:
        self.name = name
        self._wait = wait
        self._ready = ready
        self._lock = threading.Lock()
        self._result: tuple[R] | None = None
        self._error: Exception | None = None

    def result(self, timeout: float | None = None) -> R:
        """Waits for every rank.

        While nobody waits, nobody notices a failure: read the results of what was submitted.

        Args:
            timeout: seconds; the operation continues when they have passed, and ``result`` may be called again.

        Raises:
            TimeoutError: not done in time.
            GroupFailedError: a rank died, or left its peers in a collective; the group is gone.
            Exception: what the ranks raised, when all of them answered; the group continues.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._result is None:
                try:
                    self._result = (self._wait(timeout),)
                except TimeoutError:
                    raise
                except Exception as error:
                    self._error = error
                    raise
            return self._result[0]

    def done(self) -> bool:
        """Whether every rank has answered; does not wait."""
        return self._result is not None or self._error is not None or self._ready()


class BoundOperation[**P, R]:
    """One operation of one group."""

    def __init__(self, submit: Callable[P, GroupFuture[R]]) -> None:
        self._submit = submit
        functools.update_wrapper(self, submit)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Waits for the result; raises as :meth:`GroupFuture.result`."""
        return self._submit(*args, **kwargs).result()

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> GroupFuture[R]:
        """Starts the operation; it runs after those submitted before it."""
        return self._submit(*args, **kwargs)


class operation[G, **P, R]:  # noqa: N801, a decorator
    """Makes a method of a group that returns a future into an operation."""

    def __init__(self, method: Callable[Concatenate[G, P], GroupFuture[R]]) -> None:
        self._method = method
        functools.update_wrapper(self, method)  # type: ignore[arg-type]

    @overload
    def __get__(self, group: None, owner: type) -> operation[G, P, R]: ...
    @overload
    def __get__(self, group: G, owner: type) -> BoundOperation[P, R]: ...
    def __get__(self, group: G | None, owner: type) -> Any:
        if group is None:
            return self
        return BoundOperation(functools.wraps(self._method)(functools.partial(self._method, group)))


class TrainOperations:
    """What :class:`~actors.train.group.TrainGroup` does with its models; its own file says how a group lives and ends."""

    def _attach(self, config: RuntimeConfig, ranks: TrainRanks) -> None:
        self.config = config
        self._ranks = ranks
        self._losses = LossSender()

    @operation
    def build_model(
        self,
        *,
        forward_only: bool = False,
        name: str = "",
        head: Head = "log_probs",
        hf_path: Path | str | None = None,
        optimizer: OptimizerConfig | None = None,
    ) -> GroupFuture[HandleRef]:
        """As :meth:`~rl_backend.runtime.Runtime.build_model`, on every rank. ``hf_path`` must exist on every node."""
        return self.submit(
            "build_model",
            forward_only=forward_only,
            name=name,
            head=head,
            hf_path=None if hf_path is None else str(hf_path),
            optimizer=optimizer,
        )

    @operation
    def forward_backward(
        self,
        handle: HandleRef,
        sequences: Sequence[TokenSequence] | TensorDictBase,
        loss: LossFn | None,
        *,
        forward_only: bool = False,
        meta: Mapping[str, Any] | None = None,
        max_tokens_per_micro_batch: int | None = None,
        router_replay: RouterReplay = "off",
    ) -> GroupFuture[ForwardResult]:
        """Spreads sequences over the data-parallel ranks, runs them forward and backward, and merges the results.

        The model is in training mode, or in evaluation mode when ``forward_only``, for the length of the call.

        Args:
            sequences: a list, or a TensorDict with jagged fields (``sequences_from_tensordict``), on the CPU.
            loss: a :class:`~actors.train.loss.Loss`, or any callable that can be pickled. It is pickled at each call, and
                sent to the ranks when the pickle is not one of the last few. None if a forward-only pass wants only outputs.
            meta: as ``PackedBatch.meta``; see :func:`~rl_backend.data.packing.pack_plan` for what is added.
            max_tokens_per_micro_batch: at most the configuration's, which None takes.
            router_replay: as in :meth:`~rl_backend.runtime.Runtime.forward_backward`; what is recorded is the output
                ``routed_experts``.

        Returns:
            losses: per micro-batch, averaged over data-parallel ranks; their sum is what is minimised. metrics: over all
            ranks. outputs: in the order of ``sequences``, on the CPU.

        Raises:
            BatchError: data that does not fit its contract; refused before any rank has seen it.
            HandleError: a backward pass of a forward-only model, or a model of another group.
        """
        return self.submit(
            "forward_backward",
            loss,
            handle=handle,
            sequences=sequences,
            forward_only=forward_only,
            meta=meta,
            max_tokens_per_micro_batch=max_tokens_per_micro_batch,
            router_replay=router_replay,
        )

    @operation
    def forward(
        self,
        handle: HandleRef,
        sequences: Sequence[TokenSequence] | TensorDictBase,
        *,
        meta: Mapping[str, Any] | None = None,
        max_tokens_per_micro_batch: int | None = None,
        router_replay: RouterReplay = "off",
    ) -> GroupFuture[ForwardResult]:
        """Outputs alone: ``forward_backward`` with ``forward_only`` and no loss."""
        return self.forward_backward.submit(
            handle,
            sequences,
            None,
            forward_only=True,
            meta=meta,
            max_tokens_per_micro_batch=max_tokens_per_micro_batch,
            router_replay=router_replay,
        )

    @operation
    def zero_grad(self, handle: HandleRef) -> GroupFuture[None]:
        """Drops all gradients."""
        return self.submit("zero_grad", handle=handle)

    @operation
    def optimizer_step(self, handle: HandleRef) -> GroupFuture[StepResult]:
        """Clips and steps, or, when any rank's gradient is not finite, changes nothing and returns ``ok=False``."""
        return self.submit("optimizer_step", handle=handle)

    @operation
    def lr_scheduler_step(self, handle: HandleRef) -> GroupFuture[float]:
        """Advances the schedules by one step and returns the learning rate of the next optimizer step."""
        return self.submit("lr_scheduler_step", handle=handle)

    @operation
    def to(
        self,
        handle: HandleRef,
        device: Literal["cpu", "device"],
        *,
        model: bool = True,
        optimizer: bool = True,
        grad: bool = True,
    ) -> GroupFuture[None]:
        """Moves the chosen parts to host memory (``cpu``) or back to the training device (``device``)."""
        return self.submit("to", handle=handle, device=device, model=model, optimizer=optimizer, grad=grad)

    @operation
    def save_checkpoint(
        self,
        handle: HandleRef,
        path: Path | str,
        *,
        hf: bool = False,
        asynchronous: bool = False,
        extra: Mapping[str, Any] | None = None,
    ) -> GroupFuture[None]:
        """Writes a new directory, on a file system that every rank sees; see the runtime's method of that name."""
        return self.submit("save_checkpoint", handle=handle, path=str(path), hf=hf, asynchronous=asynchronous, extra=extra)

    @operation
    def wait_for_checkpoint(self, handle: HandleRef) -> GroupFuture[None]:
        """Waits until an asynchronous save of this model is complete; raises its error."""
        return self.submit("wait_for_checkpoint", handle=handle)

    @operation
    def checkpoint_is_pending(self, handle: HandleRef) -> GroupFuture[bool]:
        """Whether an asynchronous save of this model is still being written on some rank; raises its error."""
        return self.submit("checkpoint_is_pending", handle=handle)

    @operation
    def load_checkpoint(self, handle: HandleRef, path: Path | str) -> GroupFuture[dict[str, Any]]:
        """Restores what ``save_checkpoint`` wrote, and returns its ``extra``."""
        return self.submit("load_checkpoint", handle=handle, path=str(path))

    @operation
    def weight_version(self, handle: HandleRef) -> GroupFuture[int]:
        """The model's weight version, the same on every rank."""
        return self.submit("weight_version", handle=handle)

    def submit(self, name: str, loss: LossFn | None = None, /, **arguments: Any) -> GroupFuture[Any]:
        """Starts an operation by its name in :data:`~rl_backend.contracts.operations.ATOMS`.

        The methods of those names say what its arguments are. Of an :class:`~rl_backend.contracts.operations.Operation` of
        another group's journal, ``submit(operation.name, **operation.arguments)`` builds the same model again.

        Args:
            loss: sent to the ranks once.
        """
        return self._submit(name, Operation(name, arguments), loss)

    def _submit(self, title: str, operation: Operation, loss: LossFn | None = None) -> GroupFuture[Any]:
        ranks, atom = self._ranks, ATOMS[operation.name]
        handle = operation.arguments.get("handle")
        if handle is not None and handle.group_id != ranks.members.id:
            raise HandleError(f"model {handle.name!r} belongs to another training group", name=handle.name)
        most, members = self.config.max_tokens_per_micro_batch, len(ranks.members.workers)
        shares = split(operation, members, most, has_loss=loss is not None)
        header, refs = ranks.dispatch(title, shares.calls, None if loss is None else self._losses.send(loss))
        title = f"operation {header.number} ({title})"

        def finish(timeout: float | None) -> Any:
            values = ranks.collect(title, header.number, refs, timeout)
            result = join(operation, shares, values, ranks.members.id)
            if atom.builds:
                ranks.keep(Operation(operation.name, operation.arguments, header.number))
            if atom.join == "step" and result is None:
                return PendingStepResult(lambda: self.submit("step_result", handle=handle, number=header.number).result())
            return result

        return GroupFuture(title, finish, lambda: ranks.ready(refs))
