"""``config.json`` as vLLM 0.30 needs it: fields that transformers does not write, and dense attention in place of sparse."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rl_backend.contracts import UnsupportedError

_V3: Mapping[str, Any] = {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
_SIGMOID: Mapping[str, Any] = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
"""Without them vLLM routes by a softmax, and has no place for the bias that experts are chosen with."""
_GLM5: Mapping[str, Any] = {"n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5}
"""What GLM-5's fields are where there are none, and DeepSeek-V3's are not."""
_OF_INDEXERS = ("index_", "indexer_")


def served_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ``config.json`` that vLLM is to read; equal to ``config`` where nothing has to change.

    A value that is there is kept. Sparse attention (DeepSeek-V3.2, GLM-5) becomes latent attention over all tokens, which
    is the same while ``index_topk`` covers the sequence; :mod:`~actors.rollout.vllm.capabilities` refuses longer ones.

    Raises:
        UnsupportedError: dense layers after layers with experts, which vLLM cannot be told of.
    """
    match config.get("model_type"):
        case "deepseek_v3":
            return {**_SIGMOID, **config}
        case "kimi_k2":
            # Remote code of the model's would be asked for by its type.
            return {**_SIGMOID, **{name: value for name, value in config.items() if name != "auto_map"}, **_V3}
        case "deepseek_v32" | "glm_moe_dsa":
            dense = {name: value for name, value in config.items() if not name.startswith(_OF_INDEXERS)}
            absent = _GLM5 if config["model_type"] == "glm_moe_dsa" else {}
            return {**_SIGMOID, **absent, **_dense_layers(config), **dense, **_V3}
        case "glm4_moe_lite":
            return {**_dense_layers(config), **config}
        case "minimax_m2":
            return {**_minimax(config), **config}
    return dict(config)


@contextmanager
def config_folder(config: Mapping[str, Any]) -> Iterator[str | None]:
    """A folder with the ``config.json`` that vLLM is to read, removed at the end; None where the model's own will do."""
    served = served_config(config)
    if served == config:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="rl_backend_config_") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(served), encoding="utf-8")
        yield folder


def _dense_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """How many layers at the start have no experts, by vLLM's name for it."""
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        return {}
    dense = kinds.index("sparse") if "sparse" in kinds else len(kinds)
    if "dense" in kinds[dense:]:
        raise UnsupportedError(
            f"config.json: mlp_layer_types={kinds!r} has dense layers after layers with experts; vLLM 0.30 knows dense "
            "layers at the start alone",
            mlp_layer_types=list(kinds),
        )
    return {"first_k_dense_replace": dense}


def _minimax(config: Mapping[str, Any]) -> dict[str, Any]:
    rope = config.get("rope_parameters") or {}
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rotary_dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    return {"scoring_func": "sigmoid", "use_routing_bias": True, "rotary_dim": rotary_dim}
