"""Steps of tenants: one without gradients beside others, moments begun anew, and checkpoints without their optimizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_backend.checkpoint.manifest import MANIFEST_NAME
from rl_backend.contracts import CheckpointError, HandleError, OptimizerConfig, UnsupportedError
from rl_backend.contracts.lora import LoRAConfig
from rl_backend.runtime.native.engine import NativeRuntime
from rl_backend.runtime.tenants.state import saved_tenant
from tests.support.native import micro_batches, token_loss
from tests.support.tenants import copied, rows

LORA = LoRAConfig(rank=4, alpha=40.0, targets=("q_proj", "down_proj"))
OPTIMIZER = OptimizerConfig(lr=0.02, lr_warmup_steps=4, weight_decay=0.3, clip_grad=0.0)


def pass_of(runtime: NativeRuntime, tenant: Any, seed: int) -> None:
    runtime.zero_grad(tenant)
    runtime.forward_backward(tenant, micro_batches([[0, 1], [2, 3]], seed=seed), token_loss)


def train(runtime: NativeRuntime, tenant: Any, seeds: range) -> None:
    for seed in seeds:
        pass_of(runtime, tenant, seed)
        assert runtime.optimizer_step(tenant).ok
        runtime.lr_scheduler_step(tenant)


def made(runtime: NativeRuntime, base: Any, name: str, **changes: Any) -> Any:
    return runtime.create_lora_adapter(base, LORA.replace(**changes), OPTIMIZER, name=name)


def test_a_tenant_without_gradients_has_an_error_and_the_others_step_as_they_would_alone(runtime: NativeRuntime) -> None:
    base = runtime.build_model(trainable=False)
    alone, first, idle, broken, last = (made(runtime, base, name) for name in ("alone", "first", "idle", "broken", "last"))
    for tenant in (alone, first, broken, last):
        pass_of(runtime, tenant, 0)
    broken.mark_incomplete()
    before = rows(idle)
    assert runtime.optimizer_step(alone).ok
    steps = runtime.optimizer_step([idle, first, broken, last], adam=[None] * 4)
    assert [step.ok for step in steps] == [False, True, False, True]
    assert [bool(step.error) for step in steps] == [True, False, True, False]
    assert "'idle' without gradients; call forward_backward first" in steps[0].error
    assert "'broken': forward_backward raised an error in the middle" in steps[2].error
    assert [each.weight_version for each in (idle, first, broken, last)] == [0, 1, 0, 1]
    assert all(torch.equal(*pair) for pair in zip(rows(idle), before, strict=True))
    for tenant in (first, last):
        assert all(torch.equal(*pair) for pair in zip(rows(tenant), rows(alone), strict=True))
    assert [step.ok for step in runtime.optimizer_step([idle, broken])] == [False, False]
    with pytest.raises(HandleError, match="optimizer_step on 'idle' without gradients"):
        runtime.optimizer_step(idle)


def test_a_reset_optimizer_takes_its_next_step_as_the_first_of_torchs_adamw(runtime: NativeRuntime) -> None:
    tenant = made(runtime, runtime.build_model(trainable=False), "one")
    train(runtime, tenant, range(3))
    runtime.reset_optimizer(tenant)
    info = runtime.get_lora_adapter(tenant)
    assert (info.step, info.learning_rate, info.weight_version) == (0, OPTIMIZER.lr * 3 / 4, 3)
    assert not any(bool(moment.any()) for moment in rows(tenant)[1:])
    weights = {name: torch.nn.Parameter(value) for name, value in copied(runtime.export_lora_adapter(tenant)).items()}
    pass_of(runtime, tenant, 3)
    for name, gradient in runtime.export_gradients(tenant):
        weights[name].grad = gradient.clone()
    torch.optim.AdamW(weights.values(), lr=info.learning_rate, eps=OPTIMIZER.eps, weight_decay=0.3).step()
    assert runtime.optimizer_step(tenant).ok
    for name, value in runtime.export_lora_adapter(tenant):
        torch.testing.assert_close(value, weights[name].detach(), rtol=1e-5, atol=1e-7)


def test_a_tenant_is_made_from_its_checkpoint_and_continues_with_or_without_its_optimizer(
    runtime: NativeRuntime, tmp_path: Path
) -> None:
    base = runtime.build_model(trainable=False)
    tenant = made(runtime, base, "one", seed=5)
    train(runtime, tenant, range(2))
    runtime.save_checkpoint(tenant, tmp_path / "saved", extra={"step": 2})
    # As one from before there was the field.
    manifest = tmp_path / "saved" / MANIFEST_NAME
    facts = json.loads(manifest.read_text())
    del facts["lora"]["config"]["experts_share_factor"]
    manifest.write_text(json.dumps(facts))
    weights: dict[str, Tensor] = copied(runtime.export_lora_adapter(tenant))
    lora, head = saved_tenant(tmp_path / "saved")
    assert (lora, head) == (LORA.replace(seed=5), "log_probs")
    whole, other = (runtime.create_lora_adapter(base, lora, OPTIMIZER, name=name) for name in ("whole", "other"))
    train(runtime, other, range(1))  # what it has is replaced
    assert runtime.load_checkpoint(whole, tmp_path / "saved") == {"step": 2}
    assert runtime.load_checkpoint(other, tmp_path / "saved", optimizer=False) == {"step": 2}
    for each, step, rate in ((whole, 2, OPTIMIZER.lr / 2), (other, 0, 0.0)):
        info = runtime.get_lora_adapter(each)
        assert (info.step, info.learning_rate, info.weight_version) == (step, rate, 2)
        assert all(torch.equal(value, weights[name]) for name, value in runtime.export_lora_adapter(each))
    assert not any(bool(moment.any()) for moment in rows(other)[1:])
    for each in (tenant, whole):
        train(runtime, each, range(2, 4))
    assert all(torch.equal(*pair) for pair in zip(rows(tenant), rows(whole), strict=True))


def test_weights_alone_fit_another_seed_and_what_cannot_work_is_refused(runtime: NativeRuntime, tmp_path: Path) -> None:
    base, model = runtime.build_model(trainable=False), runtime.build_model()
    one, other, larger = (
        made(runtime, base, "one"),
        made(runtime, base, "other", seed=7),
        made(runtime, base, "larger", rank=8),
    )
    runtime.save_checkpoint(one, tmp_path / "tenant")
    runtime.save_checkpoint(model, tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"LoRAConfig\.seed=0, 'other' has 7"):
        runtime.load_checkpoint(other, tmp_path / "tenant")
    runtime.load_checkpoint(other, tmp_path / "tenant", optimizer=False)
    for optimizer in (True, False):
        with pytest.raises(CheckpointError, match=r"LoRAConfig\.rank=4, 'larger' has 8"):
            runtime.load_checkpoint(larger, tmp_path / "tenant", optimizer=optimizer)
    with pytest.raises(UnsupportedError, match="only LoRA tenants load without their optimizer"):
        runtime.load_checkpoint(model, tmp_path / "model", optimizer=False)
    with pytest.raises(CheckpointError, match="holds a whole model, and no LoRA tenant"):
        saved_tenant(tmp_path / "model")
    with pytest.raises(HandleError, match="is no LoRA tenant"):
        runtime.reset_optimizer(model)
