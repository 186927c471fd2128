"""What vLLM cannot serve is refused by the model's type, with what was measured, before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from actors.rollout.config import RolloutConfig
from actors.rollout.vllm.capabilities import DELTANET_TYPES, LATENT_TYPES, REFUSALS, check_served
from rl_backend.contracts import ConfigError, UnsupportedError
from tests.support.claims import ROOT

MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "rope_parameters": {"rope_type": "yarn", "factor": 40.0}}
HEADS = {"linear_key_head_dim": 96}
PLAIN = {"rope_parameters": {"rope_type": "default"}}


def write_config(path: Path, model_type: str, **fields: Any) -> str:
    (path / "config.json").write_text(json.dumps({"model_type": model_type, **fields}))
    return str(path)


@pytest.mark.shows(
    "rollout: what vLLM's CPU build cannot serve is refused by model type, with what was measured, before it starts"
)
@pytest.mark.parametrize(
    ("model_type", "fields", "dtype", "what"),
    [
        ("minimax_m2", {}, "bfloat16", "dtypes other than float32"),
        ("gpt_oss", {}, "float32", "dtypes other than bfloat16"),
        ("glm_moe_dsa", MLA, "bfloat16", "sparse attention"),
        ("deepseek_v32", {**MLA, "index_topk": 2047}, "float32", "sparse attention"),
        ("deepseek_v32", {**MLA, "index_topk": 2048, "kv_lora_rank": 256}, "float32", "kv_lora_rank=512"),
        ("deepseek_v3", {**MLA, "kv_lora_rank": 32}, "float32", "kv_lora_rank=512"),
        ("glm4_moe_lite", {**MLA, "qk_rope_head_dim": 32}, "bfloat16", "qk_rope_head_dim=64"),
    ],
)
def test_what_a_cpu_cannot_serve(tmp_path: Path, model_type: str, fields: Any, dtype: Any, what: str) -> None:
    config = RolloutConfig(model_path=write_config(tmp_path, model_type, **fields), dtype=dtype)
    with pytest.raises(UnsupportedError, match=rf"is a {model_type}, dtype='{dtype}': vLLM 0\.30 on a CPU .*{what}"):
        check_served(config, "cpu")
    if what != "sparse attention":
        check_served(config, "cuda")


@pytest.mark.shows(
    "rollout: sparse attention beyond index_topk is refused on GPUs too, where engines are given a dense model"
)
def test_a_gpu_is_not_given_a_dense_model_in_place_of_a_sparse_one(tmp_path: Path) -> None:
    config = RolloutConfig(model_path=write_config(tmp_path, "deepseek_v32", **MLA, index_topk=2047), max_model_len=2048)
    with pytest.raises(UnsupportedError, match=r"on a CUDA does not serve sparse attention .* max_model_len of at most"):
        check_served(config, "cuda")
    check_served(config.replace(max_model_len=2047), "cuda")


@pytest.mark.parametrize(
    ("model_type", "fields", "dtype"),
    [
        ("gpt_oss", {}, "bfloat16"),
        ("deepseek_v3", MLA, "float32"),
        ("deepseek_v3", {**MLA, **PLAIN}, "float32"),
        ("kimi_k2", {**MLA, "rope_parameters": None}, "bfloat16"),
        ("deepseek_v32", {**MLA, "index_topk": 2048}, "float32"),
        ("minimax_m2", {}, "float32"),
        ("deepseek_v3", {**MLA, "rope_parameters": None, "rope_scaling": {"type": "yarn", "factor": 40.0}}, "float32"),
        *(
            (each, {"linear_key_head_dim": 96}, dtype)
            for each in sorted(DELTANET_TYPES)
            for dtype in ("float32", "bfloat16")
        ),
        ("qwen3", {}, "float32"),
    ],
)
def test_what_a_cpu_serves(tmp_path: Path, model_type: str, fields: Any, dtype: Any) -> None:
    check_served(RolloutConfig(model_path=write_config(tmp_path, model_type, **fields), dtype=dtype), "cpu")


GPT_OSS_YARN = {"factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0}
WINDOW, WHOLE = "sliding_attention", "full_attention"


@pytest.mark.shows("rollout: a gpt-oss that vLLM would compute differently, without an error, is refused by name")
@pytest.mark.parametrize(
    ("served", "refused", "what"),
    [
        ({"layer_types": [WINDOW, WHOLE, WINDOW]}, {"layer_types": [WHOLE, WINDOW, WHOLE]}, "windows in other layers"),
        ({"rms_norm_eps": 1e-5}, {"rms_norm_eps": 1e-6}, "norms with another epsilon than 1e-5"),
        (
            {"rope_scaling": GPT_OSS_YARN},
            {"rope_parameters": {"factor": 2.0}},
            "rotary embeddings without all fields of YaRN .*beta_fast",
        ),
        *(
            (
                {"rope_parameters": {**GPT_OSS_YARN, name: None}},
                {"rope_parameters": {**GPT_OSS_YARN, name: 1.0}},
                "YaRN with attention_factor, mscale or mscale_all_dim .*leave them out",
            )
            for name in ("attention_factor", "mscale", "mscale_all_dim")
        ),
        ({"attention_bias": True}, {"attention_bias": False}, "attention without biases .*vLLM adds biases"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_vllm_does_not_read_of_gpt_oss(
    tmp_path: Path, device: str, served: dict[str, Any], refused: dict[str, Any], what: str
) -> None:
    check_served(RolloutConfig(model_path=write_config(tmp_path, "gpt_oss", **served), dtype="bfloat16"), device)
    config = RolloutConfig(model_path=write_config(tmp_path, "gpt_oss", **refused), dtype="bfloat16")
    with pytest.raises(UnsupportedError, match=rf"is a gpt_oss, .*on a {device.upper()} does not serve {what}"):
        check_served(config, device)


@pytest.mark.shows("rollout: a tied model to which vLLM would give a head of random numbers is refused by name")
@pytest.mark.parametrize("model_type", sorted(LATENT_TYPES | {"glm4_moe", "gpt_oss", "minimax_m2", "qwen3_next"}))
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_heads_that_no_push_reaches(tmp_path: Path, device: str, model_type: str) -> None:
    model = {"model_path": str(tmp_path), "dtype": "bfloat16" if model_type == "gpt_oss" else "float32"}
    for untied in ({}, {"tie_word_embeddings": False}):
        write_config(tmp_path, model_type, index_topk=2048, **untied)
        check_served(RolloutConfig(**model), device)
    write_config(tmp_path, model_type, index_topk=2048, tie_word_embeddings=True)
    with pytest.raises(
        UnsupportedError, match=rf"on a {device.upper()} does not serve embeddings that are the head .*=false"
    ):
        check_served(RolloutConfig(**model), device)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_moe", "mixtral"])
def test_heads_that_vllm_ties_itself_are_served(tmp_path: Path, model_type: str) -> None:
    model = write_config(tmp_path, model_type, tie_word_embeddings=True)
    check_served(RolloutConfig(model_path=model), "cpu")


def test_adapters_beside_latent_attention_are_refused_on_a_cpu(tmp_path: Path) -> None:
    model = write_config(tmp_path, "deepseek_v3", **MLA)
    with pytest.raises(
        UnsupportedError, match=r"adapters \(max_adapters\) beside latent attention .*KeyError.* merged=True"
    ):
        check_served(RolloutConfig(model_path=model, max_adapters=1), "cpu")


def test_speculative_decoding_is_refused_on_a_cpu_for_every_model(tmp_path: Path) -> None:
    model = write_config(tmp_path, "qwen3")
    config = RolloutConfig(model_path=model, engine_args={"speculative_config": {"method": "mtp"}})
    with pytest.raises(UnsupportedError, match=r"speculative decoding .*leave engine_args\['speculative_config'\] out"):
        check_served(config, "cpu")


def test_engines_divide_the_heads_of_deltanet(tmp_path: Path) -> None:
    text = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    model = write_config(tmp_path, "qwen3_5", text_config=text)
    check_served(RolloutConfig(model_path=model, tensor_parallel=2), "cpu")
    with pytest.raises(ConfigError, match=r"RolloutConfig\.tensor_parallel=4: does not divide linear_num_key_heads=2"):
        check_served(RolloutConfig(model_path=model, tensor_parallel=4), "cuda")


def test_every_refusal_says_what_was_measured_and_what_to_do() -> None:
    for refusal in REFUSALS:
        assert refusal.what and refusal.measured and refusal.instead and {"cpu", "cuda"} >= set(refusal.devices) > set()


def test_the_page_of_capabilities_has_every_refusal() -> None:
    text = (ROOT / "docs" / "reference" / "capabilities.md").read_text()
    for each in REFUSALS:
        models = ", ".join(sorted(each.model_types)) or "all"
        for device in each.devices:
            assert f"| {models} | {device} | {each.what} | {each.measured} | {each.instead} |" in text
