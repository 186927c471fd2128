"""Engines that neither answer nor end, and groups that change while they are called."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from actors.rollout.config import RolloutConfig, SamplingConfig
from actors.rollout.group import heartbeats
from actors.rollout.group.group import RolloutGroup
from actors.rollout.group.turns import HANGING_SECONDS
from actors.sync.push import WeightSync
from actors.sync.source import WeightSource
from rl_backend.contracts import ConfigError, EngineDeadError
from tests.support.engines import GroupWithoutVllm

LIMIT = 4.0
PROMPTS = [[1], [2]]
SLEEPS = SamplingConfig(max_new_tokens=2)
"""The stand-in samples for ``max_new_tokens`` seconds."""


@pytest.fixture(scope="module")
def module_group(ray_cluster: None, untied_model: Path) -> Iterator[RolloutGroup]:
    config = RolloutConfig(model_path=str(untied_model), num_engines=2, device="cpu", sampling_timeout=LIMIT, max_restarts=0)
    with GroupWithoutVllm(config) as group:
        yield group


@pytest.fixture
def group(module_group: RolloutGroup, monkeypatch: pytest.MonkeyPatch) -> RolloutGroup:
    # Heartbeats would find the process stopped.
    monkeypatch.setattr(heartbeats, "LATE_BEATS", 10**6)
    for engine in list(module_group.lost_engines):
        module_group.restart(engine)
    return module_group


def stop_one(group: RolloutGroup) -> int:
    """Engine 1 stops in the middle of a call, as one whose threads wait for each other does."""
    time.sleep(0.5)
    pid = group.infos[1].pid
    os.kill(pid, signal.SIGSTOP)
    return pid


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.long
@pytest.mark.parametrize("who", [*(pytest.param(who, marks=pytest.mark.long) for who in ("describe", "result")), "push"])
def test_an_engine_that_hangs_while_it_samples_is_named_and_ended(group: RolloutGroup, who: str) -> None:
    sync = WeightSync(WeightSource({"a": torch.zeros(3)}), group)
    pending = group.submit(PROMPTS, SLEEPS)
    pid = stop_one(group)
    started = time.monotonic()
    waits: dict[str, Callable[[], Any]] = {"describe": group.describe, "result": pending.result, "push": sync.push}
    with sync, pytest.raises(EngineDeadError, match="engine 1 "):
        waits[who]()
    # Where it answers nothing, it is asked whether it does anything for others.
    assert time.monotonic() - started < LIMIT + HANGING_SECONDS + 10
    assert group.engines == (0,)
    assert f"engine 1 has answered no request for {LIMIT:g} s (RolloutConfig.sampling_timeout)" in str(group.lost_engines[1])
    assert set(group.describe()) == {0}
    with pytest.raises(EngineDeadError, match="engine 1"):
        pending.result()
    deadline = time.monotonic() + 30
    while not ended(pid):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    group.restart(1)
    assert len(group.generate(PROMPTS, SamplingConfig(max_new_tokens=1))) == 2


def test_a_call_to_an_engine_that_was_restarted_since_keeps_its_error_and_leaves_the_new_one_alone(
    group: RolloutGroup,
) -> None:
    calls = [group.submit(PROMPTS, SLEEPS) for _ in range(2)]
    os.kill(group.infos[1].pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="engine 1 is dead"):
        calls[0].result()
    group.restart(1)
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="engine 1 is dead"):
            calls[1].result()
    assert calls[1].done()
    assert group.engines == (0, 1)


@pytest.mark.long
def test_an_engine_that_does_not_restart_stays_lost_with_the_reason(
    group: RolloutGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(group, "config", group.config.replace(model_path="/no/such/model"))
        with pytest.raises(ConfigError, match="/no/such/model"):
            group.restart(1)
    assert group.engines == (0,)
    assert "/no/such/model" in str(group.lost_engines[1])


def test_a_push_goes_to_the_engines_that_it_began_with_while_one_is_restarted(group: RolloutGroup) -> None:
    fixed = group.engine_set.fixed()
    old = fixed.infos[1].pid
    group.restart(1)
    outcomes = fixed.call("describe")
    assert outcomes[0].pid == group.infos[0].pid
    assert isinstance(outcomes[1], EngineDeadError)
    assert fixed.engines == (0,)
    assert group.engines == (0, 1)
    assert group.infos[1].pid != old
    assert ray.get(group.engine_set.actors()[1].describe.remote()).pid == group.infos[1].pid


def test_pushes_while_an_engine_is_restarted_raise_nothing_but_its_death(group: RolloutGroup) -> None:
    source = WeightSource({"a": torch.zeros(3)})
    restarted = threading.Event()

    def restart() -> None:
        try:
            group.restart(1)
        finally:
            restarted.set()

    with WeightSync(source, group) as sync:
        sync.push()
        thread = threading.Thread(target=restart)
        thread.start()
        pushed, died = [], []
        while not restarted.is_set():
            source.version += 1
            try:
                pushed.append(sync.push().engines)
            except EngineDeadError as error:
                died.append(str(error))
        thread.join()
        assert (0,) in pushed and len(died) <= 1
        assert all("engine 1" in message for message in died)
        source.version += 1
        assert sync.push().engines == (0, 1)
