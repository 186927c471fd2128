"""The atoms as calls on a group of training ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ray import cloudpickle

from actors.train import atoms as train_atoms
from actors.train.context import HandleRef
from actors.train.future import GroupFuture, operation
from actors.train.ranks import TrainRanks
from actors.train.results import merge_forward
from actors.train.sent_loss import LossSender
from actors.train.worker import SentLoss
from rl_backend.contracts import (
    BatchError,
    ForwardResult,
    HandleError,
    Head,
    LossFn,
    OptimizerConfig,
    RLBackendError,
    RuntimeConfig,
    StepResult,
    TokenSequence,
)
from rl_backend.data import check_same_fields, pack_plan, plan_micro_batches
from rl_backend.runtime import RouterReplay

if TYPE_CHECKING:
    from tensordict import TensorDictBase


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

        def finish(built: list[train_atoms.BuiltModel]) -> HandleRef:
            size = built[0].data_parallel_size
            sources = {entry.data_parallel_rank: rank for rank, entry in enumerate(built) if entry.is_source}
            if sorted(sources) != list(range(size)) or sum(entry.is_source for entry in built) != size:
                raise RLBackendError(
                    f"the runtime names ranks {sorted(sources.values())} as sources of the outputs of data-parallel ranks "
                    f"{sorted(sources)}; expected one for each of {size}"
                )
            return HandleRef(
                self._ranks.members.id,
                built[0].key,
                built[0].name,
                forward_only,
                tuple(entry.data_parallel_rank for entry in built),
                tuple(sources[dp_rank] for dp_rank in range(size)),
                head,
                built[0].micro_batch_multiple,
            )

        arguments = (forward_only, name, head, None if hf_path is None else str(hf_path), optimizer)
        return self._submit("build_model", train_atoms.build_model, arguments, finish)

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
            sequences: a list, or a TensorDict with jagged fields (see :mod:`rl_backend.data.tensordict`), on the CPU.
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
        self._check_handle(handle)
        if handle.forward_only and not forward_only:
            raise HandleError(f"model {handle.name!r} is forward-only; a backward pass needs gradients", name=handle.name)
        if loss is None and not forward_only:
            raise BatchError("loss=None: only a forward_only pass can do without a loss")
        rows = _sequences(sequences)
        budget = self._budget(max_tokens_per_micro_batch)
        check_same_fields(rows)
        seq_lens = [len(sequence) for sequence in rows]
        plan = plan_micro_batches(seq_lens, handle.data_parallel_size, budget, multiple_of=handle.micro_batch_multiple)
        packed = pack_plan(rows, plan, meta)
        by_dp_rank = [
            cloudpickle.dumps(
                (
                    train_atoms.forward_backward,
                    (handle, batches, forward_only, router_replay),
                    {"loss_fn": None} if loss is None else {},
                )
            )
            for batches in packed
        ]
        calls = [by_dp_rank[dp_rank] for dp_rank in handle.data_parallel_ranks]
        sent = None if loss is None else self._losses.send(loss)
        return self._dispatch(
            "forward_backward", calls, lambda values: merge_forward(handle, plan, seq_lens, values), loss=sent
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
        return self._submit("zero_grad", train_atoms.zero_grad, (self._check_handle(handle),), _first)

    @operation
    def optimizer_step(self, handle: HandleRef) -> GroupFuture[StepResult]:
        """Clips and steps, or, when any rank's gradient is not finite, changes nothing and returns ``ok=False``."""
        return self._submit("optimizer_step", train_atoms.optimizer_step, (self._check_handle(handle),), _first)

    @operation
    def lr_scheduler_step(self, handle: HandleRef) -> GroupFuture[float]:
        """Advances the schedules by one step and returns the learning rate of the next optimizer step."""
        return self._submit("lr_scheduler_step", train_atoms.lr_scheduler_step, (self._check_handle(handle),), _first)

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
        return self._submit("to", train_atoms.move, (self._check_handle(handle), device, model, optimizer, grad), _first)

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
        arguments = (self._check_handle(handle), str(path), hf, asynchronous, extra)
        return self._submit("save_checkpoint", train_atoms.save_checkpoint, arguments, _first)

    @operation
    def wait_for_checkpoint(self, handle: HandleRef) -> GroupFuture[None]:
        """Waits until an asynchronous save of this model is complete; raises its error."""
        arguments = (self._check_handle(handle),)
        return self._submit("wait_for_checkpoint", train_atoms.wait_for_checkpoint, arguments, _first)

    @operation
    def checkpoint_is_pending(self, handle: HandleRef) -> GroupFuture[bool]:
        """Whether an asynchronous save of this model is still being written on some rank; raises its error."""
        arguments = (self._check_handle(handle),)
        return self._submit("checkpoint_is_pending", train_atoms.checkpoint_is_pending, arguments, any)

    @operation
    def load_checkpoint(self, handle: HandleRef, path: Path | str) -> GroupFuture[dict[str, Any]]:
        """Restores what ``save_checkpoint`` wrote, and returns its ``extra``."""
        arguments = (self._check_handle(handle), str(path))
        return self._submit("load_checkpoint", train_atoms.load_checkpoint, arguments, _first)

    @operation
    def weight_version(self, handle: HandleRef) -> GroupFuture[int]:
        """The model's weight version, the same on every rank."""

        def finish(versions: list[int]) -> int:
            if len(set(versions)) != 1:
                raise RLBackendError(f"ranks disagree on the weight version of {handle.name!r}: {versions}")
            return versions[0]

        return self._submit("weight_version", train_atoms.weight_version, (self._check_handle(handle),), finish)

    def _budget(self, wanted: int | None) -> int:
        most = self.config.max_tokens_per_micro_batch
        if wanted is not None and wanted > most:
            raise BatchError(
                f"max_tokens_per_micro_batch={wanted} is more than the configuration's {most}; ask for less, or build the "
                "group with a larger RuntimeConfig.max_tokens_per_micro_batch"
            )
        return most if wanted is None else wanted

    def _check_handle(self, handle: HandleRef) -> HandleRef:
        if handle.group_id != self._ranks.members.id:
            raise HandleError(f"model {handle.name!r} belongs to another training group", name=handle.name)
        return handle

    def _submit[T, R](
        self,
        name: str,
        function: Callable[..., T],
        arguments: tuple[Any, ...],
        finish: Callable[[list[T]], R],
        keywords: Mapping[str, Any] | None = None,
    ) -> GroupFuture[R]:
        call = cloudpickle.dumps((function, arguments, dict(keywords or {})))
        return self._dispatch(name, [call] * len(self._ranks.members.workers), finish)

    def _dispatch[R](
        self, name: str, calls: Sequence[bytes], finish: Callable[[list[Any]], R], loss: SentLoss | None = None
    ) -> GroupFuture[R]:
        ranks = self._ranks
        header, refs = ranks.dispatch(name, calls, loss)
        title = f"operation {header.number} ({name})"
        return GroupFuture(
            title,
            lambda timeout: finish(ranks.collect(title, header.number, refs, timeout)),
            lambda: ranks.ready(refs),
        )


def _sequences(sequences: Sequence[TokenSequence] | TensorDictBase) -> Sequence[TokenSequence]:
    if not isinstance(sequences, Sequence):
        from rl_backend.data.tensordict import sequences_from_tensordict

        return sequences_from_tensordict(sequences)
    return sequences


def _first[T](values: list[T]) -> T:
    return values[0]
