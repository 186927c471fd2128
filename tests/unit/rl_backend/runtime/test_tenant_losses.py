"""What the loss of a tenant is given in a pass of several: its own sequences, in order, with all that belongs to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_backend.contracts import MetricValue, ModelOutput, OptimizerConfig, PackedBatch, TokenSequence
from rl_backend.contracts.lora import LORA_FIELD, LoRAConfig
from rl_backend.data.micro_batches import pack
from rl_backend.runtime.native.engine import NativeRuntime
from rl_backend.runtime.tenants.handle import TenantHandle
from tests.support.native import VOCAB_SIZE
from tests.support.peft_reference import load_factors, peft_factors, peft_model
from tests.support.sft_batches import random_token_sequences

LENGTHS = (9, 14, 5, 11, 7)
CONFIG = LoRAConfig(rank=4, alpha=12.0, targets=("q_proj", "up_proj"))
NOBODY, FIRST, SECOND = -1, 0, 1
ORDERS: Mapping[str, Sequence[int]] = {
    "the first sequence is another's": (FIRST, SECOND, SECOND, FIRST, NOBODY),
    "in turns": (SECOND, FIRST, SECOND, NOBODY, FIRST),
    "the base between": (FIRST, NOBODY, NOBODY, FIRST, SECOND),
}


def sequences_of(owners: Sequence[int], tenants: Sequence[TenantHandle]) -> list[TokenSequence]:
    """Each with an advantage and a token field that no other has."""
    found = []
    for number, (row, owner) in enumerate(zip(random_token_sequences(LENGTHS, VOCAB_SIZE, 4), owners, strict=True)):
        lora_id = NOBODY if owner == NOBODY else tenants[owner].lora_id
        of_sequence = {LORA_FIELD: torch.tensor(lora_id), "advantages": torch.tensor(number + 1.0)}
        found.append(row.with_fields({"weights": number + torch.arange(len(row)) / 100}, of_sequence))
    return found


def shaken(factors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """The factors with noise of about a tenth of what A begins with."""
    generator = torch.Generator().manual_seed(0)
    return {name: factor + 0.02 * torch.randn(factor.shape, generator=generator) for name, factor in factors}


class Seen:
    """A loss of what it is given: ``- sum(advantage * weight * log-prob)``, over the tenant's own number of tokens."""

    def __init__(self) -> None:
        self.batches: list[PackedBatch] = []

    def __call__(
        self, model_output: ModelOutput, data: PackedBatch, dp_group: Any = None
    ) -> tuple[Tensor, Mapping[str, MetricValue]]:
        assert model_output.log_probs is not None
        self.batches.append(data)
        advantages = data.sequence_fields["advantages"].repeat_interleave(data.seq_lens)
        total = (advantages * data.token_fields["weights"] * model_output.log_probs).sum()
        return -total / data.meta["batch_num_tokens"], {}


@pytest.mark.shows("lora: each tenant's loss has its own sequences with their fields, wherever they stand in the batch")
@pytest.mark.parametrize("order", ORDERS)
def test_a_loss_has_the_fields_of_its_own_sequences_and_the_gradients_of_peft(
    runtime: NativeRuntime, model: Path, order: str
) -> None:
    base = runtime.build_model(trainable=False)
    tenants = [
        runtime.create_lora_adapter(base, CONFIG.replace(seed=seed), OptimizerConfig(lr=1e-2), name=f"{seed}")
        for seed in (0, 1)
    ]
    for tenant in tenants:  # B begins at zero, where A has no gradient
        runtime.import_lora_adapter(tenant, shaken(runtime.export_lora_adapter(tenant)))
    owners, losses = ORDERS[order], [Seen(), Seen()]
    rows = sequences_of(owners, tenants)
    facts = {each.lora_id: {"batch_num_tokens": 10.0 + each.lora_id} for each in tenants}
    data = [pack(rows[:3], {"tenants": facts}), pack(rows[3:], {"tenants": facts})]
    result = runtime.forward_backward(base, data, {"0": losses[0], "1": losses[1]})
    for owner, (tenant, loss) in enumerate(zip(tenants, losses, strict=True)):
        mine = [index for index, each in enumerate(owners) if each == owner]
        seen = [value for batch in loss.batches for value in batch.sequence_fields["advantages"].tolist()]
        assert seen == [index + 1.0 for index in mine]
        for index, ids in zip(mine, [ids for batch in loss.batches for ids in batch.split(batch.input_ids)], strict=True):
            assert torch.equal(ids, rows[index].input_ids)
        reference = peft_model(model, CONFIG)
        load_factors(reference, dict(runtime.export_lora_adapter(tenant)))
        expected = torch.zeros(())
        for index in mine:
            log_probs = torch.log_softmax(reference(rows[index].input_ids[None]).logits[0], -1)[:-1]
            of_tokens = log_probs.gather(1, rows[index].input_ids[1:, None])[:, 0]
            expected = expected - (index + 1.0) * (rows[index].token_fields["weights"][:-1] * of_tokens).sum()
        expected = expected / facts[tenant.lora_id]["batch_num_tokens"]
        expected.backward()
        assert result.tenants[tenant.name].loss == pytest.approx(expected.item(), rel=1e-5)
        gradients = dict(runtime.export_gradients(tenant))
        for name, factor in peft_factors(reference).items():
            torch.testing.assert_close(gradients[name], factor.grad, rtol=1e-4, atol=1e-6)
