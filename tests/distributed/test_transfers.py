"""The order of transfers between pipeline stages ends on NCCL too, which runs them one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.bridge_runs import open_bridge
from tests.support.models import write_tiny
from tests.support.native import micro_batches, open_runtime, token_loss
from tests.support.p2p_replay import Event, Synchronise, Transfers, recorded, stuck
from tests.support.rank_pool import RankPool

SCHEDULES = {"1f1b": 1, "interleaved-1f1b": 2, "zb-h1": 1, "zb-h2": 1, "zbv": 2, "dualpipev": 2}


def transfers_job(model: str, parallel: Mapping[str, int], settings: Mapping[str, Any]) -> list[Event]:
    with open_runtime(model, parallel=dict(parallel), **settings) as runtime:
        handle = runtime.build_model()
        data = micro_batches([[index] for index in range(8)], dp_size=handle.data_parallel_size)
        with recorded() as events:
            runtime.forward_backward(handle, data, token_loss)
    return events


@pytest.mark.shows(
    "pipelines: replayed as NCCL runs them, the transfers of every schedule end, in eager groups and in others"
)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pp", [2, pytest.param(4, marks=pytest.mark.long)])
def test_transfers_of_a_schedule_end_as_nccl_runs_them(ranks: RankPool, tmp_path: Path, schedule: str, pp: int) -> None:
    model = write_tiny("qwen3", tmp_path, num_hidden_layers=8, hidden_size=32, intermediate_size=48)
    parallel = {"pp": pp, "vpp": SCHEDULES[schedule]}
    found = ranks.run(transfers_job, str(model), parallel, {"pipeline_schedule": schedule}, world_size=pp)
    assert all(any(isinstance(event, Transfers) for event in events) for events in found)
    # The host of a native pipeline never waits for its device.
    assert not any(isinstance(event, Synchronise) for events in found for event in events)
    for eager in (False, True):
        assert stuck(found, eager=eager) == []
    backwards = [event for event in reversed(found[0]) if isinstance(event, Transfers)]
    assert stuck([backwards, *found[1:]], eager=True)


def bridge_job(model: str, parallel: Mapping[str, int]) -> list[Event]:
    with open_bridge(model, dict(parallel)) as runtime:
        handle = runtime.build_model()
        # As long as each other are no two: receivers must know which comes.
        data = micro_batches([[index] for index in range(8)], dp_size=handle.data_parallel_size)
        with recorded() as events:
            runtime.forward_backward(handle, data, token_loss)
    return events


@pytest.mark.shows("bridge: stages send nothing but hidden states and their gradients, and wait for no whole device")
@pytest.mark.parametrize(("pp", "vpp"), [(2, 1), (2, 2), pytest.param(4, 2, marks=pytest.mark.long)])
def test_transfers_of_megatron_end_as_nccl_runs_them_and_no_host_waits(
    ranks: RankPool, tmp_path: Path, pp: int, vpp: int
) -> None:
    model = write_tiny("qwen3", tmp_path, num_hidden_layers=8, hidden_size=32, intermediate_size=48)
    found = ranks.run(bridge_job, str(model), {"pp": pp, "vpp": vpp}, world_size=pp)
    assert not any(isinstance(event, Synchronise) for events in found for event in events)
    for rank, events in enumerate(found):
        ends = [end for event in events if isinstance(event, Transfers) for end in event.ends]
        # Each chunk but the first of all has a sender, and each but the last of all sends.
        chunks = pp * vpp
        mine = [chunk for chunk in range(chunks) if chunk % pp == rank]
        assert sum(end.sends for end in ends) == 8 * sum((chunk > 0) + (chunk < chunks - 1) for chunk in mine)
        assert min(end.numel for end in ends) >= 32, "no shapes"
    for eager in (False, True):
        assert stuck(found, eager=eager) == []
