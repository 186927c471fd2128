"""What a pass or step of several tenants asks of each of them, and what it leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rl_backend.contracts import HandleError, OptimizerConfig, PackedBatch
from rl_backend.contracts.lora import LORA_FIELD, LoRAConfig
from rl_backend.data.micro_batches import pack
from rl_backend.runtime.native.engine import NativeRuntime
from tests.support.native import VOCAB_SIZE
from tests.support.sft_batches import random_token_sequences
from tests.support.tenants import nll

CONFIG = LoRAConfig(rank=4, targets=("q_proj",))
FACTS = {"batch_num_tokens": 10.0, "dp_size": 1}
LOSSES = {"good": nll, "bad": nll}


def batch_of(*tenants: Any) -> list[PackedBatch]:
    rows = random_token_sequences((5,) * len(tenants), VOCAB_SIZE, 0)
    owned = [
        row.with_fields(sequence_fields={LORA_FIELD: torch.tensor(each.lora_id)})
        for row, each in zip(rows, tenants, strict=True)
    ]
    return [pack(owned, FACTS)]


def two(runtime: NativeRuntime) -> tuple[Any, Any, Any]:
    base = runtime.build_model(trainable=False, name="base")
    good, bad = (runtime.create_lora_adapter(base, CONFIG, name=name) for name in ("good", "bad"))
    return base, good, bad


def test_a_pass_of_several_is_refused_by_the_one_whose_gradients_are_broken_or_away(runtime: NativeRuntime) -> None:
    base, good, bad = two(runtime)
    both = batch_of(good, bad)
    bad.mark_incomplete()
    for reason in ("on 'bad': forward_backward raised an error in the middle", "on 'bad' while its grad is in host memory"):
        with pytest.raises(HandleError, match=reason):
            runtime.forward_backward(base, both, LOSSES)
        assert not good.has_gradients and not bad.has_gradients, "nothing has run"
        # It is asked for nothing where nothing of it is trained.
        assert set(runtime.forward_backward(base, both, LOSSES, forward_only=True).tenants) == {"good", "bad"}
        runtime.forward_backward(base, batch_of(good), LOSSES)
        runtime.zero_grad([good, bad])
        runtime.to(bad, "cpu", model=False, optimizer=False)
    runtime.to(bad, "device")
    runtime.forward_backward(base, both, LOSSES)
    assert good.has_gradients and bad.has_gradients


def test_a_tenant_runs_only_beside_a_base_that_is_on_the_device(runtime: NativeRuntime) -> None:
    base, good, bad = two(runtime)
    runtime.forward_backward(good, batch_of(good), nll)
    runtime.to(base, "cpu")
    calls: list[Any] = [
        lambda: runtime.forward_backward(good, batch_of(good), nll, forward_only=True),
        lambda: runtime.forward_backward(base, batch_of(good, bad), LOSSES),
        lambda: runtime.export_weights(good),
    ]
    for call in calls:
        with pytest.raises(HandleError, match="on 'base' while its model is in host memory"):
            call()
    assert [each.step for each in runtime.list_optimizer_states(base)] == [0, 0]
    runtime.lr_scheduler_step([good, bad])
    runtime.to(base, "device")
    assert runtime.optimizer_step(good).ok


def test_gradients_are_dropped_with_a_step_where_that_is_asked_for_those_of_one_that_failed_too(
    runtime: NativeRuntime,
) -> None:
    base, good, bad = two(runtime)
    both = batch_of(good, bad)
    runtime.forward_backward(base, both, LOSSES)
    bad.mark_incomplete()
    stepped, refused = runtime.optimizer_step([good, bad], zero_grad=True)
    assert stepped.ok and refused.error and bad.broken == ""
    for tenant in (good, bad):
        assert not tenant.has_gradients and not tenant.rows.gradients.any()
    runtime.forward_backward(base, both, LOSSES)
    assert runtime.optimizer_step(good).ok and good.has_gradients and good.rows.gradients.any()
    assert runtime.optimizer_step(good, zero_grad=True).ok and not good.has_gradients
    assert bad.has_gradients


def test_each_tenant_of_a_step_counts_zeros_if_its_own_optimizer_asks_for_them(runtime: NativeRuntime) -> None:
    base = runtime.build_model(trainable=False)
    tenants = [
        runtime.create_lora_adapter(base, CONFIG, OptimizerConfig(log_num_zeros_in_grad=counts), name=str(number))
        for number, counts in enumerate((False, True, False, True))
    ]
    for tenant in tenants:
        runtime.forward_backward(tenant, batch_of(tenant), nll)
    (last,) = (tenant for tenant in tenants if tenant.name == "3")
    last.rows.gradients.zero_()  # type: ignore[attr-defined]
    steps = runtime.optimizer_step(tenants)
    # Factors A, (4, 64) in two layers, have no gradient at first, as B is zero; B is (128, 4).
    assert [step.num_zeros for step in steps] == [None, 2 * 4 * 64, None, 2 * (4 * 64 + 128 * 4)]
    assert [step.grad_norm > 0 for step in steps] == [True, True, True, False]
    assert steps[0].grad_norm == steps[2].grad_norm == pytest.approx(steps[1].grad_norm)
