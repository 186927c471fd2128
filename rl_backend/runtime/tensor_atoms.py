"""Weights, gradients and checkpoints of models and of tenants: the atoms that give them out or take them in."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_backend.checkpoint.manifest import TrainingManifest
from rl_backend.checkpoint.peft_files import fitted_to, read_peft_directory
from rl_backend.checkpoint.training_state import StateTensors
from rl_backend.contracts import HandleError, ModelHandle, TensorInfo, UnsupportedError, WeightCheckError, export_dtype
from rl_backend.lora.factors import WholeTensors, each_weight, load_tensors, merged_weights, whole_tensors
from rl_backend.runtime.backend_info import BackendFacts
from rl_backend.runtime.checkpoint_writer import CheckpointWriter
from rl_backend.runtime.engine import GuardedHandle
from rl_backend.runtime.export_stream import WeightStream, require_known_names
from rl_backend.runtime.tenant import TenantHandle
from rl_backend.runtime.tenant_state import load_tenant_state, problem_of_import, tenant_state


class TensorAtoms[H: GuardedHandle](BackendFacts[H]):
    """A tenant's weights are those of its base with the adapter added; its own tensors have peft's names."""

    _writer: CheckpointWriter

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
            stream = self._weights_of(handle, dtype, byte_budget, names)
        return self._stream_in_engine(stream)

    def export_gradients(self, handle: H, *, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """See the base class; tensors are on the training device."""
        with self._atom(handle, "export_gradients"):
            stream = self._gradients_of(handle, names)
        return self._stream_in_engine(stream)

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
                    lambda: self._weights_of(handle, None, None, None),
                    asynchronous=asynchronous,
                    extra=extra,
                )
            else:
                self._writer.save_training_state(
                    handle, Path(path), lambda: self._state_of(handle), asynchronous=asynchronous, extra=extra
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
            manifest = self._load_state_of(handle, Path(path))
            if not handle.forward_only:
                handle.drop_gradients()
        return manifest.extra

    def _require_same_weights(self, model: GuardedHandle, weights: Mapping[str, Tensor], path: Path | str) -> None:
        """Refuses an adapter that brings along other weights of its base than those of ``model``. A collective."""
        unknown = sorted(weights.keys() - {info.name for info in model.weights})
        stored = self.export_weights(model, names=[name for name in weights if name not in unknown])  # type: ignore[arg-type]
        others = [name for name, mine in stored if not torch.equal(mine.cpu(), weights[name].to(mine.dtype))]
        if found := [*unknown, *others]:
            why = f"is a whole weight, other than that of {model.name!r}; only factors are read"
            raise UnsupportedError(f"{path}: {found[0]} {why}", name=found[0])

    def _stream_in_engine(self, stream: WeightStream) -> WeightStream:
        """A stream of weights that runs as calls of the engine do."""
        return stream

    @staticmethod
    def _tensors_of(tenant: TenantHandle, row: Tensor | None = None) -> WholeTensors:
        """In one of its rows; the weights by default."""
        adaptable, row = tenant.model.adaptable, tenant.rows.weights if row is None else row
        assert adaptable is not None, "the base of a tenant"
        return whole_tensors(tenant.rows, row, tenant.saved_shapes, adaptable.whole_group)

    def _weights_of(
        self, handle: GuardedHandle, dtype: torch.dtype | None, byte_budget: int | None, names: Collection[str] | None
    ) -> WeightStream:
        """As :meth:`_gather_weights`; a tenant's are those of its base with the adapter added."""
        if not isinstance(handle, TenantHandle):
            return self._gather_weights(handle, dtype, byte_budget, names)  # type: ignore[arg-type]
        infos = {info.name: info for info in handle.weights}
        require_known_names("export_weights", names, infos)
        wanted = infos if names is None else names
        base = None if names is None and handle.head == handle.model.head else set(wanted).difference(handle.head_shapes)
        stream = self._gather_weights(handle.model, dtype, byte_budget, base)  # type: ignore[arg-type]
        own = {name: dtype or getattr(torch, infos[name].dtype) for name in handle.head_shapes if name in wanted}
        return merged_weights(stream, self._tensors_of(handle), handle.kinds, handle.lora.scale, own)

    def _gradients_of(self, handle: H, names: Collection[str] | None) -> WeightStream:
        """As :meth:`_gather_gradients`; a tenant's are those of its factors, by peft's names."""
        if not isinstance(handle, TenantHandle):
            return self._gather_gradients(handle, names)
        require_known_names("export_gradients", names, handle.saved_shapes)
        optimizer = handle.trainer("export_gradients")
        if not optimizer.has_gradients:
            raise HandleError("export_gradients without gradients; call forward_backward first", handle=handle.name)
        optimizer.reduce()
        tensors = self._tensors_of(handle, handle.rows.gradients)
        return ((name, value) for name, value in tensors.items() if names is None or name in names)

    def _state_of(self, handle: H) -> tuple[StateTensors, TrainingManifest]:
        """What a checkpoint of the model, or of the tenant alone, holds."""
        return tenant_state(handle) if isinstance(handle, TenantHandle) else self._training_state(handle)

    def _load_state_of(self, handle: H, path: Path) -> TrainingManifest:
        """Restores a model or a tenant."""
        if isinstance(handle, TenantHandle):
            return load_tenant_state(handle, path)
        if names := sorted(tenant.name for tenant in self._tenants.values() if tenant.model is handle):
            raise HandleError(
                f"load_checkpoint on {handle.name!r}, the base of {', '.join(map(repr, names))}: they were made beside the "
                "weights that it has; load it before create_lora_adapter",
                handle=handle.name,
            )
        manifest = self._load_training_state(handle, path)
        handle.loaded = manifest.digest
        return manifest

    def _tenant(self, handle: ModelHandle, operation: str) -> TenantHandle:
        """``handle``, if it is a tenant that ``operation`` can be done on."""
        self._require(handle, operation)
        if not isinstance(handle, TenantHandle):
            raise HandleError(
                f"{operation} on {handle.name!r}, which is no LoRA tenant; take a handle of create_lora_adapter",
                handle=handle.name,
            )
        return handle
