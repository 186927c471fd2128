"""Values of AdamW that are given for one step are those of torch's AdamW, in both runtimes and for LoRA tenants."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_backend.contracts import AdamParams, ConfigError, HandleError, OptimizerConfig
from rl_backend.contracts.lora import LoRAConfig
from tests.support.bridge_runs import open_bridge
from tests.support.native import micro_batches, open_runtime, token_loss
from tests.support.tenants import copied

CONFIG = OptimizerConfig(lr=0.02, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3, clip_grad=0.0)
GIVEN: tuple[AdamParams | None, ...] = (
    AdamParams(lr=0.05, betas=(0.6, 0.7), eps=1e-3, weight_decay=2.0, clip_grad=0.1),
    None,
    AdamParams(weight_decay=0.0, clip_grad=0.2),
    AdamParams(lr=0.0),
    AdamParams(betas=(0.5, 0.99)),
)
LORA = LoRAConfig(rank=4, alpha=40.0, targets=("q_proj", "down_proj"), use_dora=True)


class Reference:
    """torch's AdamW over copies of weights."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.weights = {name: torch.nn.Parameter(value) for name, value in weights.items()}
        decayed, others = ([each for each in self.weights.values() if (each.dim() > 1) is many] for many in (True, False))
        self.adamw = torch.optim.AdamW([{"params": decayed}, {"params": others}])

    def step(self, gradients: dict[str, Tensor], adam: AdamParams | None) -> float:
        values = {name: getattr(CONFIG, name) for name in AdamParams.model_fields} | ({} if adam is None else adam.given)
        for name, gradient in gradients.items():
            self.weights[name].grad = gradient
        norm = torch.nn.utils.clip_grad_norm_(self.weights.values(), values["clip_grad"] or math.inf)
        for group, share in zip(self.adamw.param_groups, (1.0, 0.0), strict=True):
            group |= {name: values[name] for name in ("lr", "betas", "eps")}
            group["weight_decay"] = share * values["weight_decay"]
        self.adamw.step()
        return norm.item()

    def assert_equals(self, found: dict[str, Tensor], step: int) -> None:
        for name, parameter in self.weights.items():
            torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-4, atol=1e-6, msg=f"{name}, step {step}")


type Opened = tuple[Any, Any, Callable[[], dict[str, Tensor]]]


@contextmanager
def opened(kind: str, model: Path) -> Iterator[Opened]:
    """A runtime, what it trains, and how that is read."""
    open_any: Any = open_bridge if kind.startswith("bridge") else open_runtime
    with open_any(model, optimizer=CONFIG) as runtime:
        if "tenant" in kind:
            handle = runtime.create_lora_adapter(runtime.build_model(trainable=False), LORA, CONFIG)
            yield runtime, handle, lambda: copied(runtime.export_lora_adapter(handle))
        else:
            handle = runtime.build_model()
            yield runtime, handle, lambda: copied(runtime.export_weights(handle, dtype=torch.float32))


def gradients_of(runtime: Any, handle: Any, step: int) -> dict[str, Tensor]:
    runtime.zero_grad(handle)
    runtime.forward_backward(handle, micro_batches([[0, 1], [2, 3]], seed=step), token_loss)
    return copied(runtime.export_gradients(handle))


@pytest.mark.parametrize("kind", ["native", "bridge", "native tenant", "bridge tenant"])
def test_a_step_has_the_values_that_are_given_for_it_and_the_next_one_the_optimizers(untied_model: Path, kind: str) -> None:
    with opened(kind, untied_model) as (runtime, handle, read):
        reference = Reference(read())
        for step, adam in enumerate(GIVEN):
            gradients = gradients_of(runtime, handle, step)
            result = runtime.optimizer_step(handle) if adam is None else runtime.optimizer_step(handle, adam=adam)
            assert result.grad_norm == pytest.approx(reference.step(gradients, adam), rel=1e-4)
            reference.assert_equals(read(), step)
        if "tenant" not in kind:
            for group in handle.optimizer.param_groups:
                assert (group["lr"], tuple(group["betas"]), group["eps"]) == (0.02, (0.8, 0.9), 1e-6)
                assert group["weight_decay"] == pytest.approx(0.3 * group["wd_mult"])


def test_tenants_that_step_together_have_values_of_their_own(untied_model: Path) -> None:
    given = [AdamParams(lr=0.05, clip_grad=0.1), None, AdamParams(betas=(0.5, 0.6), weight_decay=3.0)]
    with open_runtime(untied_model, optimizer=CONFIG) as runtime:
        base = runtime.build_model(trainable=False)
        tenants = [runtime.create_lora_adapter(base, LORA) for _ in given]
        references = [Reference(copied(runtime.export_lora_adapter(tenant))) for tenant in tenants]
        for step in range(2):
            gradients = [gradients_of(runtime, tenant, step) for tenant in tenants]
            runtime.optimizer_step(tenants, adam=given)
            for tenant, reference, own, adam in zip(tenants, references, gradients, given, strict=True):
                reference.step(own, adam)
                reference.assert_equals(copied(runtime.export_lora_adapter(tenant)), step)
        before = copied(runtime.export_lora_adapter(tenants[0]))
        gradients_of(runtime, tenants[0], 2)
        with pytest.raises(HandleError, match="for adam; give each tenant once, and for adam the values of each, or None"):
            runtime.optimizer_step(tenants[:1], adam=given[:2])
        assert all(torch.equal(value, before[name]) for name, value in runtime.export_lora_adapter(tenants[0]))


@pytest.mark.parametrize(
    ("value", "problem"),
    [({"lr": -1.0}, "lr"), ({"betas": (0.9, 1.0)}, "betas"), ({"eps": 0.0}, "eps"), ({"clip_grad": math.nan}, "clip_grad")],
)
def test_values_that_no_step_can_have_are_refused(value: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        AdamParams(**value)
