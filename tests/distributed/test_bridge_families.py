"""Latent attention, routers with sigmoid scores, MiniMax-M2 and gpt-oss through Megatron-Bridge on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rl_backend.contracts import ConfigError, PackedBatch, UnsupportedError
from rl_backend.runtime.bridge.checks import check_config
from tests.support.bridge_runs import Run, assert_same, bridge_config, open_bridge, train_job, whole
from tests.support.bridge_state import exported, exported_gradients, stored_weights
from tests.support.families import random_sequences
from tests.support.layouts import layouts
from tests.support.native import assert_equal_tensors
from tests.support.rank_pool import RankPool
from tests.support.released_mixtures import PLAIN, YARN, write_mixture
from tests.support.transformers_gradients import stored_gradients

FAMILIES = ("deepseek_v3", "glm4_moe_lite", "glm4_moe", "minimax_m2", "gpt_oss")
SMALL: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2}
STEPS = 2
LAYOUTS = {2: [{}, {"ep": 2}, {"pp": 2}]}
WITH_TP = {2: [{"tp": 2}, {"tp": 2, "ep": 2}]}


def sum_loss(output: Any, data: PackedBatch, dp_group: Any = None) -> tuple[Tensor, dict[str, Any]]:
    return output.log_probs.sum(), {}


def one_rank_job(model: str) -> tuple[dict[str, Tensor], list[Tensor], dict[str, Tensor]]:
    """Exported weights, log-probs and gradients."""
    with open_bridge(model) as runtime:
        handle = runtime.build_model()
        weights = exported(runtime, handle)
        rows = random_sequences((1, 7, 40, 3, 90))
        batch = PackedBatch(torch.cat(rows), torch.tensor([len(row) for row in rows]))
        runtime.zero_grad(handle)
        log_probs = runtime.forward_backward(handle, [batch], sum_loss).output("log_probs")
        return weights, log_probs, exported_gradients(runtime, handle)


@pytest.mark.shows(
    "bridge: DeepSeek-V3, GLM-4.5, 4.7-Flash, MiniMax-M2 and gpt-oss have transformers' log-probs and gradients"
)
@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        *((name, {}) for name in FAMILIES),
        (
            "deepseek_v3",
            {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8}, "v_head_dim": 48},
        ),
        ("glm4_moe_lite", {"rms_norm_eps": 1e-3}),
        ("glm4_moe", {"n_shared_experts": 2, "use_qk_norm": False}),
        ("glm4_moe", {"tie_word_embeddings": True}),
        ("gpt_oss", {"tie_word_embeddings": True}),
        ("gpt_oss", {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}),
    ],
)
def test_one_rank_computes_as_transformers(ranks: RankPool, tmp_path: Path, model_type: str, fields: dict[str, Any]) -> None:
    path = write_mixture(tmp_path, model_type, **fields)
    ((weights, log_probs, gradients),) = ranks.run(one_rank_job, str(path), world_size=1)
    assert_equal_tensors(weights, stored_weights(path))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    total = torch.zeros(())
    for row, own in zip(random_sequences((1, 7, 40, 3, 90)), log_probs, strict=True):
        expected = model(row[None], use_cache=False).logits[0, :-1].log_softmax(-1).gather(1, row[1:, None])[:, 0]
        torch.testing.assert_close(own[:-1], expected.detach(), rtol=0.0, atol=1e-5)
        total = total + expected.sum()
    total.backward()
    expected_gradients = stored_gradients(model)
    trained = {name for name in weights if not name.endswith("e_score_correction_bias")}
    assert gradients.keys() == trained
    for name, gradient in gradients.items():
        other = expected_gradients[name]
        assert (gradient - other).norm() <= 1e-5 * other.norm() + 1e-7, name


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {name: str(write_mixture(folder / name, name, **SMALL, **_of_two_layers(name))) for name in FAMILIES}


def _of_two_layers(name: str) -> dict[str, Any]:
    if name == "gpt_oss":
        return {"layer_types": ["sliding_attention", "full_attention"]}
    return {"mlp_layer_types": ["dense", "sparse"]} if name == "glm4_moe_lite" else {}


@pytest.fixture(scope="module")
def on_one_rank(models: dict[str, str], ranks: RankPool) -> dict[str, Run]:
    return {name: whole(ranks.run(train_job, model, {}, STEPS, {}, world_size=1)) for name, model in models.items()}


@pytest.mark.shows("bridge: DeepSeek-V3, GLM-4.5, MiniMax-M2 and gpt-oss train alike with dp, ep and pp")
@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe", "minimax_m2", "gpt_oss"])
@pytest.mark.parametrize(("world_size", "layout"), layouts(LAYOUTS))
def test_layouts_train_as_one_rank(
    ranks: RankPool,
    models: dict[str, str],
    on_one_rank: dict[str, Run],
    name: str,
    world_size: int,
    layout: dict[str, int],
) -> None:
    assert_same(whole(ranks.run(train_job, models[name], layout, STEPS, {}, world_size=world_size)), on_one_rank[name])


@pytest.mark.shows("bridge: GLM-4.5, gpt-oss and MiniMax-M2 train alike with tp, alone and with ep")
@pytest.mark.parametrize("name", ["glm4_moe", "gpt_oss", "minimax_m2"])
@pytest.mark.parametrize(("world_size", "layout"), layouts(WITH_TP))
def test_tensor_parallel_ranks_train_as_one(
    ranks: RankPool,
    models: dict[str, str],
    on_one_rank: dict[str, Run],
    name: str,
    world_size: int,
    layout: dict[str, int],
) -> None:
    assert_same(whole(ranks.run(train_job, models[name], layout, STEPS, {}, world_size=world_size)), on_one_rank[name])


def refused_job(model: str) -> str:
    with open_bridge(model) as runtime, pytest.raises(UnsupportedError) as refused:
        runtime.build_model()
    return str(refused.value)


@pytest.mark.shows("bridge: routers that Megatron would have choose other experts are refused, with the fields")
@pytest.mark.parametrize(
    ("model_type", "fields", "message"),
    [
        ("deepseek_v3", {"num_experts_per_tok": 2}, r"n_group=4, topk_group=2, num_experts_per_tok=2: .*two best"),
        ("deepseek_v3", {"num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}, "norm_topk_prob=True and num_experts"),
        ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob=False and num_experts_per_tok=4"),
        ("deepseek_v3", {"rope_parameters": {**YARN, "mscale": 0.7}}, "rope parameters"),
        ("deepseek_v3", {"q_lora_rank": None}, "latent attention without compressed queries"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave=False: .*rotates neighbouring features"),
        ("glm4_moe_lite", {"tie_word_embeddings": True}, "tie_word_embeddings=True: .*a head of their own"),
        ("gpt_oss", {"hidden_size": 192}, "hidden_size=192, twice intermediate_size=96"),
        ("gpt_oss", {"rope_parameters": PLAIN}, "'rope_type': 'default'.*gives every gpt_oss YaRN"),
        (
            "glm4_moe",
            {"rope_parameters": {**YARN, "partial_rotary_factor": 0.5}},
            "which Megatron would compute differently",
        ),
    ],
)
def test_what_megatron_computes_differently_is_refused(
    ranks: RankPool, tmp_path: Path, model_type: str, fields: dict[str, Any], message: str
) -> None:
    path = write_mixture(tmp_path, model_type, **fields)
    (said,) = ranks.run(refused_job, str(path), world_size=1)
    with pytest.raises(UnsupportedError, match=message):
        raise UnsupportedError(said)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe_lite"])
def test_ranks_that_share_heads_are_refused_before_a_start(tmp_path: Path, model_type: str) -> None:
    path = write_mixture(tmp_path, model_type)
    with pytest.raises(ConfigError, match=rf"BridgeConfig\.parallel\.tp=2: {model_type}: .*; use 1, or backend='native'"):
        check_config(bridge_config(path, {"tp": 2}))
    check_config(bridge_config(path, {"ep": 2}))


def test_norms_over_heads_of_several_ranks_are_refused_with_transformer_engine(tmp_path: Path) -> None:
    config = bridge_config(write_mixture(tmp_path, "minimax_m2"), {"tp": 2})
    check_config(config)
    on_gpus = config.replace(backend_cfg=config.backend_cfg.replace(device="cuda"))
    with pytest.raises(ConfigError, match=r"tp=2: minimax_m2: .*not their gradients; use 1, or backend='native'"):
        check_config(on_gpus)
