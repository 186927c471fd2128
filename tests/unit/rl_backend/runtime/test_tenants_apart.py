"""What belongs to one tenant, or to the base that it was trained on, is not taken for another's."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_backend.contracts import CheckpointError, HandleError, MetricValue, ModelOutput, PackedBatch
from rl_backend.contracts.lora import LORA_FIELD, LoRAConfig
from rl_backend.data.micro_batches import pack
from rl_backend.runtime.native.engine import NativeRuntime
from tests.support.native import VOCAB_SIZE, open_runtime
from tests.support.sft_batches import random_token_sequences
from tests.support.tenants import create, train_tenants

CONFIG = LoRAConfig(rank=4, targets=("q_proj",))


def test_metrics_of_a_tenant_whose_name_begins_anothers_are_its_own(runtime: NativeRuntime) -> None:
    base = runtime.build_model(trainable=False)
    tenants = [runtime.create_lora_adapter(base, CONFIG, name=name) for name in ("run", "run/b")]

    def loss_of(number: float, name: str) -> Any:
        def loss(output: ModelOutput, data: PackedBatch, dp_group: Any = None) -> tuple[Tensor, dict[str, MetricValue]]:
            assert output.log_probs is not None
            return output.log_probs.sum(), {name: number}

        return loss

    rows = [
        sequence.with_fields(sequence_fields={LORA_FIELD: torch.tensor(tenant.lora_id)})
        for tenant in tenants
        for sequence in random_token_sequences((5,), VOCAB_SIZE, 0)
    ]
    losses = {"run": loss_of(1.0, "b/kl"), "run/b": loss_of(5.0, "kl")}
    result = runtime.forward_backward(base, [pack(rows)], losses)
    found = {name: {metric: value.mean for metric, value in part.metrics.items()} for name, part in result.tenants.items()}
    assert found == {"run": {"b/kl": 1.0}, "run/b": {"kl": 5.0}}


@pytest.mark.shows("lora: a tenant is refused on a base that has loaded another checkpoint than the one it was trained on")
def test_a_tenant_is_refused_on_a_base_with_another_checkpoint(model: Path, tmp_path: Path) -> None:
    saved = {}
    for name, seed in (("first", 1), ("second", 2)):
        with open_runtime(model) as runtime:
            trained = runtime.build_model()
            runtime.forward_backward(trained, [pack(random_token_sequences((9,), VOCAB_SIZE, seed))], log_prob_loss)
            runtime.optimizer_step(trained)
            saved[name] = tmp_path / name
            runtime.save_checkpoint(trained, saved[name])
    with open_runtime(model) as runtime:
        base = runtime.build_model(trainable=False)
        runtime.load_checkpoint(base, saved["first"])
        tenants = create(runtime, base, ("narrow",))
        train_tenants(runtime, base, tenants, 1)
        runtime.save_checkpoint(tenants["narrow"], tmp_path / "tenant")
        with pytest.raises(HandleError, match=r"load_checkpoint on 'model-1', the base of 'narrow'.* before create_lora"):
            runtime.load_checkpoint(base, saved["second"])
    for loaded, problem in (
        ("", r"weights of \S+ are others than .*, and a checkpoint that its base had loaded\)"),
        ("second", r"weights of \S+, beside which the model has loaded a checkpoint, are others"),
        ("first", ""),
    ):
        with open_runtime(model) as runtime:
            base = runtime.build_model(trainable=False)
            if loaded:
                runtime.load_checkpoint(base, saved[loaded])
            tenant = create(runtime, base, ("narrow",))["narrow"]
            if problem:
                with pytest.raises(CheckpointError, match=problem):
                    runtime.load_checkpoint(tenant, tmp_path / "tenant")
            else:
                runtime.load_checkpoint(tenant, tmp_path / "tenant")


def log_prob_loss(output: ModelOutput, data: PackedBatch, dp_group: Any = None) -> tuple[Tensor, dict[str, MetricValue]]:
    assert output.log_probs is not None
    return -output.log_probs.sum(), {}


def test_a_tenants_failed_save_is_told_to_nobody_else(
    runtime: NativeRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = runtime.build_model(trainable=False)
    first, second = (runtime.create_lora_adapter(base, CONFIG, name=name) for name in ("first", "second"))
    runtime.save_checkpoint(second, tmp_path / "second")

    def full(*arguments: object, **options: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr("rl_backend.runtime.checkpoints.write_training_state", full)
        runtime.save_checkpoint(first, tmp_path / "first", asynchronous=True)
        runtime.load_checkpoint(second, tmp_path / "second")
    with pytest.raises(CheckpointError, match="disk full"):
        runtime.wait_for_checkpoint(first)


def test_nothing_of_a_removed_tenant_stays_in_memory(runtime: NativeRuntime, tmp_path: Path) -> None:
    """A save in the background has copied it into memory that is kept for the next one."""
    base = runtime.build_model(trainable=False)
    tenants = create(runtime, base, ("narrow", "wide"))
    train_tenants(runtime, base, tenants, 1)
    gone = tenants.pop("narrow")
    runtime.save_checkpoint(gone, tmp_path / "saved", asynchronous=True)
    runtime.wait_for_checkpoint(gone)
    runtime.remove_lora_adapter(gone)
    left = weakref.ref(gone)
    del gone
    gc.collect()
    assert left() is None
    train_tenants(runtime, base, tenants, 1)


class Interrupted(BaseException):
    """No ``Exception``, as ``KeyboardInterrupt``, which pytest would take for itself."""


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "beside another"])
def test_tenants_of_an_interrupted_pass_do_not_step_and_those_beside_it_do(runtime: NativeRuntime, alone: bool) -> None:
    base = runtime.build_model(trainable=False)
    tenants = [runtime.create_lora_adapter(base, CONFIG, name=name) for name in ("first", "second", "away")]
    calls: list[int] = []

    def interrupted(output: ModelOutput, data: PackedBatch, dp_group: Any = None) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise Interrupted("in the second micro-batch")
        return log_prob_loss(output, data, dp_group)

    mine = tenants[:1] if alone else tenants[:2]
    data = [
        pack(
            [
                sequence.with_fields(sequence_fields={LORA_FIELD: torch.tensor(tenant.lora_id)})
                for tenant in mine
                for sequence in random_token_sequences((5,), VOCAB_SIZE, seed)
            ]
        )
        for seed in range(2)
    ]
    runtime.forward_backward(tenants[2], [pack(random_token_sequences((5,), VOCAB_SIZE, 0))], log_prob_loss)
    handle: Any = tenants[0] if alone else base
    losses: Any = interrupted if alone else {"first": log_prob_loss, "second": interrupted}
    with pytest.raises(Interrupted):
        runtime.forward_backward(handle, data, losses)
    for tenant in mine:
        with pytest.raises(HandleError, match=f"'{tenant.name}': .*its gradients are incomplete; call zero_grad first"):
            runtime.optimizer_step(tenant)
        runtime.zero_grad(tenant)
        runtime.forward_backward(tenant, [pack(random_token_sequences((5,), VOCAB_SIZE, 0))], log_prob_loss)
        assert runtime.optimizer_step(tenant).ok
    assert runtime.optimizer_step(tenants[2]).ok
