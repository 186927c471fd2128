"""Families that are Llama but for fields of their specification, in vLLM: its own models and those of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from actors import Loss, RolloutConfig, RolloutGroup, SamplingConfig, TrainGroup, WeightSync
from rl_backend.contracts import NativeConfig, OptimizerConfig, RuntimeConfig, TokenSequence
from tests.support.sft_batches import random_token_sequences
from tests.support.variants import write_variant

PROMPTS = [[5, 6, 7], list(range(20, 80)), [100, 90, 80, 70]]


@pytest.fixture(scope="module")
def group(ray_cluster: None, tied_model: Path) -> Iterator[TrainGroup]:
    native = NativeConfig(device="cpu", optimizer=OptimizerConfig(lr=1e-2))
    with TrainGroup(RuntimeConfig(hf_path=str(tied_model), backend_cfg=native)) as train:
        yield train


@pytest.mark.long
@pytest.mark.shows("weight sync: Gemma 3, Granite, OLMo 2 and Phi are served by vLLM with the trainer's log-probs")
@pytest.mark.parametrize("family", ["gemma3_text", "granite", "olmo2", "phi"])
def test_a_pushed_variant_samples_with_the_trainers_log_probs(group: TrainGroup, tmp_path: Path, family: str) -> None:
    # Heads of 32 features, the least on a CPU. vLLM's Phi has neither grouped queries nor an intermediate size of its own.
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2 if family == "phi" else 1}
    path = write_variant(family, tmp_path / "model", intermediate_size=256, **heads)
    policy = group.build_model(hf_path=path, name=family)
    data = random_token_sequences([12, 20, 9, 31], 128)
    for _ in range(2):
        group.zero_grad(policy)
        group.forward_backward(policy, data, Loss("tests.support.losses:nll_loss"))
        assert group.optimizer_step(policy).ok
    config = RolloutConfig(
        model_path=str(path), device="cpu", dtype="float32", load_format="dummy", max_model_len=256, kv_cache_gib=0.25
    )
    with RolloutGroup(config) as rollout, WeightSync(group, rollout, policy) as sync:
        assert sync.push().version == group.weight_version(policy)
        samples = rollout.generate(PROMPTS, SamplingConfig(n=2, max_new_tokens=24))
    sequences = [TokenSequence.from_prompt_and_response(sample.prompt_ids, sample.response_ids) for sample in samples]
    gaps = [
        abs(float(log_probs[len(sample.prompt_ids) - 1 + index]) - log_prob)
        for sample, log_probs in zip(samples, group.forward(policy, sequences).output("log_probs"), strict=True)
        for index, log_prob in enumerate(sample.log_probs)
    ]
    assert len(gaps) >= len(samples)
    assert max(gaps) < 1e-4
