"""The guard of a runtime: every atom checks its model first, as the contract declares, then calls the engine."""

import functools
import gc
import logging
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from rl_backend.checkpoint.hf_reader import require_float_weights
from rl_backend.checkpoint.hf_weights import LM_HEAD
from rl_backend.checkpoint.kept_weights import STALE, describe_kept
from rl_backend.checkpoint.manifest import TrainingManifest
from rl_backend.checkpoint.peft_files import fitted_to, read_peft_directory
from rl_backend.checkpoint.state_in_memory import StateInMemory
from rl_backend.checkpoint.training_state import StateTensors
from rl_backend.contracts import (
    BatchError,
    ConfigError,
    ForwardResult,
    HandleError,
    Head,
    Losses,
    OptimizerConfig,
    PackedBatch,
    RuntimeConfig,
    TensorInfo,
    TensorPart,
    UnsupportedError,
    WeightCheckError,
    WeightShard,
    export_dtype,
)
from rl_backend.contracts.atoms import ATOMS, Part
from rl_backend.contracts.lora import LORA_FIELD, LoRAConfig, LoRAInfo
from rl_backend.contracts.result import BackendInfo, OptimizerState, OptimizerStateInfo
from rl_backend.lora.rows import each_weight, load_tensors
from rl_backend.runtime.backend_info import backend_info, is_bit_exact, optimizer_info, optimizer_state
from rl_backend.runtime.checkpoints import CheckpointWriter
from rl_backend.runtime.engine import Engine
from rl_backend.runtime.handle import GuardedHandle, require_head
from rl_backend.runtime.interface import RankPlace, RouterReplay, Runtime
from rl_backend.runtime.passes import PassRequest
from rl_backend.runtime.tenants.handle import TenantHandle
from rl_backend.runtime.tenants.state import problem_of_import
from rl_backend.runtime.tenants.tenants import Tenants

logger = logging.getLogger(__name__)

type AnyHandle = GuardedHandle[Any]
"""Of a model of the engine, or of a tenant."""


def guarded[M: Callable[..., Any]](method: M) -> M:
    """Checks what the atom that the method implements needs of its model, or of each of several, before any is changed."""

    @functools.wraps(method)
    def checked(self: "GuardedRuntime[Any]", handle: Any, *args: Any, **arguments: Any) -> Any:
        with self._guard(method, handle, arguments):
            return method(self, handle, *args, **arguments)

    return cast(M, checked)


class GuardedRuntime[H: GuardedHandle](Runtime[AnyHandle]):
    """Every atom checks its model, then calls the engine, or the tenants' part."""

    def __init__(self, config: RuntimeConfig, engine: Engine[H]) -> None:
        super().__init__(config)
        self.engine = engine
        groups, param_dtype = engine.groups, getattr(config.backend_cfg, "param_dtype", "")
        if groups.device.type == "cuda" and param_dtype == "float32" and groups.world_group.rank() == 0:
            logger.warning(
                "param_dtype='float32' on %s: products of matrices run at about a fifteenth of their speed in bfloat16, "
                "and attention has no fused kernel; set param_dtype='bfloat16' unless float32 is what you need",
                groups.device,
            )
        self._tenants = Tenants(engine)
        self._writer = CheckpointWriter(engine.groups.host_group, engine.groups.timeout)
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
        require_head(head)
        if hf_path is not None:
            config = config.replace(hf_path=str(hf_path))
        if optimizer is not None:
            if forward_only or not trainable:
                raise ConfigError.of("optimizer", optimizer, "a model that is not trained has none; leave it out")
            config = config.replace(backend_cfg=config.backend_cfg.replace(optimizer=optimizer))
        # Before anything is built, so that every rank refuses and none waits.
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

    @guarded
    def train_mode(self, handle: AnyHandle) -> AbstractContextManager[None]:
        return handle.training(True)

    @guarded
    def eval_mode(self, handle: AnyHandle) -> AbstractContextManager[None]:
        return handle.training(False)

    @guarded
    def is_mp_src_rank_with_outputs(self, handle: AnyHandle) -> bool:
        return self.engine.is_source

    # Passes and steps.

    @guarded
    def zero_grad(self, handle: AnyHandle | Sequence[AnyHandle]) -> None:
        _drop_gradients(handle)

    def forward_backward(
        self,
        handle: AnyHandle,
        data: Sequence[PackedBatch],
        loss_fn: Losses | None,
        *,
        forward_only: bool = False,
        router_replay: RouterReplay = "off",
    ) -> ForwardResult:
        """See the base class. Every rank of a model replica is given the same ``data``.

        After an error in the middle (in the loss, out of memory) backward passes and steps are refused until ``zero_grad``,
        because gradients are incomplete. An error of one rank alone leaves the others in a collective until that times out.
        """
        mixed = _is_mixed(handle, data, loss_fn)
        # Sequences of several tenants train these, and leave the handle, their base, as it is.
        with self._guard(Runtime.forward_backward, handle, {"forward_only": forward_only or mixed}):
            handle.require_replayable(router_replay)
            if loss_fn is None and not forward_only:
                raise BatchError("forward_backward without loss_fn; pass one, or forward_only=True")
            if mixed:
                tenants = self._tenants.mixed_pass(handle, loss_fn, forward_only=forward_only)
                for tenant in tenants.present(data):
                    self._require(Runtime.forward_backward, tenant, {"forward_only": forward_only})
                return self._tenants.run_mixed(handle, tenants, data, router_replay)
            if isinstance(loss_fn, Mapping):
                raise BatchError(f"several losses for {handle.name!r} without sequences of LoRA tenants; pass one")
            return self._engine_of(handle).run_passes(handle, PassRequest(data, loss_fn, forward_only, router_replay))

    @guarded
    def optimizer_step(self, handle: Any, *, adam: Any = None, zero_grad: bool = False) -> Any:
        result: Any
        if isinstance(handle, Sequence):
            result = self._tenants.step(handle, adam)
        else:
            handle.require_gradients("optimizer_step")
            result = handle.step(adam)
            handle.weight_version += result.ok
        if zero_grad:
            _drop_gradients(handle)
        return result

    @guarded
    def lr_scheduler_step(self, handle: Any) -> Any:
        rates = [each.trainer.schedule_step() for each in several(handle)]
        return rates if isinstance(handle, Sequence) else rates[0]

    @guarded
    def to(
        self,
        handle: AnyHandle,
        device: Literal["cpu", "device"],
        *,
        model: bool = True,
        optimizer: bool = True,
        grad: bool = True,
    ) -> None:
        """See the base class. A part that a handle does not have is nothing to move.

        Raises:
            HandleError: ``device`` is neither ``cpu`` nor ``device``.
        """
        if device not in ("cpu", "device"):
            raise HandleError(f"to(device={device!r}): expected 'cpu' or 'device'", device=str(device))
        wanted: dict[Part, bool] = {"model": model, "optimizer": optimizer, "grad": grad}
        for part, tensors in handle.part_tensors().items():
            if wanted[part]:
                handle.offload.reload(part) if device == "device" else handle.offload.offload(part, tensors)

    @guarded
    def activations(self, handle: AnyHandle, data: Sequence[PackedBatch]) -> list[Mapping[str, Tensor]]:
        # Dropout of a tenant would be in what is compared.
        with self.eval_mode(handle):
            return self._engine_of(handle).record_activations(handle, PassRequest(data, None, forward_only=True))

    # Weights and gradients.

    @guarded
    def weight_infos(self, handle: AnyHandle, *, dtype: torch.dtype | None = None) -> tuple[TensorInfo, ...]:
        infos, in_float32 = handle.weights, handle.in_float32
        if dtype is None:
            return infos
        dtypes = {each.name: export_dtype(dtype, in_float32=each.name in in_float32) for each in infos}
        return tuple(TensorInfo.of(each.name, each.shape, dtypes[each.name]) for each in infos)

    @guarded
    def export_weights(
        self,
        handle: AnyHandle,
        *,
        dtype: torch.dtype | None = None,
        byte_budget: int | None = None,
        names: Collection[str] | None = None,
    ) -> Iterator[tuple[str, Tensor]]:
        """See the base class; tensors are on the training device. The result is a generator: ``close()`` ends it early."""
        return self.engine.stream(self._engine_of(handle).gather_weights(handle, dtype, byte_budget, names))

    @guarded
    def export_shards(
        self, handle: AnyHandle, *, dtype: torch.dtype | None = None, held: bool = False
    ) -> Iterator[WeightShard]:
        return (self.engine.parts if held else self.engine.shards)(cast(H, handle), dtype)

    @guarded
    def shard_infos(self, handle: AnyHandle, *, dtype: torch.dtype | None = None) -> tuple[TensorPart, ...]:
        return () if isinstance(handle, TenantHandle) else self.engine.shard_infos(cast(H, handle), dtype)

    @guarded
    def export_gradients(self, handle: AnyHandle, *, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        return self.engine.stream(self._engine_of(handle).gather_gradients(handle, names))

    # Checkpoints.

    @guarded
    def save_checkpoint(
        self,
        handle: AnyHandle,
        path: Path | str,
        *,
        hf: bool = False,
        asynchronous: bool = False,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        engine = self._engine_of(handle)
        if hf:
            weights = functools.partial(engine.gather_weights, handle, None, None, None)
            self._writer.save_hf(handle, Path(path), weights, asynchronous=asynchronous, extra=extra)
        else:
            state = functools.partial(engine.training_state, handle)
            self._writer.save_training_state(handle, Path(path), state, asynchronous=asynchronous, extra=extra)

    @guarded
    def wait_for_checkpoint(self, handle: AnyHandle) -> None:
        self._writer.wait(handle)

    @guarded
    def checkpoint_is_pending(self, handle: AnyHandle) -> bool:
        return self._writer.is_pending(handle)

    @guarded
    def training_state(self, handle: AnyHandle) -> tuple[StateTensors, TrainingManifest]:
        return self._engine_of(handle).training_state(handle)

    @guarded
    def load_checkpoint(
        self, handle: AnyHandle, path: Path | StateInMemory | str, *, optimizer: bool = True
    ) -> dict[str, Any]:
        """See the base class. Random state is that of :func:`~rl_backend.runtime.checkpoints.source_rank`; without one it
        stays.
        """
        # It may read what another handle saves; that handle's errors are its own.
        self._writer.settle()
        self._writer.wait(handle)
        if names := sorted(tenant.name for tenant in self._tenants.of(handle)):
            raise HandleError(
                f"load_checkpoint on {handle.name!r}, the base of {', '.join(map(repr, names))}: they were made beside the "
                "weights that it has; load it before create_lora_adapter",
                handle=handle.name,
            )
        source = path if isinstance(path, StateInMemory) else Path(path)
        if optimizer:
            manifest = self._engine_of(handle).load_training_state(handle, source)
        elif handle in self._tenants:
            manifest = self._tenants.load_training_state(handle, source, optimizer=False)
        else:
            raise UnsupportedError(
                f"load_checkpoint(optimizer=False) on {handle.name!r}: only LoRA tenants load without their optimizer"
            )
        # A tenant is known by the weights of its base, those that a checkpoint has put there included.
        handle.loaded = manifest.digest
        if not handle.forward_only:
            handle.drop_gradients()
        return manifest.extra

    # Tenants.

    @guarded
    def reset_optimizer(self, handle: AnyHandle) -> None:
        self._tenants[handle].trainer.reset()

    @guarded
    def create_lora_adapter(
        self,
        handle: AnyHandle,
        lora: LoRAConfig,
        optimizer: OptimizerConfig | None = None,
        *,
        name: str = "",
        head: Head | None = None,
    ) -> TenantHandle:
        def stored(names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
            return self.export_weights(handle, dtype=torch.float32, names=names)

        tenant = self._tenants.create(handle, lora, optimizer, name=name, head=head, stored=stored)
        # What it computes may depend on what is computed beside it; that is said once.
        is_bit_exact(handle)
        return tenant

    @guarded
    def remove_lora_adapter(self, handle: AnyHandle) -> None:
        # Its save reads the rows that are freed next.
        self._writer.finish(handle)
        self._tenants.remove(handle)

    @guarded
    def get_lora_adapter(self, handle: AnyHandle) -> LoRAInfo:
        return self._tenants[handle].info()

    @guarded
    def list_lora_adapters(self, handle: AnyHandle) -> list[LoRAInfo]:
        return [tenant.info() for tenant in self._tenants.of(handle)]

    @guarded
    def export_lora_adapter(self, handle: AnyHandle, *, copy: bool = True) -> Iterator[tuple[str, Tensor]]:
        tenant = self._tenants[handle]
        adaptable = tenant.model.adaptable
        assert adaptable is not None, "the base of a tenant"
        return each_weight(tenant.rows, tenant.saved_shapes, adaptable.whole_group, copy=copy)

    @guarded
    def import_lora_adapter(
        self, handle: AnyHandle, tensors: Iterable[tuple[str, Tensor]] | Mapping[str, Tensor] | Path | str
    ) -> None:
        tenant = self._tenants[handle]
        if isinstance(tensors, Path | str):
            adapter = read_peft_directory(tensors)
            given = fitted_to(adapter, tenant.lora, tensors, tenant.first_factor)
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
        known, places = {info.name for info in model.weights}, {name: name for name in weights}
        if LM_HEAD in weights and model.adaptable is not None and model.head == "log_probs" and LM_HEAD not in known:
            # peft saves a head that is the embedding under its own name.
            ends = (f"{name}.weight" for name, kind in model.adaptable.kinds.items() if kind == "embedding")
            places[LM_HEAD] = next(ends, LM_HEAD)
        unknown = sorted(name for name, place in places.items() if place not in known)
        # Collective: every rank reads the same directory, so that all ask for the same names.
        others = [
            name
            for stored, mine in self.export_weights(model, names=known.intersection(places.values()))
            for name, place in places.items()
            if place == stored and not torch.equal(mine.cpu(), weights[name].to(mine.dtype))
        ]
        if found := [*unknown, *others]:
            why = f"is a whole weight, other than that of {model.name!r}; only factors are read"
            raise UnsupportedError(f"{path}: {found[0]} {why}", name=found[0])

    # Facts.

    @guarded
    def get_optimizer_state(self, handle: AnyHandle) -> OptimizerState:
        held, _ = self._engine_of(handle).training_state(handle)
        return optimizer_state(handle, held)

    @guarded
    def list_optimizer_states(self, handle: AnyHandle) -> list[OptimizerStateInfo]:
        return [optimizer_info(each) for each in [handle, *self._tenants.of(handle)] if each.optimizer is not None]

    @guarded
    def get_backend_info(self, handle: AnyHandle) -> BackendInfo:
        base = self._tenants[handle].model if handle in self._tenants else handle
        return backend_info(base, self._tenants.of(base))

    def close(self) -> None:
        """Waits for an asynchronous save, then frees; raises that save's error at the end."""
        if self._closed:
            return
        self._closed = True
        with ExitStack() as last_first:
            # Models are cycles of references; until they are collected, they keep memory and process groups their threads.
            last_first.callback(gc.collect)
            # Process groups go last: what is released before may still need them.
            last_first.callback(self.engine.close)
            last_first.callback(self._handles.clear)
            handles: list[GuardedHandle[Any]] = [*self._handles, *self._tenants]
            for each in handles:
                last_first.callback(each.release)
            last_first.callback(self._writer.close)

    # The guard.

    def _engine_of(self, handle: AnyHandle) -> Engine[Any] | Tenants:
        return self._tenants if handle in self._tenants else self.engine

    @contextmanager
    def _guard(self, method: Callable[..., Any], handle: Any, arguments: Mapping[str, Any]) -> Generator[None]:
        for each in several(handle):
            self._require(method, each, arguments)
        with self.engine.active():
            yield

    def _require(self, method: Callable[..., Any], handle: AnyHandle, arguments: Mapping[str, Any]) -> None:
        """Raises :class:`HandleError` for a model that lacks what the atom of this method's name needs."""
        self._require_open()
        if not isinstance(handle, GuardedHandle) or handle.owner is not self:
            raise HandleError(
                f"handle {getattr(handle, 'name', handle)!r} is closed or belongs to another runtime; use the runtime that "
                "built it"
            )
        atom = ATOMS[method.__name__]
        needs = atom.needs_with(arguments.get(atom.flag))
        if needs.weights and handle.damaged:
            raise HandleError(f"{handle.name!r} has no usable weights: {handle.damaged}; load a complete checkpoint")
        if needs.trained:
            handle.require_trained(atom.name + needs.form)
        handle.offload.require(atom.name, *needs.parts)
        if needs.whole_gradients and handle.broken:
            raise HandleError(f"{atom.name} on {handle.name!r}: {handle.broken}; call zero_grad first", handle=handle.name)
        self._tenants.require(handle, atom, needs)

    def _require_open(self) -> None:
        if self._closed:
            raise HandleError("this runtime is closed; create another one")


def several[T](given: T | Sequence[T]) -> Sequence[T]:
    return given if isinstance(given, Sequence) else [given]


def _drop_gradients(given: AnyHandle | Sequence[AnyHandle]) -> None:
    for each in several(given):
        each.drop_gradients()
        each.broken = ""


def _is_mixed(handle: object, data: Sequence[PackedBatch], losses: Losses | None) -> bool:
    """Whether each sequence says, or has to say, which tenant it belongs to. The handle is not checked yet."""
    has_field = any(LORA_FIELD in batch.sequence_fields for batch in data)
    adaptable = isinstance(handle, GuardedHandle) and handle.adaptable is not None
    return adaptable and (has_field or isinstance(losses, Mapping))
