"""Rollout settings that cannot work are refused when they are built."""

from __future__ import annotations

from typing import Any

import pytest

from actors.rollout.config import RolloutConfig, SamplingConfig
from actors.rollout.sample import sample_seed, sample_seeds
from rl_backend.contracts import ConfigError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"modle_path": "x"}, "unknown field"),
        ({"engine_args": {"max_model_len": 3}}, "use RolloutConfig.max_model_len"),
        ({"engine_args": {"skip_tokenizer_init": False}}, "use RolloutConfig.load_tokenizer"),
        ({"engine_args": {"logprobs_mode": "raw_logprobs"}}, "set it themselves"),
        ({"num_engines": 2, "cores": [[0]]}, "each of the 2 engines"),
        ({"cores": [[0, 0]]}, "different core numbers"),
        ({"cores": [[0, 1, 2]], "tensor_parallel": 2}, "a multiple of tensor_parallel=2"),
        ({"cores": [[0]], "device": "cuda"}, "only CPU engines have cores"),
        ({"cores": [[0]], "cores_per_engine": 1}, "not both"),
        ({"cores_per_engine": 3, "tensor_parallel": 2}, "cores_per_engine=3: must be a multiple of tensor_parallel=2"),
        ({"placement": "scatter"}, "placement"),
        ({"sleep_mode": True, "device": "cpu"}, r"sleep_mode=True: is of a GPU"),
        ({"gpu_memory_utilization": 0.5, "device": "cpu"}, r"RolloutConfig\.gpu_memory_utilization=0\.5: is of a GPU"),
        ({"gpus_per_worker": 0.5, "device": "cpu"}, r"RolloutConfig\.gpus_per_worker=0\.5: is of a GPU"),
        ({"gpu_memory_utilization": 0.5, "kv_cache_gib": 1.0}, r"gpu_memory_utilization=0\.5: .* beside kv_cache_gib=1"),
        ({"gpus_per_worker": 0.5, "tensor_parallel": 2}, "tensor_parallel=2 workers need as many different GPUs"),
        ({"max_model_len": 100, "max_num_batched_tokens": 99}, "at least max_model_len=100"),
        ({"engine_args": {"enable_return_routed_experts": True}}, "use RolloutConfig.return_routed_experts"),
        (
            {"return_routed_experts": True, "engine_args": {"decode_context_parallel_size": 2}},
            "'decode_context_parallel_size'.=2: vLLM returns no routed experts with it",
        ),
        (
            {"return_routed_experts": True, "engine_args": {"kv_transfer_config": {"kv_connector": "x"}}},
            "without their routes",
        ),
    ],
)
def test_rollout_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RolloutConfig(**{"model_path": "x", **settings})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 0.001}, "use 0 for greedy"),
        ({"temperature": 0, "n": 2}, "use n=1"),
        ({"top_p": 0}, "top_p"),
        ({"temperature": 0, "top_p": 0.9}, r"top_p=0\.9: temperature=0 takes the likeliest token"),
        ({"min_p": 1.0}, "min_p"),
        ({"stop_strings": ["ok", ""]}, "an empty string would end every response"),
        ({"temperature": 0, "min_p": 0.1}, r"min_p=0\.1: temperature=0 takes the likeliest token"),
        ({"temperature": 0, "top_k": 5}, r"top_k=5: temperature=0 takes the likeliest token"),
    ],
)
def test_sampling_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingConfig(**settings)


def test_rollout_settings_survive_json() -> None:
    config = RolloutConfig(model_path="x", cores=((0,), (1,)), num_engines=2, engine_args={"block_size": 32})
    assert RolloutConfig.model_validate_json(config.model_dump_json()) == config


def test_seeds_differ_by_run_step_prompt_and_sample_and_stay_the_same() -> None:
    seeds = {sample_seed(*key) for key in [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)]}
    assert len(seeds) == 5
    assert sample_seed(1, 2, 3, 4) == 3023191443222632907
    assert sample_seeds(1, 2, 4, 5)[3 * 5 + 4] == sample_seed(1, 2, 3, 4)
    assert len(set(sample_seeds(0, 0, 100, 100))) == 10_000
