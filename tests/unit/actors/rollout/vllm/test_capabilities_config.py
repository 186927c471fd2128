"""``config.json`` as vLLM reads it: fields that it needs are there, and a value that was there stays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import DeepseekV3Config, GlmMoeDsaConfig

from actors.rollout.vllm.capabilities import config_folder, served_config
from rl_backend.contracts import UnsupportedError


def test_a_config_that_needs_nothing_is_read_where_it_is() -> None:
    config = {"model_type": "qwen3", "hidden_size": 64}
    assert served_config(config) == config
    with config_folder(config) as folder:
        assert folder is None


def test_the_scores_of_deepseek_are_said_and_its_own_values_are_kept() -> None:
    config = {"model_type": "deepseek_v3", "hidden_size": 64, "topk_method": "greedy"}
    assert served_config(config) == {**config, "scoring_func": "sigmoid"}


def test_kimi_is_read_as_deepseek_without_its_own_code() -> None:
    served = served_config({"model_type": "kimi_k2", "auto_map": {"AutoConfig": "x.Y"}, "hidden_size": 64})
    assert served == {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "hidden_size": 64,
    }


@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa"])
def test_sparse_attention_becomes_dense(model_type: str) -> None:
    config = {"model_type": model_type, "index_topk": 64, "index_n_heads": 2, "indexer_types": ["full"], "n_group": 1}
    served = served_config({**config, "mlp_layer_types": ["dense", "sparse"]})
    assert served["model_type"] == "deepseek_v3"
    assert served["first_k_dense_replace"] == 1
    assert not [name for name in served if name.startswith("index")]


def test_fields_that_glm5_leaves_out_are_its_own() -> None:
    """DeepSeek-V3 would have 8 groups, and another epsilon."""
    served = served_config({"model_type": "glm_moe_dsa", "topk_group": 1})
    own, of_v3 = GlmMoeDsaConfig(), DeepseekV3Config()
    for field in (
        "n_group",
        "topk_group",
        "rms_norm_eps",
        "routed_scaling_factor",
        "norm_topk_prob",
        "first_k_dense_replace",
    ):
        expected = 3 if field == "first_k_dense_replace" else getattr(own, field)
        assert served.get(field, getattr(of_v3, field)) == expected, field
    assert served_config({"model_type": "deepseek_v32"}).keys().isdisjoint(("n_group", "rms_norm_eps"))


@pytest.mark.parametrize(("kinds", "dense"), [(["dense", "sparse"], 1), (["sparse"], 0), (["dense", "dense"], 2)], ids=str)
def test_leading_dense_layers_are_counted(kinds: list[str], dense: int) -> None:
    served = served_config({"model_type": "glm4_moe_lite", "mlp_layer_types": kinds})
    assert served["first_k_dense_replace"] == dense


def test_dense_layers_between_others_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"mlp_layer_types=\['sparse', 'dense'\] has dense layers after"):
        served_config({"model_type": "glm4_moe_lite", "mlp_layer_types": ["sparse", "dense"]})


@pytest.mark.parametrize(
    ("fields", "rotary_dim"),
    [
        ({"head_dim": 64, "rope_parameters": {"partial_rotary_factor": 0.5}}, 32),
        ({"head_dim": 64}, 64),
        ({"head_dim": 64, "rotary_dim": 16}, 16),
    ],
    ids=str,
)
def test_the_rotary_part_of_minimax_is_a_number_of_features(fields: dict[str, Any], rotary_dim: int) -> None:
    served = served_config({"model_type": "minimax_m2", **fields})
    assert (served["rotary_dim"], served["scoring_func"], served["use_routing_bias"]) == (rotary_dim, "sigmoid", True)


def test_the_folder_has_the_config_while_vllm_starts() -> None:
    with config_folder({"model_type": "deepseek_v3"}) as folder:
        assert folder is not None
        file = Path(folder) / "config.json"
        assert json.loads(file.read_text())["topk_method"] == "noaux_tc"
    assert not file.exists()
