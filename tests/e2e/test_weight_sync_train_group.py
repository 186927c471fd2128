"""The loop of on-policy training: train on ranks, push, sample, and find the same log-probs on both sides."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from actors import HandleRef, Loss, RolloutGroup, SamplingConfig, TrainGroup, WeightSync
from actors.wire.segment import DIRECTORY
from rl_backend.contracts import (
    NativeConfig,
    OptimizerConfig,
    RuntimeConfig,
    TokenSequence,
    UnsupportedError,
    WeightVersionError,
)
from tests.support.listening import family, listening_sockets
from tests.support.sft_batches import random_token_sequences

PROMPTS = [[5, 6, 7], list(range(20, 60)), [9, 10], [100, 90, 80, 70]]
NLL = Loss("tests.support.losses:nll_loss")
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def train(ray_cluster: None, four_layers: Path) -> Iterator[TrainGroup]:
    native = NativeConfig(device="cpu", optimizer=OptimizerConfig(lr=1e-2, clip_grad=1.0))
    config = RuntimeConfig(hf_path=str(four_layers), max_tokens_per_micro_batch=256, backend_cfg=native)
    with TrainGroup(config, num_ranks=2) as group:
        yield group


@pytest.fixture(scope="module")
def policy(train: TrainGroup) -> HandleRef:
    return train.build_model(name="policy")


@pytest.fixture(scope="module")
def rollout(random_engine: RolloutGroup) -> RolloutGroup:
    random_engine.forget_weights()  # of other trainers
    return random_engine


def train_one_step(train: TrainGroup, policy: HandleRef, seed: int) -> int:
    train.zero_grad(policy)
    train.forward_backward(policy, random_token_sequences([12, 20, 9, 31], 128, seed=seed), NLL)
    assert train.optimizer_step(policy).ok
    return train.weight_version(policy)


def segments_of(pid: int) -> list[Path]:
    return list(DIRECTORY.glob(f"rl_backend_weights-*-{pid}-*"))


def mean_gap(train: TrainGroup, policy: HandleRef, rollout: RolloutGroup, temperature: float) -> float:
    samples = rollout.generate(PROMPTS, SamplingConfig(n=2, temperature=temperature, max_new_tokens=8))
    sequences = [TokenSequence.from_prompt_and_response(sample.prompt_ids, sample.response_ids) for sample in samples]
    found = train.forward(policy, sequences, meta={"temperature": temperature}).output("log_probs")
    gaps = [
        abs(float(log_probs[len(sample.prompt_ids) - 1 + index]) - log_prob)
        for sample, log_probs in zip(samples, found, strict=True)
        for index, log_prob in enumerate(sample.log_probs)
    ]
    return sum(gaps) / len(gaps)


@pytest.mark.shows("weight sync: vLLM's log-probs equal the trainer's after every push, shared memory or gloo")
@pytest.mark.parametrize(("transport", "changed_only"), [("auto", False), ("gloo", False), ("gloo", True)])
def test_engines_and_ranks_agree_on_log_probs_after_every_step(
    train: TrainGroup, policy: HandleRef, rollout: RolloutGroup, transport: Any, changed_only: bool
) -> None:
    with WeightSync(train, rollout, policy, transport=transport, byte_budget=1 << 20, changed_only=changed_only) as sync:
        for step in range(2):
            version = train_one_step(train, policy, seed=step)
            report = sync.push()
            assert report.version == version
            assert report.transport == ("shared_memory" if transport == "auto" else transport)
            assert bool(report.changed) == (changed_only and step > 0)
            assert mean_gap(train, policy, rollout, temperature=0.8) <= TOLERANCE


def test_a_second_model_of_the_group_with_older_weights_and_a_critic_are_refused(
    train: TrainGroup, policy: HandleRef, rollout: RolloutGroup
) -> None:
    train_one_step(train, policy, seed=5)
    with WeightSync(train, rollout, policy) as sync:
        sync.push()
    fresh = train.build_model(name="fresh")
    with WeightSync(train, rollout, fresh) as other, pytest.raises(WeightVersionError, match="refuses the older version 0"):
        other.push()
    assert mean_gap(train, policy, rollout, temperature=1.0) <= TOLERANCE
    critic = train.build_model(name="critic", head="values")
    with pytest.raises(UnsupportedError, match=r"'critic' has head='values'.*push the policy"):
        WeightSync(train, rollout, critic)


@pytest.mark.shows("security: ranks, engines, weight transfer and Ray on one machine listen on the loopback address alone")
def test_a_run_on_one_machine_listens_on_the_loopback_address_alone(
    train: TrainGroup, policy: HandleRef, rollout: RolloutGroup
) -> None:
    with WeightSync(train, rollout, policy, transport="gloo") as sync:
        train_one_step(train, policy, seed=6)
        sync.push()
        sockets = listening_sockets(family(psutil.Process()))
    ranks = {rank.pid for rank in train.ranks}
    holders = {int(socket.process.split()[0]) for socket in sockets}
    # Each rank listens for its peers, each engine for the weights, and Ray's own processes for each other.
    assert ranks <= holders
    assert rollout.infos[0].pid in holders
    names = {socket.process.split()[1] for socket in sockets}
    assert {"gcs_server", "raylet"} <= names
    assert [socket for socket in sockets if not socket.out_of_reach] == []


def test_groups_that_end_leave_no_shared_memory_behind_though_the_sync_was_not_closed(
    train: TrainGroup, policy: HandleRef, rollout: RolloutGroup
) -> None:
    """The last test of this module: it ends both groups."""
    for seed, transport in enumerate(("shared_memory", "gloo"), start=7):
        train_one_step(train, policy, seed)
        WeightSync(train, rollout, policy, transport=transport).push()
    pids = [train.ranks[0].pid, rollout.infos[0].pid]
    assert all(segments_of(pid) for pid in pids)
    rollout.close()
    train.shutdown()
    assert not any(segments_of(pid) for pid in pids)
