"""A training rank on a GPU of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rl_backend.contracts import NativeConfig, RuntimeConfig
from tests.gpu.conftest import MakeRuntime
from tests.support.losses import nll_loss
from tests.support.sft_batches import random_token_sequences, sft_micro_batches

pytestmark = pytest.mark.gpu

ray = pytest.importorskip("ray")

from actors import Loss, RankContext, TrainGroup  # noqa: E402
from actors.cluster.session import init_local_ray  # noqa: E402


@pytest.fixture
def cluster() -> Iterator[None]:
    init_local_ray(include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


def devices(context: RankContext) -> tuple[int, str]:
    return torch.cuda.device_count(), torch.distributed.get_backend()


def test_a_step_in_an_actor_equals_one_in_this_process(cluster: None, make_runtime: MakeRuntime, tied_model: Path) -> None:
    sequences = random_token_sequences([7, 31, 2, 18], 128)
    runtime = make_runtime(tied_model)
    handle = runtime.build_model()
    with runtime.train_mode(handle):
        expected = runtime.forward_backward(handle, sft_micro_batches(sequences, 4), nll_loss)
    config = RuntimeConfig(hf_path=str(tied_model), backend_cfg=NativeConfig(device="cuda"))
    with TrainGroup(config, gpus_per_rank=1) as group:
        ((count, backend),) = group.run_on_ranks(devices)
        assert count == 1 and "nccl" in backend
        model = group.build_model()
        result = group.forward_backward(model, sequences, Loss("tests.support.losses:nll_loss"))
        assert result.loss == pytest.approx(expected.loss, rel=1e-5)
        assert {row.device.type for row in result.output("log_probs")} == {"cpu"}
        assert group.optimizer_step(model).grad_norm == pytest.approx(runtime.optimizer_step(handle).grad_norm, rel=1e-5)


@pytest.mark.gpu(count=2)
def test_two_ranks_have_a_device_each_and_equal_one(cluster: None, tied_model: Path) -> None:
    sequences = random_token_sequences([7, 31, 2, 18], 128)
    config = RuntimeConfig(hf_path=str(tied_model), backend_cfg=NativeConfig(device="cuda"))
    norms = []
    for num_ranks in (1, 2):
        with TrainGroup(config, num_ranks=num_ranks, gpus_per_rank=1) as group:
            assert group.run_on_ranks(devices) == [(1, group.run_on_ranks(devices)[0][1])] * num_ranks
            model = group.build_model()
            group.forward_backward(model, sequences, nll_loss)
            norms.append(group.optimizer_step(model).grad_norm)
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)
