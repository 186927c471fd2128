"""Actor, critic and reference of PPO as three models of one training group."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from actors import Loss, TrainGroup
from rl_backend.contracts import BatchError, OptimizerConfig
from tests.support.critic import transformers_values, write_critic
from tests.support.sft_batches import random_token_sequences

LENGTHS = [7, 31, 2, 18, 24]


@pytest.fixture(scope="module")
def group(two_ranks: TrainGroup) -> TrainGroup:
    return two_ranks


@pytest.mark.shows("critic: one training group holds actor, critic and reference, each with its own directory and optimizer")
def test_a_critic_beside_an_actor_gives_values_and_learns_at_its_own_rate(
    group: TrainGroup, untied_model: Path, tmp_path: Path
) -> None:
    path = write_critic(tmp_path / "critic", untied_model)
    sequences = random_token_sequences(LENGTHS, 128)
    actor = group.build_model(name="actor")
    critic = group.build_model(name="critic", head="values", hf_path=path, optimizer=OptimizerConfig(lr=2e-3))
    assert (actor.head, critic.head) == ("log_probs", "values")
    result = group.forward(critic, sequences)
    assert list(result.outputs) == ["values"]
    assert [len(row) for row in result.output("values")] == LENGTHS
    expected = transformers_values(path, [sequence.input_ids for sequence in sequences])
    torch.testing.assert_close(torch.cat(list(result.output("values"))), expected, atol=1e-5, rtol=0)
    before = group.forward(actor, sequences).output("log_probs")
    losses = []
    for _ in range(3):
        group.zero_grad(critic)
        losses.append(group.forward_backward(critic, sequences, Loss("tests.support.critic:squared_error")).loss)
        assert group.optimizer_step(critic).ok
        assert group.lr_scheduler_step(critic) == 2e-3
    assert losses[-1] < losses[0]
    assert (group.weight_version(actor), group.weight_version(critic)) == (0, 3)
    after = group.forward(actor, sequences).output("log_probs")
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_a_loss_that_reads_log_probs_of_a_critic_is_refused_by_name(group: TrainGroup) -> None:
    critic = group.build_model(head="values")
    with pytest.raises(BatchError, match="log_probs"):
        group.forward_backward(
            critic, random_token_sequences(LENGTHS, 128), Loss("rl_backend.algorithm:sft_loss"), forward_only=True
        )
