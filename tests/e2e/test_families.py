"""Families other than Qwen3 in the loop: train, push into a vLLM engine that started with random weights, and sample."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from actors import Loss, RolloutConfig, RolloutGroup, SamplingConfig, TrainGroup, WeightSync
from rl_backend.contracts import NativeConfig, OptimizerConfig, RuntimeConfig, TokenSequence
from tests.support.models import write_tiny
from tests.support.sft_batches import random_token_sequences

PROMPTS = [[5, 6, 7], list(range(20, 80)), [100, 90, 80, 70]]
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": None,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 32},
    },
    "llama": {
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "mistral": {"tie_word_embeddings": False, "sliding_window": 16},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "num_hidden_layers": 3,
        "mlp_only_layers": [1],
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64, "tie_word_embeddings": False},
    "gpt_neox": {"num_attention_heads": 2, "num_key_value_heads": None, "head_dim": None, "tie_word_embeddings": False},
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("families")
    return {family: write_tiny(family, folder / family, **changes) for family, changes in MODELS.items()}


@pytest.fixture(scope="module")
def engines(ray_cluster: None, paths: dict[str, Path]) -> Iterator[dict[str, Future[RolloutGroup]]]:
    """An engine of each family, started two at a time while the first ones are tested."""

    def start(family: str) -> RolloutGroup:
        config = RolloutConfig(
            model_path=str(paths[family]),
            device="cpu",
            dtype="float32",
            load_format="dummy",
            max_model_len=256,
            kv_cache_gib=0.25,
        )
        return stack.enter_context(RolloutGroup(config))

    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        yield {family: pool.submit(start, family) for family in MODELS}


@pytest.fixture(scope="module")
def group(ray_cluster: None, engines: object, tied_model: Path) -> Iterator[TrainGroup]:
    """One training group for all families, one of which is a third party's."""
    native = NativeConfig(device="cpu", optimizer=OptimizerConfig(lr=1e-2))
    config = RuntimeConfig(plugins=("tests.support.gpt_neox",), hf_path=str(tied_model), backend_cfg=native)
    with TrainGroup(config) as train:
        yield train


@pytest.mark.shows(
    "weight sync: Qwen2, Llama, Mistral, Qwen3-MoE and Mixtral are served by vLLM with the trainer's log-probs"
)
@pytest.mark.shows("extending: a third party's model folder trains, is saved and is pushed to vLLM without an edit here")
@pytest.mark.parametrize("family", MODELS)
def test_a_pushed_model_samples_with_the_trainers_log_probs(
    group: TrainGroup, engines: dict[str, Future[RolloutGroup]], paths: dict[str, Path], family: str
) -> None:
    policy = group.build_model(hf_path=paths[family], name=family)
    data = random_token_sequences([12, 20, 9, 31], 128)
    losses = []
    for _ in range(2):
        group.zero_grad(policy)
        losses.append(group.forward_backward(policy, data, Loss("tests.support.losses:nll_loss")).loss)
        assert group.optimizer_step(policy).ok
    rollout = engines[family].result()
    with WeightSync(group, rollout, policy) as sync:
        assert sync.push().version == 2
        samples = rollout.generate(PROMPTS, SamplingConfig(n=2, max_new_tokens=24))
    sequences = [TokenSequence.from_prompt_and_response(sample.prompt_ids, sample.response_ids) for sample in samples]
    gaps = [
        abs(float(log_probs[len(sample.prompt_ids) - 1 + index]) - log_prob)
        for sample, log_probs in zip(samples, group.forward(policy, sequences).output("log_probs"), strict=True)
        for index, log_prob in enumerate(sample.log_probs)
    ]
    assert losses[1] < losses[0]
    assert sum(gaps) / len(gaps) <= 1e-5
    assert max(gaps) <= 1e-4
