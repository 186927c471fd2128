"""The atoms as calls on a group of training ranks: each waits for its result, or is submitted for a future."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Literal

from actors.train.context import HandleRef, RankContext
from actors.train.dispatch import join, split
from actors.train.future import GroupFuture, operation
from actors.train.loss import LossSender
from actors.train.outcome import Apart
from actors.train.ranks import TrainRanks
from actors.train.tenants import TenantOperations
from rl_backend.contracts import (
    ForwardResult,
    HandleError,
    Head,
    Losses,
    OptimizerConfig,
    PendingStepResult,
    RuntimeConfig,
    TokenSequence,
)
from rl_backend.contracts.atoms import ATOMS, Operation
from rl_backend.runtime import RouterReplay

if TYPE_CHECKING:
    from tensordict import TensorDictBase


class TrainOperations(TenantOperations):
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
        trainable: bool = True,
        name: str = "",
        head: Head = "log_probs",
        hf_path: Path | str | None = None,
        optimizer: OptimizerConfig | None = None,
    ) -> GroupFuture[HandleRef]:
        """As :meth:`~rl_backend.runtime.Runtime.build_model`, on every rank. ``hf_path`` must exist on every node."""
        return self.submit(
            "build_model",
            forward_only=forward_only,
            # A plugin's runtime that knows no tenants need not take it.
            **({} if trainable else {"trainable": False}),
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
        loss: Losses | None,
        *,
        forward_only: bool = False,
        meta: Mapping[str, Any] | None = None,
        max_tokens_per_micro_batch: int | None = None,
        router_replay: RouterReplay = "off",
    ) -> GroupFuture[ForwardResult]:
        """Spreads sequences over the data-parallel ranks, runs them forward and backward, and merges the results.

        The model is in training mode, or in evaluation mode when ``forward_only``, for the length of the call. Where the
        number of sequences cannot give every rank as many micro-batches, copies with a ``loss_mask`` of zeros join them; a
        batch with a loss and without the token field ``loss_mask`` is refused then.

        Args:
            sequences: a list, or a TensorDict with jagged fields (``sequences_from_tensordict``), on the CPU.
            loss: a :class:`~actors.train.loss.Loss`, or any callable that can be pickled. It is pickled at each call, and
                sent to the ranks when the pickle is not one of the last few. None if a forward-only pass wants only outputs.
                For sequences of several LoRA tenants one of each, by the tenant's name.
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
    def zero_grad(self, handle: HandleRef | Sequence[HandleRef]) -> GroupFuture[None]:
        """Drops all gradients, of one handle or several."""
        return self.submit("zero_grad", handle=_one_or_list(handle))

    @operation
    def optimizer_step(self, handle: HandleRef | Sequence[HandleRef]) -> GroupFuture[Any]:
        """Clips and steps, or, when any rank's gradient is not finite, changes nothing and returns ``ok=False``.

        Of several LoRA tenants a list of results, in their order; each is skipped by itself.
        """
        return self.submit("optimizer_step", handle=_one_or_list(handle))

    @operation
    def lr_scheduler_step(self, handle: HandleRef | Sequence[HandleRef]) -> GroupFuture[Any]:
        """Advances the schedules by one step and returns the learning rate of the next optimizer step; a list of several."""
        return self.submit("lr_scheduler_step", handle=_one_or_list(handle))

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

    def run_on_ranks[**P, R](
        self, function: Callable[Concatenate[RankContext, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        """Calls ``function(context, *args, **kwargs)`` in every rank's process as one operation; one result per rank.

        ``context`` is the rank's :class:`~actors.train.context.RankContext`. The function must call
        the runtime on every rank alike, because the runtime's calls are collectives. Of a large result that this process
        only hands on, return an :class:`~actors.train.outcome.Apart`.
        """
        return self.submit_on_ranks(function, *args, **kwargs).result()

    def submit_on_ranks[**P, R](
        self, function: Callable[Concatenate[RankContext, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> GroupFuture[list[R]]:
        """As :meth:`run_on_ranks`, for a future."""
        name = getattr(function, "__qualname__", type(function).__name__)
        call = Operation("run_on_ranks", {"function": function, "args": args, "kwargs": kwargs})
        return self._submit(f"run_on_ranks({name})", call)

    def submit(self, name: str, loss: Losses | None = None, /, **arguments: Any) -> GroupFuture[Any]:
        """Starts an operation by its name in :data:`~rl_backend.contracts.atoms.ATOMS`.

        The methods of those names say what its arguments are.

        Args:
            loss: sent to the ranks once.
        """
        return self._submit(name, Operation(name, arguments), loss)

    def replay(self, journal: Sequence[Operation]) -> dict[int, HandleRef]:
        """Builds the models and LoRA tenants of another group's journal again, without their weights and optimizers.

        Returns:
            ``key`` of each handle of that group -> the handle here.
        """
        built: dict[int, HandleRef] = {}
        for each in journal:
            given = {
                name: built[value.key] if isinstance(value, HandleRef) else value for name, value in each.arguments.items()
            }
            built[each.number] = self.submit(each.name, **given).result()
        return built

    def _submit(self, title: str, operation: Operation, loss: Losses | None = None) -> GroupFuture[Any]:
        ranks, atom = self._ranks, ATOMS[operation.name]
        handle = operation.arguments.get("handle")
        for each in handle if isinstance(handle, list) else [handle] if handle is not None else []:
            if each.group_id != ranks.members.id:
                raise HandleError(f"model {each.name!r} belongs to another training group", name=each.name)
        most, members = self.config.max_tokens_per_micro_batch, len(ranks.members.workers)
        shares = split(operation, members, most, has_loss=loss is not None)
        header, refs = ranks.dispatch(title, shares.calls, None if loss is None else self._losses.send(loss))
        title = f"operation {header.number} ({title})"
        outcomes = [outcome for outcome, _ in refs]

        def finish(timeout: float | None) -> Any:
            values = ranks.collect(title, header.number, outcomes, timeout)
            values = [
                value._replace(stored=stored) if isinstance(value, Apart) else value
                for value, (_, stored) in zip(values, refs, strict=True)
            ]
            result = join(operation, shares, values, ranks.members.id)
            if atom.builds:
                # By its name: one that the runtime chose depends on what was built before.
                ranks.keep(Operation(operation.name, {**operation.arguments, "name": result.name}, header.number))
            if atom.frees and handle is not None:
                ranks.forget(handle.key)
            if atom.join == "step" and result is None:
                return PendingStepResult(lambda: self.submit("step_result", handle=handle, number=header.number).result())
            return result

        return GroupFuture(title, finish, lambda: ranks.ready(outcomes))


def _one_or_list(handle: HandleRef | Sequence[HandleRef]) -> HandleRef | list[HandleRef]:
    return handle if isinstance(handle, HandleRef) else list(handle)
