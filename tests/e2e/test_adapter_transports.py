"""The ways of an adapter into engines: shared memory, Ray's object store, a directory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors import WeightSync
from actors.rollout.group.engines import raise_failures
from actors.wire.factors import PackedFactors, SharedFactors
from rl_backend.checkpoint.peft_files import read_peft_directory
from rl_backend.contracts import WeightSyncError
from tests.support.served_tenants import PROMPTS, ServedTenants


@pytest.mark.shows("lora: an adapter goes through a directory in peft's format as through memory, to the bit")
def test_an_adapter_goes_through_a_directory(served: ServedTenants, tmp_path: Path) -> None:
    before = served.tokens("wide")
    sync = WeightSync(served.train, served.rollout, served.tenants["wide"], directory=tmp_path)
    report = sync.push()
    assert report.transport == "directory" and served.tokens("wide") == before
    served.step("wide", 80)
    sync.push()
    served.assert_served(["wide"] * len(PROMPTS), served.versions())
    (directory,) = tmp_path.iterdir()
    assert read_peft_directory(directory).parts.keys() == {
        name.removeprefix("base_model.model.").rpartition(".lora_")[0]
        for name in served.train.export_lora_adapter(served.tenants["wide"])
    }
    served.syncs["wide"].push()
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_an_engine_that_starts_again_reads_the_directory(served: ServedTenants, tmp_path: Path) -> None:
    served.step("wide", 81)
    WeightSync(served.train, served.rollout, served.tenants["wide"], directory=tmp_path).push()
    served.rollout.restart(0)
    served.push_base()
    served.assert_served(["wide"] * len(PROMPTS), served.versions())


@pytest.mark.shows("lora: where trainer, driver and an engine share no memory, an adapter goes through Ray's object store")
def test_an_adapter_goes_where_no_memory_is_shared(served: ServedTenants, monkeypatch: pytest.MonkeyPatch) -> None:
    rollout, sync = served.rollout, served.syncs["wide"]

    def full(nbytes: int) -> Any:
        raise WeightSyncError("/dev/shm has 0 MiB free")

    served.step("wide", 85)
    with monkeypatch.context() as patch:
        patch.setattr(rollout.lora.memory, "take", full)
        assert sync.push().transport == "object_store"
    served.assert_served(["wide"] * len(PROMPTS), served.versions())
    served.step("wide", 86)
    with monkeypatch.context() as patch:
        patch.setattr("actors.rollout.group.adapters.host_identity", lambda: "another")
        assert sync.push().transport == "object_store"
    served.assert_served(["wide"] * len(PROMPTS), served.versions())
    served.step("wide", 87)
    with monkeypatch.context() as patch:
        patch.setattr("actors.train.group.PinnedRanks.run_on_ranks", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sync.push()
    assert not rollout.lora.memory._in_use.keys() - {
        pushed.factors.segment.path for pushed in rollout.lora._pushed.values() if isinstance(pushed.factors, SharedFactors)
    }
    assert sync.push().transport == "shared_memory"
    infos = {engine: replace(info, host="another") for engine, info in rollout.infos.items()}
    (pushed,) = (each for tenant, each in rollout.lora._pushed.items() if tenant == "wide")
    sent = rollout.lora.sent_to(pushed, infos[1])
    assert isinstance(sent.factors, PackedFactors) and rollout.lora.sent_to(pushed, rollout.infos[1]) == pushed
    again = replace(pushed.adapter, number=10**9 + 1)
    raise_failures(rollout.engine_set.call("push_adapter", again, sent.factors, sent.digest))
    rollout.engine_set.call("drop_adapter", again)
    served.assert_served(["wide"] * len(PROMPTS), served.versions())


def interrupted(*_: Any) -> Any:
    raise KeyboardInterrupt
