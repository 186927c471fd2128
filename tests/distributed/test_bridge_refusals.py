"""What the bridge refuses, it refuses on every rank, and keeps nothing of it."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch.distributed as dist

from rl_backend.contracts import BatchError, ConfigError
from rl_backend.runtime.bridge.engine.engine import bridge_runtime
from tests.support.bridge_runs import bridge_config, open_bridge
from tests.support.models import write_tiny
from tests.support.native import micro_batches, token_loss
from tests.support.rank_pool import RankPool

SPLIT = [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, for four stages."""
    return write_tiny("qwen3", tmp_path_factory.mktemp("model"), num_hidden_layers=4)


def uneven_job(model: str, few_on: list[int]) -> str:
    """What is raised where the ranks ``few_on`` have a number that the interleaved schedule does not take."""
    with open_bridge(model, {"pp": 2, "vpp": 2}) as runtime:
        handle = runtime.build_model()
        data = micro_batches(SPLIT)
        with pytest.raises(BatchError) as caught:
            runtime.forward_backward(handle, data[:3] if dist.get_rank() in few_on else data, token_loss)
        runtime.forward_backward(handle, data, token_loss)
    return str(caught.value)


@pytest.mark.parametrize("few_on", [[0], [1], [0, 1]], ids=str)
def test_a_number_of_micro_batches_that_the_schedule_does_not_take_is_refused_on_every_rank(
    ranks: RankPool, model: Path, few_on: list[int]
) -> None:
    expected = "takes groups of 2" if len(few_on) == 2 else "different micro-batches"
    for message in ranks.run(uneven_job, str(model), few_on):
        assert expected in message


def second_layout_job(model: str) -> None:
    with open_bridge(model, {"tp": 2}) as runtime:
        before = num_threads()
        for _ in range(3):
            with pytest.raises(ConfigError, match="one layout per process"):
                bridge_runtime(bridge_config(model, {"pp": 2}))
        assert num_threads() == before
        runtime.forward_backward(runtime.build_model(), micro_batches(SPLIT), token_loss)
    with open_bridge(model, {"pp": 2}) as runtime:
        runtime.forward_backward(runtime.build_model(), micro_batches(SPLIT), token_loss)


def num_threads() -> int:
    """Threads of this process; every process group over gloo has three."""
    gc.collect()
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.shows("bridge: a second layout in one process is refused and leaves nothing behind")
def test_a_refused_second_layout_leaves_nothing(ranks: RankPool, model: Path) -> None:
    ranks.run(second_layout_job, str(model))
