"""Runtimes whose atoms check their model first, as :mod:`rl_backend.contracts.atoms` declares."""

import gc
import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, get_args, overload

from torch import Tensor

from rl_backend.checkpoint.hf_reader import require_float_weights
from rl_backend.checkpoint.kept_weights import STALE, describe_kept
from rl_backend.contracts import (
    BatchError,
    ConfigError,
    ForwardResult,
    HandleError,
    Head,
    Losses,
    OptimizerConfig,
    PackedBatch,
    PendingStepResult,
    RuntimeConfig,
    StepResult,
)
from rl_backend.contracts.atoms import ATOMS, Part
from rl_backend.parallel.groups import RankGroups
from rl_backend.runtime.batch_checks import check_micro_batches
from rl_backend.runtime.checkpoint_writer import CheckpointWriter
from rl_backend.runtime.engine import GuardedHandle
from rl_backend.runtime.interface import RankPlace
from rl_backend.runtime.passes import PassRequest
from rl_backend.runtime.router_replay import RouterReplay
from rl_backend.runtime.tenant import TenantHandle
from rl_backend.runtime.tenants import TenantRuntime

logger = logging.getLogger(__name__)


class GuardedRuntime[H: GuardedHandle, G: RankGroups](TenantRuntime[H]):
    """Every atom checks its model, then calls the engine of the subclass.

    Keeps the handles that it built, refuses others, and frees them on ``close``.
    """

    def __init__(self, config: RuntimeConfig, groups: G, close_groups: Callable[[G], None]) -> None:
        super().__init__(config)
        self.groups = groups
        self._close_groups = close_groups
        self._writer = CheckpointWriter(groups.host_group)
        self._handles: list[H] = []
        self._tenants = {}
        self._num_tenants = 0
        self._closed = False

    @property
    def place(self) -> RankPlace:
        groups = self.groups
        return RankPlace(groups.device, groups.dp_rank, groups.dp_size, groups.dp_group, self._is_source())

    def build_model(
        self,
        *,
        forward_only: bool = False,
        trainable: bool = True,
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
            if forward_only or not trainable:
                raise ConfigError.of("optimizer", optimizer, "a model that is not trained has none; leave it out")
            config = config.replace(backend_cfg=config.backend_cfg.replace(optimizer=optimizer))
        require_float_weights(config.hf_path)
        with self._engine():
            handle = self._build(
                config,
                name or f"model-{len(self._handles) + 1}",
                head,
                forward_only=forward_only or not trainable,
                adaptable=not trainable and not forward_only,
            )
        self._handles.append(handle)
        if handle.kept and not handle.forward_only and self.groups.world_group.rank() == 0:
            logger.warning("%s of %s are kept as they are there: %s", describe_kept(handle.kept), config.hf_path, STALE)
        return handle

    def train_mode(self, handle: H) -> AbstractContextManager[None]:
        self._require(handle, "train_mode")
        return handle.training(True)

    def eval_mode(self, handle: H) -> AbstractContextManager[None]:
        self._require(handle, "eval_mode")
        return handle.training(False)

    def zero_grad(self, handle: H | Sequence[Any]) -> None:
        with self._atoms(handle, "zero_grad") as handles:
            for each in handles:
                each.drop_gradients()
                each.broken = ""

    def forward_backward(
        self,
        handle: H,
        data: Sequence[PackedBatch],
        loss_fn: Losses | None,
        *,
        forward_only: bool = False,
        router_replay: RouterReplay = "off",
    ) -> ForwardResult:
        """See the base class. Every rank of a model replica is given the same ``data``.

        After an error in the middle (in the loss, out of memory) the handle takes forward-only passes; backward passes and
        steps are refused until ``zero_grad``, because its gradients are incomplete. An error of one rank alone leaves the
        others in a collective until that times out; a ``TrainGroup`` stops them at once.
        """
        mixed = self._is_mixed(handle, data, loss_fn)
        with self._atom(handle, "forward_backward", forward_only=forward_only or mixed):
            handle.require_replayable(router_replay)
            if loss_fn is None and not forward_only:
                raise BatchError("forward_backward without loss_fn; pass one, or forward_only=True")
            run = self._run_tenants if mixed else self._run
            return run(handle, data, loss_fn, forward_only=forward_only, router_replay=router_replay)

    @overload
    def optimizer_step(self, handle: H) -> StepResult: ...
    @overload
    def optimizer_step(self, handle: Sequence[Any]) -> list[StepResult]: ...
    def optimizer_step(self, handle: Any) -> Any:
        if isinstance(handle, Sequence):
            return self._step_tenants(handle)
        with self._atom(handle, "optimizer_step"):
            result = handle.step()
        # A pending step advances the version once it is settled.
        if not isinstance(result, PendingStepResult) and result.ok:
            handle.weight_version += 1
        return result

    @overload
    def lr_scheduler_step(self, handle: H) -> float: ...
    @overload
    def lr_scheduler_step(self, handle: Sequence[Any]) -> list[float]: ...
    def lr_scheduler_step(self, handle: Any) -> Any:
        with self._atoms(handle, "lr_scheduler_step") as handles:
            rates = [each.trainer("lr_scheduler_step").schedule_step() for each in handles]
        return rates if isinstance(handle, Sequence) else rates[0]

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

    def activations(self, handle: H, data: Sequence[PackedBatch]) -> list[Mapping[str, Tensor]]:
        with self._atom(handle, "activations"), self.eval_mode(handle):
            model, request = self._pass_of_model(handle, PassRequest(data, None, forward_only=True))
            check_micro_batches(model, request)
            return self._record_activations(model, request)

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
            handles: list[GuardedHandle[Any]] = [*self._handles, *self._tenants.values()]
            for each in handles:
                last_first.callback(each.release)
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

    @contextmanager
    def _atoms(self, handle: Any, operation: str) -> Generator[Sequence[GuardedHandle[Any]]]:
        """As :meth:`_atom`, for one handle or several, which are all checked first."""
        handles = handle if isinstance(handle, Sequence) else [handle]
        for each in handles:
            self._require(each, operation)
        with self._engine():
            yield handles

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
        if isinstance(handle, TenantHandle):
            handle.require_base(operation, needs.parts)
        if needs.whole_gradients and handle.broken:
            raise HandleError(f"{operation} on {handle.name!r}: {handle.broken}; call zero_grad first", handle=handle.name)

    def _require_open(self) -> None:
        if self._closed:
            raise HandleError("this runtime is closed; create another one")
