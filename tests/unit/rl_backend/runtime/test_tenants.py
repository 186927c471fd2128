"""Tenants of equal ranks and rows, whose products are computed in one, have the bits that they have alone; their dropout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rl_backend.contracts import OptimizerConfig
from rl_backend.contracts.lora import LORA_FIELD, LoRAConfig
from rl_backend.data.micro_batches import pack
from tests.support.models import write_tiny
from tests.support.native import VOCAB_SIZE, open_runtime
from tests.support.sft_batches import random_token_sequences
from tests.support.tenants import batches, create, nll, rows, train_tenants

LENGTHS = (16, 21)
SCALES = (16.0, 32.0, 8.0)
"""``alpha`` of each tenant."""


def trained(model: Path, chosen: Sequence[int]) -> list[list[Tensor]]:
    """State of each of the tenants ``chosen`` after three steps beside each other."""
    with open_runtime(model) as runtime:
        base = runtime.build_model(trainable=False)
        tenants = [
            runtime.create_lora_adapter(
                base, LoRAConfig(rank=16, alpha=SCALES[index], seed=index), OptimizerConfig(lr=1e-2), name=f"tenant {index}"
            )
            for index in chosen
        ]
        for step in range(3):
            sequences = [
                sequence.with_fields(sequence_fields={LORA_FIELD: torch.tensor(tenant.lora_id)})
                for index, tenant in zip(chosen, tenants, strict=True)
                for sequence in random_token_sequences(LENGTHS, VOCAB_SIZE, 10 * step + index)
            ]
            facts = {tenant.lora_id: {"batch_num_tokens": float(sum(LENGTHS))} for tenant in tenants}
            data = [pack(sequences, {"tenants": facts, "dp_size": 1})]
            runtime.forward_backward(base, data, {tenant.name: nll for tenant in tenants})
            assert all(result.ok for result in runtime.optimizer_step(tenants))
            runtime.zero_grad(tenants)
        return [rows(tenant) for tenant in tenants]


def test_each_is_the_same_to_the_last_bit_alone(tmp_path: Path) -> None:
    model = write_tiny("qwen3", tmp_path / "qwen3")
    for index, beside in enumerate(trained(model, range(len(SCALES)))):
        (alone,) = trained(model, [index])
        assert all(torch.equal(*pair) for pair in zip(alone, beside, strict=True))


def test_an_untrained_adapter_with_magnitudes_leaves_the_model_as_it_is(model: Path) -> None:
    data = [pack(random_token_sequences(LENGTHS, VOCAB_SIZE, 0))]
    with open_runtime(model) as runtime:
        base = runtime.build_model(trainable=False)
        # These are square: norms of columns would have the size of those of rows.
        tenant = runtime.create_lora_adapter(base, LoRAConfig(rank=4, targets=("k_proj", "v_proj"), use_dora=True))
        found, expected = (
            torch.cat(list(runtime.forward_backward(each, data, None, forward_only=True).output("log_probs")))
            for each in (tenant, base)
        )
    torch.testing.assert_close(found, expected)


def test_training_alone_draws_dropout_anew_in_each_pass(tmp_path: Path) -> None:
    with open_runtime(write_tiny("qwen3", tmp_path / "qwen3")) as runtime:
        base = runtime.build_model(trainable=False)
        tenants = create(runtime, base, ("narrow",), dropout=0.5)
        tenant = tenants["narrow"]
        train_tenants(runtime, base, tenants, 1)
        assert tenant.rows.num_draws == 1
        data = batches(tenants, 1, 0, 1)

        def losses(*, forward_only: bool = False) -> tuple[float, ...]:
            result = runtime.forward_backward(base, data, {"narrow": nll}, forward_only=forward_only)
            runtime.zero_grad([tenant])
            return result.tenants["narrow"].losses

        without = losses(forward_only=True)
        assert losses(forward_only=True) == without
        with runtime.eval_mode(tenant):  # type: ignore[arg-type]
            assert losses() == pytest.approx(without)
        assert tenant.rows.num_draws == 1
        assert losses() != losses()
        assert tenant.rows.num_draws == 3


def test_sequences_with_another_tenants_between_them_drop_inputs_of_their_own(tmp_path: Path) -> None:
    row, other = random_token_sequences((16, 21), VOCAB_SIZE, 0)
    with open_runtime(write_tiny("qwen3", tmp_path / "qwen3")) as runtime:
        base = runtime.build_model(trainable=False)
        tenants = create(runtime, base, ("narrow", "middle"), dropout=0.5)
        mine, theirs = (torch.tensor(tenant.lora_id) for tenant in tenants.values())
        factors = runtime.export_lora_adapter(tenants["narrow"])
        runtime.import_lora_adapter(tenants["narrow"], {name: torch.full_like(value, 0.1) for name, value in factors})
        owned = [each.with_fields(sequence_fields={LORA_FIELD: whose}) for each, whose in ((row, mine), (other, theirs))]
        facts = {tenant.lora_id: {"batch_num_tokens": 1.0} for tenant in tenants.values()}
        data = [pack([*owned, owned[0]], {"tenants": facts, "dp_size": 1})]
        first, _, second = runtime.forward_backward(base, data, dict.fromkeys(tenants, nll)).output("log_probs")
    assert not torch.allclose(first, second, atol=1e-3)
