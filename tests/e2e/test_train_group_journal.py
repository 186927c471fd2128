"""What a training group keeps of its operations: enough to build it again, and results of steps that are not final yet."""

from __future__ import annotations

import os
import pickle
import signal
from pathlib import Path

import pytest
import torch

from actors import HandleRef, Loss, TrainGroup
from rl_backend.contracts import (
    ForwardResult,
    GroupFailedError,
    HandleError,
    NativeConfig,
    OptimizerConfig,
    RuntimeConfig,
    StepResult,
)
from rl_backend.contracts.lora import LoRAConfig
from tests.support.models import write_tiny_qwen3
from tests.support.sft_batches import random_token_sequences

NLL = Loss("tests.support.losses:nll_loss")
OPTIMIZER = OptimizerConfig(lr=1e-2, clip_grad=100.0)
LENGTHS = [12, 20, 9, 31, 25, 14]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3(tmp_path_factory.mktemp("model"), num_hidden_layers=4)


def config(model: Path) -> RuntimeConfig:
    return RuntimeConfig(hf_path=str(model), backend_cfg=NativeConfig(device="cpu", optimizer=OPTIMIZER))


@pytest.mark.shows("actors: a group's journal builds the models of a lost group again")
def test_a_lost_group_is_built_again_from_its_journal(ray_cluster: None, model: Path) -> None:
    lost = TrainGroup(config(model), num_ranks=1)
    policy = lost.build_model(name="policy", optimizer=OPTIMIZER.replace(lr=0.5))
    lost.zero_grad(policy)
    base = lost.build_model(trainable=False, name="base")
    gone, actor = (lost.create_lora_adapter(base, LoRAConfig(rank=rank)) for rank in (4, 8))
    lost.remove_lora_adapter(gone)
    reference = lost.build_model(forward_only=True, name="reference")
    with pytest.raises(HandleError, match="forward-only"):
        lost.zero_grad(reference)
    assert [(entry.name, entry.number) for entry in lost.journal] == [
        ("build_model", policy.key),
        ("build_model", base.key),
        ("create_lora_adapter", actor.key),
        ("build_model", reference.key),
    ]
    copy: TrainGroup = pickle.loads(pickle.dumps(lost))
    copy.take_over()
    critic = copy.build_model(name="critic", head="values")
    lost.take_over()
    journal = pickle.loads(pickle.dumps(lost.journal))
    assert journal == copy.journal and journal[-1].number == critic.key
    os.kill(lost.ranks[0].pid, signal.SIGKILL)
    with pytest.raises(GroupFailedError, match="died"):
        lost.weight_version(policy)
    with TrainGroup(config(model), num_ranks=1) as group:
        built = list(group.replay(journal).values())
        assert [(handle.name, handle.forward_only, handle.head) for handle in built] == [
            ("policy", False, "log_probs"),
            ("base", True, "log_probs"),
            (actor.name, False, "log_probs"),
            ("reference", True, "log_probs"),
            ("critic", False, "values"),
        ]
        assert group.lr_scheduler_step(built[0]) == 0.5
        assert [info.config.rank for info in group.list_lora_adapters(built[1])] == [8]
        assert [entry.name for entry in group.journal] == [entry.name for entry in journal]


def trained(group: TrainGroup, policy: HandleRef, steps: int, *, wait: bool) -> list[tuple[ForwardResult, StepResult]]:
    """Results of passes and steps; with ``wait`` each is read before the next is submitted."""
    futures = []
    for step in range(steps):
        group.zero_grad.submit(policy)
        passed = group.forward_backward.submit(policy, random_token_sequences(LENGTHS, 128, seed=step), NLL)
        stepped = group.optimizer_step.submit(policy)
        group.lr_scheduler_step.submit(policy)
        if wait:
            stepped.result()
        futures.append((passed, stepped))
    return [(passed.result(), stepped.result()) for passed, stepped in futures]


@pytest.mark.shows("actors: steps submitted without waiting give the same weights as steps waited for, bit for bit")
def test_a_group_takes_steps_that_nobody_waits_for(two_ranks: TrainGroup) -> None:
    found = []
    for wait in (True, False):
        policy = two_ranks.build_model(optimizer=OPTIMIZER)
        records = trained(two_ranks, policy, steps=3, wait=wait)
        results = [(passed.losses, step.ok, step.grad_norm) for passed, step in records]
        log_probs = two_ranks.forward(policy, random_token_sequences(LENGTHS, 128)).output("log_probs")
        found.append((results, torch.cat(list(log_probs)), two_ranks.weight_version(policy)))
    (waited, expected, version), (not_waited, log_probs, same_version) = found
    assert not_waited == waited and all(ok for _, ok, _ in waited)
    assert version == same_version == 3
    torch.testing.assert_close(log_probs, expected, rtol=0, atol=0)
