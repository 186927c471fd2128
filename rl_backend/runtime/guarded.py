"""Runtimes whose atoms check their model first, as :mod:`rl_backend.contracts.atoms` declares."""

import gc
import logging
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, cast, get_args, overload

import torch
from torch import Tensor

from rl_backend.checkpoint.hf_reader import require_float_weights
from rl_backend.checkpoint.kept_weights import STALE, describe_kept
from rl_backend.checkpoint.manifest import TrainingManifest
from rl_backend.checkpoint.peft_files import fitted_to, read_peft_directory
from rl_backend.checkpoint.training_state import StateTensors
from rl_backend.contracts import (
    BatchError,
    ConfigError,
    ForwardResult,
    HandleError,
    Head,
    Losses,
    ModelHandle,
    OptimizerConfig,
    PackedBatch,
    RuntimeConfig,
    StepResult,
    TensorInfo,
    UnsupportedError,
    WeightCheckError,
    WeightShard,
    export_dtype,
)
from rl_backend.contracts.atoms import ATOMS, Part
from rl_backend.contracts.backend_info import BackendInfo, OptimizerState, OptimizerStateInfo
from rl_backend.contracts.lora import LORA_FIELD, LoRAConfig, LoRAInfo
from rl_backend.lora.factors import each_weight, load_tensors
from rl_backend.runtime.backend_info import backend_info, is_bit_exact, optimizer_info, optimizer_state
from rl_backend.runtime.batch_checks import check_micro_batches
from rl_backend.runtime.checkpoint_writer import CheckpointWriter
from rl_backend.runtime.engine import Engine, GuardedHandle
from rl_backend.runtime.export_stream import WeightStream
from rl_backend.runtime.interface import RankPlace, Runtime
from rl_backend.runtime.passes import PassRequest
from rl_backend.runtime.router_replay import RouterReplay
from rl_backend.runtime.tenants.exports import gradient_stream, merged_stream
from rl_backend.runtime.tenants.handle import TenantHandle
from rl_backend.runtime.tenants.state import load_tenant_state, problem_of_import, tenant_state
from rl_backend.runtime.tenants.tenants import Tenants, pass_of_model

logger = logging.getLogger(__name__)


class GuardedRuntime[H: GuardedHandle](Runtime[H]):
    """Every atom checks its model, then calls the engine.

    Keeps the handles that it built, refuses others, and frees them on ``close``.

    Attributes:
        engine: does the work.
    """

    def __init__(self, config: RuntimeConfig, engine: Engine[H]) -> None:
        super().__init__(config)
        self.engine = engine
        self._tenants = Tenants(engine)
        self._writer = CheckpointWriter(engine.groups.host_group)
        self._handles: list[H] = []
        self._closed = False

    @property
    def place(self) -> RankPlace:
        groups = self.engine.groups
        return RankPlace(groups.device, groups.dp_rank, groups.dp_size, groups.dp_group, self.engine.is_source)

    # Models.

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
        with self.engine.active():
            handle = self.engine.build(
                config,
                name or f"model-{len(self._handles) + 1}",
                head,
                forward_only=forward_only or not trainable,
                adaptable=not trainable and not forward_only,
            )
        handle.owner = self
        self._handles.append(handle)
        if handle.kept and not handle.forward_only and self.engine.groups.world_group.rank() == 0:
            logger.warning("%s of %s are kept as they are there: %s", describe_kept(handle.kept), config.hf_path, STALE)
        return handle

    def train_mode(self, handle: H) -> AbstractContextManager[None]:
        self._require(handle, "train_mode")
        return handle.training(True)

    def eval_mode(self, handle: H) -> AbstractContextManager[None]:
        self._require(handle, "eval_mode")
        return handle.training(False)

    def is_mp_src_rank_with_outputs(self, handle: H) -> bool:
        self._require(handle, "is_mp_src_rank_with_outputs")
        return self.engine.is_source

    # Passes and steps.

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
        mixed = _is_mixed(handle, data, loss_fn)
        with self._atom(handle, "forward_backward", forward_only=forward_only or mixed):
            handle.require_replayable(router_replay)
            if loss_fn is None and not forward_only:
                raise BatchError("forward_backward without loss_fn; pass one, or forward_only=True")
            if mixed:
                tenants = self._tenants.mixed_pass(handle, loss_fn, forward_only=forward_only)
                for tenant in tenants.present(data):
                    self._require(tenant, "forward_backward", forward_only=forward_only)
                return self._tenants.run_mixed(handle, tenants, data, router_replay)
            if isinstance(loss_fn, Mapping):
                raise BatchError(f"several losses for {handle.name!r} without sequences of LoRA tenants; pass one")
            request = PassRequest(data, loss_fn, forward_only, router_replay)
            if isinstance(handle, TenantHandle):
                return self._tenants.run_alone(handle, request)
            return self.engine.run_passes(handle, request)

    @overload
    def optimizer_step(self, handle: Sequence[Any]) -> list[StepResult]: ...
    @overload
    def optimizer_step(self, handle: H) -> StepResult: ...
    def optimizer_step(self, handle: Any) -> Any:
        if isinstance(handle, Sequence):
            if not handle:
                raise HandleError("optimizer_step of no tenants; give at least one")
            return self._tenants.step([self._tenant(each, "optimizer_step") for each in handle])
        with self._atom(handle, "optimizer_step"):
            result = handle.step()
        if result.ok:
            handle.weight_version += 1
        return result

    @overload
    def lr_scheduler_step(self, handle: Sequence[Any]) -> list[float]: ...
    @overload
    def lr_scheduler_step(self, handle: H) -> float: ...
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
            model, request = pass_of_model(handle, PassRequest(data, None, forward_only=True))
            check_micro_batches(model, request)
            return self.engine.record_activations(model, request)

    # Weights and gradients.

    def weight_infos(self, handle: H, *, dtype: torch.dtype | None = None) -> tuple[TensorInfo, ...]:
        self._require(handle, "weight_infos")
        infos, in_float32 = handle.weights, handle.in_float32
        if dtype is None:
            return infos
        dtypes = {each.name: export_dtype(dtype, in_float32=each.name in in_float32) for each in infos}
        return tuple(TensorInfo.of(each.name, each.shape, dtypes[each.name]) for each in infos)

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
            stream = self._weights(handle, dtype, byte_budget, names)
        return self.engine.stream(stream)

    def export_shards(self, handle: H, *, dtype: torch.dtype | None = None) -> Iterator[WeightShard]:
        """See the base class; what the rank holds itself, of an engine that has it."""
        if not self.engine.has_shards:
            return super().export_shards(handle, dtype=dtype)
        with self._atom(handle, "export_shards"):
            return self.engine.shards(handle, dtype)

    def export_gradients(self, handle: H, *, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """See the base class; tensors are on the training device."""
        with self._atom(handle, "export_gradients"):
            if isinstance(handle, TenantHandle):
                stream = gradient_stream(handle, names)
            else:
                stream = self.engine.gather_gradients(handle, names)
        return self.engine.stream(stream)

    def _weights(
        self,
        handle: H,
        dtype: torch.dtype | None = None,
        byte_budget: int | None = None,
        names: Collection[str] | None = None,
    ) -> WeightStream:
        if isinstance(handle, TenantHandle):
            return merged_stream(self.engine, handle, dtype, byte_budget, names)
        return self.engine.gather_weights(handle, dtype, byte_budget, names)

    # Checkpoints.

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
                    handle, Path(path), lambda: self._weights(handle), asynchronous=asynchronous, extra=extra
                )
            else:
                self._writer.save_training_state(
                    handle, Path(path), lambda: self._state(handle), asynchronous=asynchronous, extra=extra
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
            # It may read what another handle saves; that handle's errors are its own.
            self._writer.settle()
            self._writer.wait(handle)
            if isinstance(handle, TenantHandle):
                manifest = load_tenant_state(handle, Path(path))
            else:
                manifest = self._load_model(handle, Path(path))
            if not handle.forward_only:
                handle.drop_gradients()
        return manifest.extra

    def _state(self, handle: Any) -> tuple[StateTensors, TrainingManifest]:
        """What a checkpoint of the model, or of the tenant alone, holds."""
        return tenant_state(handle) if isinstance(handle, TenantHandle) else self.engine.training_state(handle)

    def _load_model(self, handle: H, path: Path) -> TrainingManifest:
        if names := sorted(tenant.name for tenant in self._tenants.of(handle)):
            raise HandleError(
                f"load_checkpoint on {handle.name!r}, the base of {', '.join(map(repr, names))}: they were made beside the "
                "weights that it has; load it before create_lora_adapter",
                handle=handle.name,
            )
        manifest = self.engine.load_training_state(handle, path)
        handle.loaded = manifest.digest
        return manifest

    # Tenants.

    def create_lora_adapter(
        self,
        handle: H,
        lora: LoRAConfig,
        optimizer: OptimizerConfig | None = None,
        *,
        name: str = "",
        head: Head | None = None,
    ) -> TenantHandle:
        self._require(handle, "create_lora_adapter")

        def stored(names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
            return self.export_weights(handle, dtype=torch.float32, names=names)

        tenant = self._tenants.create(handle, lora, optimizer, name=name, head=head, stored=stored)
        # What it computes may depend on what is computed beside it; that is said once.
        is_bit_exact(handle)
        return tenant

    def remove_lora_adapter(self, handle: ModelHandle) -> None:
        self._tenants.remove(self._tenant(handle, "remove_lora_adapter"))

    def list_lora_adapters(self, handle: H) -> list[LoRAInfo]:
        self._require(handle, "list_lora_adapters")
        return [tenant.info() for tenant in self._tenants.of(handle)]

    def export_lora_adapter(self, handle: ModelHandle, *, copy: bool = True) -> Iterator[tuple[str, Tensor]]:
        tenant = self._tenant(handle, "export_lora_adapter")
        adaptable = tenant.model.adaptable
        assert adaptable is not None, "the base of a tenant"
        return each_weight(tenant.rows, tenant.saved_shapes, adaptable.whole_group, copy=copy)

    def import_lora_adapter(
        self, handle: ModelHandle, tensors: Iterable[tuple[str, Tensor]] | Mapping[str, Tensor] | Path | str
    ) -> None:
        tenant = self._tenant(handle, "import_lora_adapter")
        if isinstance(tensors, Path | str):
            adapter = read_peft_directory(tensors)
            given = fitted_to(adapter, tenant.lora, tensors)
            if adapter.frozen:
                self._require_same_weights(tenant.model, adapter.frozen, tensors)
        else:
            given = dict(tensors)
        problem = problem_of_import(given, tenant.saved_shapes)
        if problem:
            raise WeightCheckError(f"import_lora_adapter into {tenant.name!r}: {problem}; nothing was changed")
        load_tensors(tenant.rows, tenant.rows.weights, given)
        tenant.weight_version += 1

    def _require_same_weights(self, model: GuardedHandle, weights: Mapping[str, Tensor], path: Path | str) -> None:
        """Refuses an adapter that brings along other weights of its base than those of ``model``. A collective."""
        unknown = sorted(weights.keys() - {info.name for info in model.weights})
        stored = self.export_weights(cast(H, model), names=[name for name in weights if name not in unknown])
        others = [name for name, mine in stored if not torch.equal(mine.cpu(), weights[name].to(mine.dtype))]
        if found := [*unknown, *others]:
            why = f"is a whole weight, other than that of {model.name!r}; only factors are read"
            raise UnsupportedError(f"{path}: {found[0]} {why}", name=found[0])

    # Facts.

    def get_optimizer_state(self, handle: ModelHandle) -> OptimizerState:
        with self._atom(handle, "get_optimizer_state"):
            model = cast(GuardedHandle, handle)
            held, _ = self._state(model)
            return optimizer_state(model, held)

    def list_optimizer_states(self, handle: ModelHandle) -> list[OptimizerStateInfo]:
        self._require(handle, "list_optimizer_states")
        model = cast(GuardedHandle, handle)
        return [optimizer_info(each) for each in [model, *self._tenants.of(model)] if each.optimizer is not None]

    def get_backend_info(self, handle: ModelHandle) -> BackendInfo:
        self._require(handle, "get_backend_info")
        base = cast(GuardedHandle, handle.base or handle)
        return backend_info(base, self._tenants.of(base))

    def close(self) -> None:
        """Waits for an asynchronous save, then frees; raises that save's error at the end."""
        if self._closed:
            return
        self._closed = True
        with ExitStack() as last_first:
            # Models are cycles of references; until they are collected, they keep memory and process groups their threads.
            last_first.callback(gc.collect)
            last_first.callback(self.engine.close)
            last_first.callback(self._handles.clear)
            handles: list[GuardedHandle[Any]] = [*self._handles, *self._tenants]
            for each in handles:
                last_first.callback(each.release)
            last_first.callback(self._writer.close)

    # The guards.

    @contextmanager
    def _atom(self, handle: ModelHandle, operation: str, **arguments: bool) -> Generator[None]:
        """Around an atom of the engine, once :meth:`_require` has found nothing wrong."""
        self._require(handle, operation, **arguments)
        with self.engine.active():
            yield

    @contextmanager
    def _atoms(self, handle: Any, operation: str) -> Generator[Sequence[GuardedHandle[Any]]]:
        """As :meth:`_atom`, for one handle or several, which are all checked first."""
        handles = handle if isinstance(handle, Sequence) else [handle]
        for each in handles:
            self._require(each, operation)
        with self.engine.active():
            yield handles

    def _require(self, handle: ModelHandle, operation: str, **arguments: bool) -> None:
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
        if needs.trained:
            handle.trainer(operation + needs.form)
        handle.offload.require(operation, *needs.parts)
        if isinstance(handle, TenantHandle):
            handle.require_base(operation, needs.parts)
        if needs.whole_gradients and handle.broken:
            raise HandleError(f"{operation} on {handle.name!r}: {handle.broken}; call zero_grad first", handle=handle.name)

    def _tenant(self, handle: ModelHandle, operation: str) -> TenantHandle:
        """``handle``, if it is a tenant that ``operation`` can be done on."""
        self._require(handle, operation)
        if not isinstance(handle, TenantHandle):
            raise HandleError(
                f"{operation} on {handle.name!r}, which is no LoRA tenant; take a handle of create_lora_adapter",
                handle=handle.name,
            )
        return handle

    def _require_open(self) -> None:
        if self._closed:
            raise HandleError("this runtime is closed; create another one")


def _is_mixed(handle: GuardedHandle, data: Sequence[PackedBatch], losses: Losses | None) -> bool:
    """Whether each sequence says, or has to say, which tenant it belongs to."""
    has_field = any(LORA_FIELD in batch.sequence_fields for batch in data)
    return handle.adaptable is not None and (has_field or isinstance(losses, Mapping))
