"""Plans of models with recurrent states: parameters of the released sizes, what sequences take in engines, layouts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_backend.cli.main import main
from rl_backend.lab.plan.make import make_plan
from rl_backend.lab.plan.memory import Workload
from rl_backend.model import BuildSettings, find_model
from rl_backend.model.decoder_spec import DecoderSpec
from tests.support.matrix import sampled
from tests.support.native import make_config
from tests.support.qwen3_5 import write_qwen3_5, write_qwen3_next

# Chunks of 64 tokens are full in every layout.
WORKLOAD = Workload(sequence_length=512, micro_batch_tokens=1280, num_micro_batches=4)
COMMON = {
    "vocab_size": 248320,
    "head_dim": 256,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "max_position_embeddings": 262144,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": False,
}


def sizes(
    layers: int, hidden: int, heads: int, kv_heads: int, value_heads: int, feed_forward: int | tuple[int, int, int]
) -> dict[str, Any]:
    """Fields of a text model.

    Args:
        feed_forward: features of dense blocks; or experts, those of a token, and features of one, as of the shared one.
    """
    found = {
        **COMMON,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "linear_num_value_heads": value_heads,
    }
    if isinstance(feed_forward, int):
        return {**found, "intermediate_size": feed_forward}
    experts, chosen, width = feed_forward
    names = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
    return {**found, **dict(zip(names, (experts, chosen, width, width), strict=True))}


RELEASED: Mapping[str, tuple[str, dict[str, Any], float]] = {
    "Qwen3.5-0.8B": ("qwen3_5", {**sizes(24, 1024, 8, 2, 16, 3584), "tie_word_embeddings": True}, 0.75),
    "Qwen3.5-4B": ("qwen3_5", {**sizes(32, 2560, 16, 4, 32, 9216), "tie_word_embeddings": True}, 4.21),
    "Qwen3.5-9B": ("qwen3_5", sizes(32, 4096, 16, 4, 32, 12288), 8.95),
    "Qwen3.5-27B": ("qwen3_5", sizes(64, 5120, 24, 4, 48, 17408), 26.90),
    "Qwen3.5-35B-A3B": ("qwen3_5_moe", sizes(40, 2048, 16, 2, 32, (256, 8, 512)), 34.66),
    "Qwen3.5-397B-A17B": ("qwen3_5_moe", sizes(60, 4096, 32, 2, 64, (512, 10, 1024)), 396.35),
    "Qwen3-Next-80B-A3B": ("qwen3_next", {**sizes(48, 2048, 16, 2, 32, (512, 10, 512)), "vocab_size": 151936}, 79.67),
}
"""Name -> ``model_type``, fields, and billions of parameters of the language model."""


def config_of(name: str) -> dict[str, Any]:
    """As it is published: the language model of Qwen3.5 is nested in one that reads images."""
    kind, fields, _ = RELEASED[name]
    if kind == "qwen3_next":
        return {"model_type": kind, **fields}
    return {"model_type": kind, "text_config": {"model_type": f"{kind}_text", **fields}, "vision_config": {}}


def architecture_of(name: str) -> DecoderSpec:
    config = config_of(name)
    found = find_model("auto", config).parse_config(config)
    assert isinstance(found, DecoderSpec)
    return found


@pytest.mark.shows("plan: parameters of every released size of Qwen3.5 and Qwen3-Next are counted")
@pytest.mark.parametrize("name", RELEASED)
def test_a_released_model_has_its_number_of_parameters(name: str) -> None:
    family = find_model("auto", config_of(name))
    with torch.device("meta"):
        model = family.build(architecture_of(name), BuildSettings(family.options_type(), "log_probs", 1024))
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert round(counted / 1e9, 2) == RELEASED[name][2]


@pytest.mark.parametrize(
    ("name", "state", "token"),
    [
        ("Qwen3.5-27B", 48 * 48 * 128 * 128 * 4, 16 * 2 * 4 * 256 * 2),
        ("Qwen3.5-35B-A3B", 30 * 32 * 128 * 128 * 4, 10 * 2 * 2 * 256 * 2),
    ],
)
def test_a_sequence_takes_float32_states_and_keys_and_values_of_few_layers(name: str, state: int, token: int) -> None:
    architecture = architecture_of(name)
    value_heads = RELEASED[name][1]["linear_num_value_heads"]
    history = architecture.num_layers * 3 // 4 * 3 * (2 * 16 + value_heads) * 128 * 2
    for tokens in (1, 4096):
        found = architecture.cache_bytes(tokens, torch.bfloat16.itemsize)
        assert found is not None and found == (tokens * token, state + history)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "dense": write_qwen3_5(folder / "dense", released=True),
        "mixture": write_qwen3_5(folder / "mixture", moe=True),
        "qwen3_next": write_qwen3_next(folder / "next"),
    }


@pytest.mark.parametrize(
    ("model", "parallel"),
    sampled(
        [(model, {size: 2, "pp": 2}) for model in ("dense", "mixture", "qwen3_next") for size in ("tp", "cp")],
        *(("mixture", {"tp": 2, "pp": 2}), ("dense", {"cp": 2, "pp": 2})),
    ),
)
def test_a_model_with_states_is_planned_in_layouts(models: Mapping[str, Path], model: str, parallel: dict[str, int]) -> None:
    whole = make_plan(make_config(models[model]), 1, WORKLOAD)
    cut = make_plan(make_config(models[model], parallel=parallel), 4, WORKLOAD)
    assert (len(whole.ranks), len(cut.ranks)) == (1, 2)
    assert cut.num_parameters == whole.num_parameters
    for rank in cut.ranks:
        assert 0 < rank.weights < whole.ranks[0].weights
        assert 0 < rank.activations < whole.ranks[0].activations
        assert 0 < rank.flops < whole.ranks[0].flops


def test_a_step_computes_six_operations_for_each_token_and_weight_of_a_matrix(models: Mapping[str, Path]) -> None:
    work = Workload(sequence_length=64, micro_batch_tokens=512, num_micro_batches=3)
    (rank,) = make_plan(make_config(models["dense"]), 1, work).ranks
    hidden, features, heads = 64, 64 * (2 + 2 + 4), 4
    deltanet = hidden * (features + 2 * heads + 2 * 64 * heads)
    attention = hidden * 64 * (2 * 4 + 2 * 2 + 4)
    matrices = 3 * deltanet + attention + 4 * 3 * hidden * 128
    tokens = work.micro_batch_tokens * work.num_micro_batches
    # States are what is left.
    scores = 14 * tokens * 65 // 2 * 4 * 64
    least = tokens * 6 * (matrices + hidden * 128) + scores
    # A chunk of 64 tokens: products with keys, states and scores, forward and backward.
    states = tokens * 3 * heads * 6 * (64 * (2 * 64 + 2 * 64) + 3 * 64 * 64)
    assert least < rank.flops < least + 2 * states


def test_the_text_says_what_an_engine_keeps_of_a_sequence(
    models: Mapping[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    work = ("--model", str(models["dense"]), "--ranks", "1", "--sequence-length", "128", "--micro-batch-tokens", "256")
    work += ("--param-dtype", "bfloat16")
    assert main(["plan", *work]) == 0
    text = capsys.readouterr().out
    assert "a vLLM engine keeps 0.26 MiB of a sequence of 128 tokens: 0.06 of keys and values, 0.20 of states" in text
    assert main(["plan", *work, "--json"]) == 0
    state = 3 * (4 * 64 * 64 * 4 + 3 * (2 * 2 + 4) * 64 * 2)
    assert json.loads(capsys.readouterr().out)["sequence_cache"] == {"tokens": 128 * 2 * 2 * 64 * 2, "state": state}
