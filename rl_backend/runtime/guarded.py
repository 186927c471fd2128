"""Runtimes whose atoms check their model first, as :mod:`rl_backend.contracts.operations` declares."""

import gc
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from rl_backend.contracts import (
    BatchError,
    ConfigError,
    ForwardResult,
    HandleError,
    Head,
    LossFn,
    OptimizerConfig,
    PackedBatch,
    PendingStepResult,
    RuntimeConfig,
    StepResult,
    TensorInfo,
)
from rl_backend.contracts.operations import ATOMS, Part
from rl_backend.parallel.groups import RankGroups
from rl_backend.runtime.batch_checks import check_micro_batches
from rl_backend.runtime.checkpoint_writer import CheckpointWriter
from rl_backend.runtime.engine import Engine, GuardedHandle, PassRequest
from rl_backend.runtime.interface import RankPlace, Runtime
from rl_backend.runtime.router_replay import RouterReplay


class GuardedRuntime[H: GuardedHandle, G: RankGroups](Engine[H], Runtime[H]):
    """Every atom checks its model, then calls the engine of the subclass.

    Keeps the handles that it built, refuses others, and frees them on ``close``.
    """

    def __init__(self, config: RuntimeConfig, groups: G, close_groups: Callable[[G], None]) -> None:
        super().__init__(config)
        self.groups = groups
        self._close_groups = close_groups
        self._writer = CheckpointWriter(groups.host_group)
        self._handles: list[H] = []
        self._closed = False

    @property
    def place(self) -> RankPlace:
        groups = self.groups
        return RankPlace(groups.device, groups.dp_rank, groups.dp_size, groups.dp_group, self._is_source())

    def build_model(
        self,
        *,
        forward_only: bool = False,
        name: str = "",
        head: Head = "log_probs",
        hf_path: Path | str | None = None,
        optimizer: OptimizerConfig | None = None,
    ) -> H:
        self._require_open()
        config = self.config
        if head not in get_args(Head.__value__):
            raise ConfigError.of("head", head, f"expected one of {', '.join(map(repr, get_args(Head.__value__)))}")
        if hf_path is not None:
            config = config.replace(hf_path=str(hf_path))
        if optimizer is not None:
            if forward_only:
                raise ConfigError.of("optimizer", optimizer, "a forward-only model has none; leave one of the two out")
            config = config.replace(backend_cfg=config.backend_cfg.replace(optimizer=optimizer))
        with self._engine():
            handle = self._build(config, name or f"model-{len(self._handles) + 1}", head, forward_only=forward_only)
        self._handles.append(handle)
        return handle

    def train_mode(self, handle: H) -> AbstractContextManager[None]:
        self._require(handle, "train_mode")
        return handle.training(True)

    def eval_mode(self, handle: H) -> AbstractContextManager[None]:
        self._require(handle, "eval_mode")
        return handle.training(False)

    def zero_grad(self, handle: H) -> None:
        with self._atom(handle, "zero_grad"):
            handle.drop_gradients()
        handle.broken = ""

    def forward_backward(
        self,
        handle: H,
        data: Sequence[PackedBatch],
        loss_fn: LossFn | None,
        *,
        forward_only: bool = False,
        router_replay: RouterReplay = "off",
    ) -> ForwardResult:
        """See the base class. Every rank of a model replica is given the same ``data``.

        After an error in the middle (in the loss, out of memory) the handle takes forward-only passes; backward passes and
        steps are refused until ``zero_grad``, because its gradients are incomplete. An error of one rank alone leaves the
        others in a collective until that times out; a ``TrainGroup`` stops them at once.
        """
        with self._atom(handle, "forward_backward", forward_only=forward_only):
            handle.require_replayable(router_replay)
            if loss_fn is None and not forward_only:
                raise BatchError("forward_backward without loss_fn; pass one, or forward_only=True")
            return self._run_passes(handle, PassRequest(data, loss_fn, forward_only, router_replay))

    def optimizer_step(self, handle: H) -> StepResult:
        with self._atom(handle, "optimizer_step"):
            result = handle.step()
        # A pending step advances the version once it is settled.
        if not isinstance(result, PendingStepResult) and result.ok:
            handle.weight_version += 1
        return result

    def lr_scheduler_step(self, handle: H) -> float:
        with self._atom(handle, "lr_scheduler_step"):
            return handle.trainer("lr_scheduler_step").schedule_step()  # type: ignore[no-any-return]

    def to(
        self, handle: H, device: Literal["cpu", "device"], *, model: bool = True, optimizer: bool = True, grad: bool = True
    ) -> None:
        """See the base class. A part that a handle does not have (a forward-only one has a model only) is nothing to move.

        On a CPU runtime the same bookkeeping and copies happen, without saving memory. Host buffers of a CUDA runtime are
        pinned and kept for the next trip.

        Raises:
            HandleError: ``device`` is neither ``cpu`` nor ``device``.
        """
        with self._atom(handle, "to"):
            if device not in ("cpu", "device"):
                raise HandleError(f"to(device={device!r}): expected 'cpu' or 'device'", device=str(device))
            wanted: dict[Part, bool] = {"model": model, "optimizer": optimizer, "grad": grad}
            for part, tensors in handle.part_tensors().items():
                if wanted[part]:
                    handle.offload.reload(part) if device == "device" else handle.offload.offload(part, tensors)

    def weight_infos(self, handle: H, *, dtype: torch.dtype | None = None) -> tuple[TensorInfo, ...]:
        self._require(handle, "weight_infos")
        infos = handle.weights
        return infos if dtype is None else tuple(TensorInfo.of(each.name, each.shape, dtype) for each in infos)

    def export_weights(
        self,
        handle: H,
        *,
        dtype: torch.dtype | None = None,
        byte_budget: int | None = None,
        names: Collection[str] | None = None,
    ) -> Iterator[tuple[str, Tensor]]:
        """See the base class; tensors are on the training device. The result is a generator: ``close()`` ends it early."""
        with self._atom(handle, "export_weights"):
            stream = self._gather_weights(handle, dtype, byte_budget, names)
        return self._stream_in_engine(stream)

    def export_gradients(self, handle: H, *, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """See the base class; tensors are on the training device."""
        with self._atom(handle, "export_gradients"):
            stream = self._gather_gradients(handle, names)
        return self._stream_in_engine(stream)

    def activations(self, handle: H, data: Sequence[PackedBatch]) -> list[Mapping[str, Tensor]]:
        with self._atom(handle, "activations"), self.eval_mode(handle):
            check_micro_batches(handle, PassRequest(data, None, forward_only=True))
            return self._record_activations(handle, data)

    def save_checkpoint(
        self,
        handle: H,
        path: Path | str,
        *,
        hf: bool = False,
        asynchronous: bool = False,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """See the base class. ``hf`` with ``asynchronous`` is refused."""
        with self._atom(handle, "save_checkpoint", hf=hf):
            if hf:
                self._writer.save_hf(
                    handle,
                    Path(path),
                    lambda: self._gather_weights(handle, None, None, None),
                    asynchronous=asynchronous,
                    extra=extra,
                )
            else:
                self._writer.save_training_state(
                    handle, Path(path), lambda: self._training_state(handle), asynchronous=asynchronous, extra=extra
                )

    def wait_for_checkpoint(self, handle: H) -> None:
        self._require(handle, "wait_for_checkpoint")
        self._writer.wait(handle)

    def checkpoint_is_pending(self, handle: H) -> bool:
        self._require(handle, "checkpoint_is_pending")
        return self._writer.is_pending(handle)

    def load_checkpoint(self, handle: H, path: Path | str) -> dict[str, Any]:
        """See the base class. The layout and the world size may differ from those that saved.

        Random state is that of :func:`~rl_backend.runtime.saved_state.source_rank`; where there is none it stays.
        """
        with self._atom(handle, "load_checkpoint"):
            self._writer.wait()
            manifest = self._load_training_state(handle, Path(path))
            if not handle.forward_only:
                handle.drop_gradients()
        return manifest.extra

    def is_mp_src_rank_with_outputs(self, handle: H) -> bool:
        self._require(handle, "is_mp_src_rank_with_outputs")
        return self._is_source()

    def close(self) -> None:
        """Waits for an asynchronous save, then frees; raises that save's error at the end.

        A step that other ranks still have a part of is waited for first.
        """
        if self._closed:
            return
        self._closed = True
        with ExitStack() as last_first:
            # Models are cycles of references; until they are collected, they keep memory and process groups their threads.
            last_first.callback(gc.collect)
            last_first.callback(self._close_groups, self.groups)
            last_first.callback(self._handles.clear)
            for handle in self._handles:
                last_first.callback(handle.release)
            last_first.callback(self._writer.close)
            for handle in self._handles:
                last_first.callback(handle.settle)

    # The guards.

    @contextmanager
    def _atom(self, handle: H, operation: str, **arguments: bool) -> Generator[None]:
        """Around an atom of the engine, once :meth:`_require` has found nothing wrong."""
        self._require(handle, operation, **arguments)
        with self._engine():
            yield

    def _require(self, handle: H, operation: str, **arguments: bool) -> None:
        """Raises :class:`HandleError` for a model that lacks what ``operation`` needs."""
        self._require_open()
        if not isinstance(handle, GuardedHandle) or handle.owner is not self:
            raise HandleError(
                f"handle {getattr(handle, 'name', handle)!r} is closed or belongs to another runtime; use the runtime that "
                "built it"
            )
        atom = ATOMS[operation]
        needs = atom.needs_with(arguments.get(atom.flag))
        if needs.weights and handle.damaged:
            raise HandleError(f"{handle.name!r} has no usable weights: {handle.damaged}; load a complete checkpoint")
        if needs.settled == "here":
            handle.settle()
        elif needs.settled == "everywhere":
            handle.settle_everywhere()
        if needs.trained:
            handle.trainer(operation + needs.form)
        handle.offload.require(operation, *needs.parts)
        if needs.whole_gradients and handle.broken:
            raise HandleError(f"{operation} on {handle.name!r}: {handle.broken}; call zero_grad first", handle=handle.name)

    def _require_open(self) -> None:
        if self._closed:
            raise HandleError("this runtime is closed; create another one")
