"""Rollout settings that cannot work are refused when they are built."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from actors.rollout.config import RolloutConfig, SamplingConfig, check_engine_device, require_bounded
from actors.rollout.messages import sample_seed, sample_seeds
from rl_backend.contracts import ConfigError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"modle_path": "x"}, "unknown field"),
        ({"model_path": ""}, "model_path"),
        ({"engine_args": {"block_size": 32, "seed": 3}}, r"engine_args\['seed'\]=3: use RolloutConfig\.seed"),
        ({"engine_args": {"generation_config": "auto"}}, "rollout engines set it themselves"),
        ({"num_engines": 2, "cores": [[0], []]}, r"cores=\(\): a group is different core numbers"),
        ({"num_engines": 2, "cores": [[0], [1, -1]]}, r"cores=\(1, -1\): a group is different core numbers"),
        ({"max_adapter_rank": 513, "max_adapters": 1}, "max_adapter_rank"),
        ({"py_executable": ".venv/bin/python"}, "py_executable='.venv/bin/python': expected an absolute path"),
        ({"return_routed_experts": True, "turns_at_push": "pause"}, r"turns_at_push='pause': a turn would have routes of"),
        (
            {"return_routed_experts": True, "engine_args": {"block_size": 32, "pipeline_parallel_size": 3}},
            r"'pipeline_parallel_size'.=3: .*: the stages of a pipeline see their own layers alone; leave it out",
        ),
        ({"engine_args": {"fully_sharded_loras": True}}, r"fully_sharded_loras.*rollout engines set it themselves"),
        ({"engine_args": {"max_model_len": 3}}, "use RolloutConfig.max_model_len"),
        ({"engine_args": {"skip_tokenizer_init": False}}, "use RolloutConfig.load_tokenizer"),
        ({"engine_args": {"logprobs_mode": "raw_logprobs"}}, "set it themselves"),
        (
            {"engine_args": {"return_sampling_mask": True}, "device": "cpu"},
            r"engine_args\['return_sampling_mask'\]=True: vLLM returns masks from its model runner V2 alone, which",
        ),
        ({"num_engines": 2, "cores": [[0]]}, "each of the 2 engines"),
        ({"cores": [[0, 0]]}, "different core numbers"),
        ({"cores": [[0, 1, 2]], "tensor_parallel": 2}, "a multiple of tensor_parallel=2"),
        ({"cores": [[0]], "device": "cuda"}, "only CPU engines have cores"),
        ({"cores": [[0]], "cores_per_engine": 1}, "not both"),
        ({"cores_per_engine": 3, "tensor_parallel": 2}, "cores_per_engine=3: must be a multiple of tensor_parallel=2"),
        ({"placement": "scatter"}, "placement"),
        (
            {"gpu_memory_utilization": 0.5, "device": "cpu"},
            r"gpu_memory_utilization=0\.5: applies to GPU engines only",
        ),
        ({"gpus_per_worker": 0.5, "device": "cpu"}, r"RolloutConfig\.gpus_per_worker=0\.5: applies to GPU engines only"),
        ({"gpu_memory_utilization": 0.5, "kv_cache_gib": 1.0}, r"gpu_memory_utilization=0\.5: .* beside kv_cache_gib=1"),
        (
            {"gpus_per_worker": 0.5, "tensor_parallel": 2},
            r"tensor_parallel=2: an engine of several workers .*=0\.5 is a share",
        ),
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


@pytest.mark.parametrize(
    "settings",
    [
        {"num_engines": 2, "cores": [[0, 1], [2, 3]], "tensor_parallel": 2, "device": "cpu"},
        {"num_engines": 2, "cores": [[0, 1], [1, 0, 2]]},
        {"cores_per_engine": 4, "tensor_parallel": 2},
        {"max_model_len": 100, "max_num_batched_tokens": 100},
        {"gpus_per_worker": 0.5},
        {"gpus_per_worker": 1.0, "tensor_parallel": 2},
        {"max_adapters": 3, "max_adapter_rank": 512},
        {"py_executable": "/opt/engines/bin/python"},
        {"kv_cache_gib": 1.0, "gpu_memory_utilization": 0.9},
        {"sleep_mode": True, "device": "cpu"},
        {"device": "cpu", "kv_cache_gib": 0.5},
        {"return_routed_experts": True, "engine_args": {"pipeline_parallel_size": 1, "kv_transfer_config": None}},
        {"engine_args": {"pipeline_parallel_size": 2}, "turns_at_push": "pause"},
        {"engine_args": {"return_sampling_mask": False}, "device": "cpu"},
    ],
    ids=str,
)
def test_rollout_settings_that_go_together_are_taken(settings: dict[str, Any]) -> None:
    config = RolloutConfig(**{"model_path": "x", **settings})
    for name, value in settings.items():
        found = getattr(config, name)
        assert (list(map(list, found)) if name == "cores" else found) == value


def test_a_step_takes_as_many_tokens_as_it_is_told_or_a_whole_prompt() -> None:
    for longest, given, expected in ((2048, None, 8192), (9000, None, 9000), (100, 150, 150), (8192, None, 8192)):
        config = RolloutConfig(model_path="x", max_model_len=longest, max_num_batched_tokens=given)
        assert config.batched_tokens == expected


def test_settings_of_a_gpu_are_refused_for_engines_on_a_cpu_alone() -> None:
    for name, value in (("gpu_memory_utilization", 0.5), ("gpus_per_worker", 0.5)):
        config = RolloutConfig.model_validate({"model_path": "x", name: value})
        check_engine_device(config, "cuda")
        with pytest.raises(ConfigError, match=rf"RolloutConfig\.{name}={value}: applies to GPU engines only"):
            check_engine_device(config, "cpu")
    check_engine_device(RolloutConfig(model_path="x", gpus_per_worker=1.0, gpu_memory_utilization=0.9), "cpu")
    masks = RolloutConfig(model_path="x", engine_args={"return_sampling_mask": True})
    check_engine_device(masks, "cuda")
    with pytest.raises(
        ConfigError, match=r"RolloutConfig\.engine_args\['return_sampling_mask'\]=True: .* leave it out on a CPU"
    ):
        check_engine_device(masks, "cpu")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {},
            r"^SamplingConfig\.top_k=0: with engine_args\['return_sampling_mask'\] vLLM takes no request without it; set it",
        ),
        ({"top_p": 0.9}, r"SamplingConfig\.top_k=0"),
        ({"temperature": 0.0}, r"SamplingConfig\.temperature=0: .* no request without it.*SamplingConfig\.top_k=0"),
        ({"top_k": 5, "temperature": 0.5, "top_p": 0.9}, ""),
    ],
    ids=str,
)
def test_engines_that_return_masks_take_bounded_samples_alone(settings: dict[str, Any], message: str) -> None:
    sampling = SamplingConfig(**settings)
    masks = RolloutConfig(model_path="x", engine_args={"return_sampling_mask": True})
    assert masks.returns_masks and not RolloutConfig(model_path="x").returns_masks
    require_bounded(RolloutConfig(model_path="x"), sampling)
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        require_bounded(masks, sampling)


@pytest.mark.parametrize(
    ("settings", "cuts"),
    [
        ({}, []),
        ({"top_p": 1.0, "top_k": 0, "min_p": 0.0}, []),
        ({"min_p": 0.1, "top_p": 0.9}, ["top_p", "min_p"]),
        ({"top_k": 1, "temperature": 0.01, "n": 3}, ["top_k"]),
        ({"temperature": 0, "n": 1, "stop_strings": ("a",)}, []),
    ],
)
def test_options_that_keep_tokens_from_being_sampled_are_named(settings: dict[str, Any], cuts: list[str]) -> None:
    assert SamplingConfig(**settings).cuts == cuts


def test_rollout_settings_survive_json() -> None:
    config = RolloutConfig(model_path="x", cores=((0,), (1,)), num_engines=2, engine_args={"block_size": 32})
    assert RolloutConfig.model_validate_json(config.model_dump_json()) == config


def test_seeds_differ_by_run_step_prompt_and_sample_and_stay_the_same() -> None:
    seeds = {sample_seed(*key) for key in [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)]}
    assert len(seeds) == 5
    assert sample_seed(1, 2, 3, 4) == 3023191443222632907
    assert sample_seeds(1, 2, 4, 5)[3 * 5 + 4] == sample_seed(1, 2, 3, 4)
    assert len(set(sample_seeds(0, 0, 100, 100))) == 10_000
