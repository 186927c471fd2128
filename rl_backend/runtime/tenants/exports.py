"""Exports of a tenant: weights are those of its base with the adapter added; gradients are of its own tensors."""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from rl_backend.contracts import HandleError
from rl_backend.lora.factors import WholeTensors, merged_weights, whole_tensors
from rl_backend.runtime.engine import Engine
from rl_backend.runtime.export_stream import WeightStream, require_known_names
from rl_backend.runtime.tenants.handle import TenantHandle


def merged_stream(
    engine: Engine[Any],
    tenant: TenantHandle,
    dtype: torch.dtype | None,
    byte_budget: int | None,
    names: Collection[str] | None,
) -> WeightStream:
    """As :meth:`~rl_backend.runtime.engine.Engine.gather_weights`."""
    infos = {info.name: info for info in tenant.weights}
    require_known_names("export_weights", names, infos)
    wanted = infos if names is None else names
    base = None if names is None and tenant.head == tenant.model.head else set(wanted).difference(tenant.head_shapes)
    stream = engine.gather_weights(tenant.model, dtype, byte_budget, base)
    own = {name: dtype or getattr(torch, infos[name].dtype) for name in tenant.head_shapes if name in wanted}
    return merged_weights(stream, _tensors_of(tenant, tenant.rows.weights), tenant.kinds, tenant.lora.scale, own)


def gradient_stream(tenant: TenantHandle, names: Collection[str] | None) -> WeightStream:
    """As :meth:`~rl_backend.runtime.engine.Engine.gather_gradients`, by peft's names."""
    require_known_names("export_gradients", names, tenant.saved_shapes)
    optimizer = tenant.trainer
    if not optimizer.has_gradients:
        raise HandleError("export_gradients without gradients; call forward_backward first", handle=tenant.name)
    optimizer.reduce()
    tensors = _tensors_of(tenant, tenant.rows.gradients)
    return ((name, value) for name, value in tensors.items() if names is None or name in names)


def _tensors_of(tenant: TenantHandle, row: Tensor) -> WholeTensors:
    """In one of its rows."""
    adaptable = tenant.model.adaptable
    assert adaptable is not None, "the base of a tenant"
    return whole_tensors(tenant.rows, row, tenant.saved_shapes, adaptable.whole_group)
