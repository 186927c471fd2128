"""Pushes of weights into vLLM on CUDA, over every transport; skipped by name without Ray or the GPU build of vLLM."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from rl_backend.algorithm import sft_loss
from rl_backend.algorithm.sequences import to_sequences
from rl_backend.contracts import OptimizerConfig, TokenSequence
from rl_backend.data.micro_batches import pack
from tests.gpu.conftest import MakeRuntime
from tests.support.sft_batches import random_token_sequences, sft_micro_batches

if TYPE_CHECKING:
    from actors.rollout.group.group import RolloutGroup

pytestmark = pytest.mark.gpu

PROMPTS = [[5, 6, 7, 8], list(range(10, 60)), [3 + i % 120 for i in range(300)]]
TEMPERATURE = 1.0


@pytest.fixture(scope="module")
def ray_on_gpus() -> Iterator[None]:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed")
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the GPU build of vllm is not installed")
    import ray

    from actors.cluster.session import init_local_ray

    init_local_ray(include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


@pytest.fixture
def engine(ray_on_gpus: None, untied_model: Path) -> Iterator[RolloutGroup]:
    """One bfloat16 engine that takes a fifth of a GPU's memory, so that a trainer fits beside it."""
    from actors import RolloutConfig, RolloutGroup

    config = RolloutConfig(
        model_path=str(untied_model), device="cuda", dtype="bfloat16", gpu_memory_utilization=0.2, max_model_len=512
    )
    with RolloutGroup(config) as group:
        yield group


@pytest.mark.parametrize(
    "transport", ["shared_memory", "gloo", "cuda_ipc", pytest.param("nccl", marks=pytest.mark.gpu(count=2))]
)
def test_after_a_push_the_engine_samples_with_the_trainers_weights(
    transport: str, engine: RolloutGroup, untied_model: Path, make_runtime: MakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    from actors import SamplingConfig, WeightSync
    from actors.sync.source import WeightSource

    if transport == "nccl":
        # The engine has the first GPU; NCCL needs the trainer on another.
        monkeypatch.setenv("LOCAL_RANK", "1")
    runtime = make_runtime(untied_model, param_dtype="bfloat16", optimizer=OptimizerConfig(lr=1e-2))
    handle = runtime.build_model()
    sampling = SamplingConfig(max_new_tokens=8, temperature=TEMPERATURE)

    def mean_gap() -> float:
        samples = engine.generate(PROMPTS, sampling)
        sequences = [TokenSequence.from_prompt_and_response(s.prompt_ids, s.response_ids) for s in samples]
        batch = pack(sequences, {"temperature": TEMPERATURE})
        outputs = runtime.forward_backward(handle, [batch], None, forward_only=True).output("log_probs")
        gaps = [
            (trainer[len(sample.prompt_ids) - 1 : -1].cpu() - torch.tensor(sample.log_probs)).abs()
            for sample, trainer in zip(samples, outputs, strict=True)
        ]
        return float(torch.cat(gaps).mean())

    source = WeightSource(lambda: runtime.export_weights(handle))
    with WeightSync(source, engine, transport=transport) as sync:  # type: ignore[arg-type]
        assert sync.push().transport == transport
        fresh = mean_gap()
        data = sft_micro_batches(random_token_sequences((40, 12, 65, 7), 128), size=2)
        for _ in range(10):
            runtime.zero_grad(handle)
            runtime.forward_backward(handle, data, sft_loss)
            assert runtime.optimizer_step(handle).ok
        stale = mean_gap()
        source.version = handle.weight_version
        assert sync.push().version == 10
        pushed = mean_gap()
    assert fresh < 0.1
    assert pushed < 0.1
    assert pushed < 0.2 * stale


def test_log_probs_over_the_masks_of_an_engine_are_those_that_it_sampled_with(
    ray_on_gpus: None, untied_model: Path, make_runtime: MakeRuntime
) -> None:
    from actors import RolloutConfig, RolloutGroup, SamplingConfig

    config = RolloutConfig(
        model_path=str(untied_model),
        device="cuda",
        dtype="bfloat16",
        gpu_memory_utilization=0.2,
        max_model_len=512,
        engine_args={"return_sampling_mask": True},
    )
    sampling = SamplingConfig(max_new_tokens=8, temperature=TEMPERATURE, top_p=0.9, top_k=20)
    with RolloutGroup(config) as group:
        samples = group.generate(PROMPTS, sampling)
    assert all(sample.sampling_mask is not None for sample in samples)
    runtime = make_runtime(untied_model, param_dtype="bfloat16")
    batch = pack(to_sequences(samples), {"temperature": TEMPERATURE, "top_p": 0.9, "top_k": 20})
    outputs = runtime.forward_backward(runtime.build_model(), [batch], None, forward_only=True).outputs
    mask = batch.token_field("loss_mask") != 0
    gaps = torch.cat(list(outputs["log_probs"])).cpu() - batch.token_field("rollout_log_probs")
    assert gaps[mask].abs().mean() < 0.1
    assert torch.cat(list(outputs["mask_disagreement"])).cpu()[mask].mean() < 0.1
