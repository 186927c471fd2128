"""LoRA tenants when processes are killed: engines in the middle of a push, and training ranks."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from actors import HandleRef, RunCheckpoints, TrainGroup, WeightSync
from rl_backend.contracts import (
    EngineDeadError,
    GroupFailedError,
    NativeConfig,
    OptimizerConfig,
    RuntimeConfig,
    WeightCheckError,
)
from tests.support.served_tenants import CONFIGS, ServedTenants, take_step

EVERYONE = ["narrow", "middle", "wide", None, "wide", "narrow"]


@contextmanager
def pushing_all(served: ServedTenants) -> Iterator[None]:
    """Another thread steps and pushes one tenant after the other; raises what it raises."""
    stop, failures = threading.Event(), list[BaseException]()

    def push_on() -> None:
        step = 100
        try:
            while not stop.wait(0.2):
                for name, sync in served.syncs.items():
                    served.step(name, step := step + 1)
                    sync.push()
        except BaseException as error:  # noqa: BLE001 - for the test's own thread
            failures.append(error)

    pushing = threading.Thread(target=push_on)
    pushing.start()
    try:
        yield
    finally:
        stop.set()
        pushing.join()
    for error in failures:
        raise error


@pytest.mark.long
@pytest.mark.shows(
    "lora: kill -9 of an engine in mid-push leaves whole versions on the rest, and a new engine has all tenants"
)
@pytest.mark.shows("lora: an engine that joins while tenants are pushed serves the newest version of each")
@pytest.mark.parametrize("method", ["keep", "load"])
def test_an_engine_that_is_killed_in_mid_push(served: ServedTenants, method: str) -> None:
    rollout = served.rollout
    before = served.rollout.adapters
    rollout.engine_set.actors()[1].die_in.remote(method)
    served.step("middle", 90)
    with pytest.raises(EngineDeadError, match="engine 1 is dead"):
        served.syncs["middle"].push()
    assert rollout.engines == (0,) and rollout.adapters["middle"].version == before["middle"].version + 1
    served.assert_served(EVERYONE, served.versions())
    served.step("wide", 91)
    report = served.syncs["wide"].push()
    assert (report.engines, report.skipped) == ((0,), (1,))
    with pushing_all(served):
        rollout.restart(1)
        for _ in range(3):
            assert {sample.engine for sample in served.sample(EVERYONE)} == {0, 1}
    served.assert_served(EVERYONE, served.versions())


@pytest.mark.long
def test_a_push_that_one_engine_refuses_and_another_dies_in_changes_nothing(served: ServedTenants) -> None:
    rollout = served.rollout
    before, expected = rollout.adapters, served.tokens("middle")
    served.step("middle", 95)
    rollout.engine_set.actors()[0].falsify_adapters.remote("names")
    rollout.engine_set.actors()[1].die_in.remote("load")
    with pytest.raises(WeightCheckError, match="does not apply it"):
        WeightSync(served.train, rollout, served.tenants["middle"]).push()
    rollout.engine_set.actors()[0].falsify_adapters.remote("")
    assert rollout.engines == (0,) and rollout.adapters == before
    assert served.tokens("middle") == expected


@pytest.mark.long
@pytest.mark.shows("lora: after kill -9 of a rank a run resumes with every tenant at its last saved step and version")
def test_a_run_goes_on_with_every_tenant_after_a_rank_is_killed(
    ray_cluster: None, untied_model: Path, tmp_path: Path
) -> None:
    config = RuntimeConfig(hf_path=str(untied_model), backend_cfg=NativeConfig(device="cpu"))
    store, names = RunCheckpoints(tmp_path / "checkpoints"), list(CONFIGS)
    steps = {"narrow": 1, "middle": 2, "wide": 3}

    def train_on(group: TrainGroup, tenants: dict[str, HandleRef], first: int) -> dict[str, list[float]]:
        """Two more steps of each, with the schedule."""
        found: dict[str, list[float]] = {name: [] for name in tenants}
        for step in range(first, first + 2):
            for name, tenant in tenants.items():
                found[name].append(take_step(group, tenant, 10 * step + len(name)))
                found[name].append(group.lr_scheduler_step(tenant))
        return found

    lost = TrainGroup(config)
    base = lost.build_model(trainable=False, name="base")
    optimizer = OptimizerConfig(lr=1e-2, lr_warmup_steps=3, lr_decay_steps=20, lr_decay_style="linear")
    removed = lost.create_lora_adapter(base, CONFIGS["narrow"], name="removed")
    tenants = {
        name: lost.create_lora_adapter(base, CONFIGS[name].replace(dropout=0.1), optimizer, name=name) for name in names
    }
    lost.remove_lora_adapter(removed)
    for name, tenant in tenants.items():
        for step in range(steps[name]):
            take_step(lost, tenant, step)
    for name, tenant in tenants.items():
        lost.save_checkpoint(tenant, store.draft(4) / name, asynchronous=True)
    for tenant in tenants.values():
        lost.wait_for_checkpoint(tenant)
    store.commit(4, {"tenants": names})
    expected = train_on(lost, tenants, 10)
    factors = {name: lost.export_lora_adapter(tenant) for name, tenant in tenants.items()}
    os.kill(lost.ranks[0].pid, signal.SIGKILL)
    with pytest.raises(GroupFailedError, match="died"):
        take_step(lost, tenants["wide"], 99)

    checkpoint = store.latest()
    assert checkpoint is not None and checkpoint.state == {"tenants": names}
    with TrainGroup(config) as group:
        built = group.replay(lost.journal)
        assert [handle.name for handle in built.values()] == ["base", *names]
        again = {name: built[tenant.key] for name, tenant in tenants.items()}
        for name, tenant in again.items():
            group.load_checkpoint(tenant, checkpoint.model(name))
            assert group.weight_version(tenant) == steps[name]
        infos = {info.name: info for info in group.list_lora_adapters(built[base.key])}
        assert {name: info.step for name, info in infos.items()} == steps
        assert train_on(group, again, 10) == expected
        for name, tenant in again.items():
            assert all(torch.equal(value, factors[name][key]) for key, value in group.export_lora_adapter(tenant).items())
