"""Random odd models: what is drawn, and that a seed says all."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from benchmarks.random_models import DENSE, MIXTURES, draw, write_model

SEEDS = range(200)


def test_a_seed_determines_the_shape_and_odd_seeds_give_mixtures() -> None:
    for seed in SEEDS:
        assert draw(seed) == draw(seed)
        assert draw(seed).is_mixture == bool(seed % 2)
    assert len({str(draw(seed).settings) for seed in SEEDS}) == len(SEEDS)


def test_everything_that_a_runtime_may_treat_differently_is_drawn() -> None:
    models = [draw(seed) for seed in SEEDS]
    assert {model.family for model in models} == {*DENSE, *MIXTURES}
    settings = [model.settings for model in models]
    assert {fields["rope_parameters"]["rope_type"] for fields in settings} == {"default", "linear", "yarn", "llama3"}
    for name in ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window", "norm_topk_prob"):
        assert {fields[name] for fields in settings if name in fields} == {True, False}, name
    assert any(fields.get("mlp_only_layers") for fields in settings)
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"):
        assert any(fields[name] % 2 for fields in settings), name
    assert all(fields["num_attention_heads"] % fields["num_key_value_heads"] == 0 for fields in settings)


def test_transformers_takes_every_shape() -> None:
    for seed in SEEDS:
        AutoConfig.for_model(draw(seed).family, **draw(seed).settings)


def test_a_directory_is_the_same_each_time_and_has_no_trivial_norms_or_biases(tmp_path: Path) -> None:
    seed = next(seed for seed in SEEDS if draw(seed).family == "qwen2")
    first, second = (load_file(write_model(draw(seed), seed, tmp_path / name) / "model.safetensors") for name in "ab")
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name])
        assert tensor.unique().numel() > 1, name
