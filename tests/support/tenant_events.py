"""Events of other tenants around a watched one, and the full state of the watched one afterwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_backend.contracts import (
    BatchError,
    ConfigError,
    HandleError,
    MetricValue,
    ModelHandle,
    ModelOutput,
    PackedBatch,
    WeightCheckError,
)
from rl_backend.contracts.lora import LoRAConfig
from rl_backend.runtime import Runtime
from rl_backend.runtime.tenants.handle import TenantHandle
from tests.support.bridge_runs import open_bridge
from tests.support.native import open_runtime
from tests.support.tenants import batches, create, nll

STEPS = 4
OPENS: Mapping[str, Callable[..., Any]] = {"native": open_runtime, "bridge": open_bridge}
WATCHED = "narrow"
type Event = Callable[[Runtime[Any], Any, dict[str, TenantHandle]], list[ModelHandle]]
"""Does something to the tenants beside the watched one; returns further ones that it has made."""


def fails(model_output: ModelOutput, data: PackedBatch, dp_group: Any = None) -> tuple[Tensor, Mapping[str, MetricValue]]:
    raise ValueError("this tenant's loss is wrong")


def nan_loss(model_output: ModelOutput, data: PackedBatch, dp_group: Any = None) -> tuple[Tensor, Mapping[str, MetricValue]]:
    loss, metrics = nll(model_output, data, dp_group)
    return loss * float("nan"), metrics


def no_event(runtime: Runtime[Any], base: Any, tenants: dict[str, TenantHandle]) -> list[ModelHandle]:
    return []


def weights_become_nan(runtime: Runtime[Any], base: Any, tenants: dict[str, TenantHandle]) -> list[ModelHandle]:
    tenants["middle"].rows.weights.fill_(float("nan"))
    return []


def is_removed(runtime: Runtime[Any], base: Any, tenants: dict[str, TenantHandle]) -> list[ModelHandle]:
    runtime.remove_lora_adapter(tenants.pop("wide"))
    return []


def is_refused(runtime: Runtime[Any], base: Any, tenants: dict[str, TenantHandle]) -> list[ModelHandle]:
    bad = {name: tensor * float("inf") for name, tensor in runtime.export_lora_adapter(tenants["middle"])}
    with pytest.raises(WeightCheckError, match="not finite"):
        runtime.import_lora_adapter(tenants["middle"], bad)
    with pytest.raises(ConfigError, match="no module of this name"):
        runtime.create_lora_adapter(base, LoRAConfig(targets=("nothing",)))
    (batch, *_) = batches(tenants, 0, 0, 1)
    batch.sequence_fields["lora"][0] = 99999
    with pytest.raises(BatchError, match="is no tenant"):
        runtime.forward_backward(base, [batch], dict.fromkeys(tenants, nll))
    return []


def another_comes(runtime: Runtime[Any], base: Any, tenants: dict[str, TenantHandle]) -> list[ModelHandle]:
    return [runtime.create_lora_adapter(base, LoRAConfig(rank=8, seed=7, targets=("attention",)), name="newcomer")]


EVENTS: dict[str, tuple[Event, Mapping[str, Any]]] = {
    "data": (no_event, {}),
    "a loss of NaN": (no_event, {"middle": nan_loss}),
    "a loss that fails": (no_event, {"wide": fails}),
    "weights of NaN": (weights_become_nan, {}),
    "removal": (is_removed, {}),
    "refused input": (is_refused, {}),
    "a newcomer": (another_comes, {}),
}


def watched_state(
    runtime: Runtime[Any],
    base: Any,
    event: str | None,
    seed: int = 0,
    changes: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, bytes]:
    """Everything of the watched tenant on this rank after some steps; without an event it is alone. Leaves no tenant.

    Args:
        changes: tenant -> fields of its configuration.
    """
    change, losses = EVENTS[event] if event is not None else (no_event, {})
    torch.manual_seed(seed)
    names = (WATCHED,) if event is None else ("narrow", "middle", "wide")
    tenants = {name: create(runtime, base, (name,), **(changes or {}).get(name, {}))[name] for name in names}
    values, newcomers = list[float](), list[ModelHandle]()
    for step in range(STEPS):
        if step == 2:
            newcomers = change(runtime, base, tenants)
        data = batches(tenants, 10 * seed + step, base.data_parallel_rank, base.data_parallel_size)
        result = runtime.forward_backward(base, data, {name: losses.get(name, nll) for name in tenants})
        values += result.tenants[WATCHED].losses
        stepped = [name for name in tenants if not result.tenants[name].error]
        assert ("wide" in stepped) is (event not in (None, "a loss that fails") and "wide" in tenants)
        if "wide" in tenants and "wide" not in stepped:
            with pytest.raises(HandleError, match=r"its loss (raised ValueError: this tenant's loss is wrong|failed)"):
                runtime.optimizer_step(tenants["wide"])
        results = dict(zip(stepped, runtime.optimizer_step([tenants[name] for name in stepped]), strict=True))
        assert results[WATCHED].ok
        values.append(results[WATCHED].grad_norm)
        if event == "a loss of NaN" or (event == "weights of NaN" and step >= 2):
            assert not results["middle"].ok
        runtime.zero_grad(list(tenants.values()))
        runtime.lr_scheduler_step(list(tenants.values()))
    if event in ("a loss of NaN", "weights of NaN"):
        assert tenants["middle"].weight_version == (0 if event == "a loss of NaN" else 2)
    watched = tenants[WATCHED]
    rows, schedule = watched.rows, watched.trainer.schedule
    state = {
        "weights": rows.weights,
        "first moments": rows.exp_avg,
        "second moments": rows.exp_avg_sq,
        "steps": rows.num_steps,
        "random state": torch.get_rng_state(),
    }
    found = {name: value.numpy().tobytes() for name, value in state.items()}
    counts = (watched.weight_version, schedule.num_steps, schedule.learning_rate, rows.num_draws)
    found |= {"version, schedule and draws": repr(counts).encode(), "losses and norms": repr(values).encode()}
    for tenant in (*tenants.values(), *newcomers):
        runtime.remove_lora_adapter(tenant)
    return found


def watched_job(model: str, event: str | None, backend: str, parallel: Mapping[str, int]) -> dict[str, bytes]:
    """As :func:`watched_state`, in a runtime of its own."""
    with OPENS[backend](model, parallel=parallel) as runtime:
        return watched_state(runtime, runtime.build_model(trainable=False), event, changes={WATCHED: {"dropout": 0.1}})
