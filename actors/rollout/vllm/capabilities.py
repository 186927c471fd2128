"""Models in vLLM 0.30, by model type: ``config.json`` as it needs it, and what it cannot serve, each with a measurement.

Needs no vLLM. :data:`REFUSALS` is read before an engine starts, in this order.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.rollout.config import RolloutConfig
from rl_backend.checkpoint.hf_reader import read_hf_config
from rl_backend.contracts import ConfigError, UnsupportedError, stores_mxfp4, text_config, weight_blocks
from rl_backend.model.blocks import divisors, nearest

type Fields = Mapping[str, Any]

DELTANET_TYPES = frozenset({"qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next"})
SPARSE_TYPES = frozenset({"deepseek_v32", "glm_moe_dsa"})
"""``model_type`` of models whose latent attention reads the tokens that an indexer chooses."""
LATENT_TYPES = frozenset({"deepseek_v3", "kimi_k2", "glm4_moe_lite"}) | SPARSE_TYPES
# Their classes in vLLM never read tie_word_embeddings.
_TYPES_WITH_A_HEAD = LATENT_TYPES | {"glm4_moe", "gpt_oss", "minimax_m2", "qwen3_next"}
_GPT_OSS = frozenset({"gpt_oss"})
_CPU, _ANY = ("cpu",), ("cpu", "cuda")
_MLA_HEADS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}


@dataclass(frozen=True)
class Refusal:
    """Something that vLLM's builds for these devices, ``cpu`` and ``cuda``, cannot serve.

    Attributes:
        model_types: of ``config.json``; empty for every model.
        what: of the model or the configuration, in words.
        measured: what happens without the refusal.
        instead: what to do.
        applies: whether it concerns a model's fields and a configuration.
    """

    model_types: frozenset[str]
    devices: tuple[str, ...]
    what: str
    measured: str
    instead: str
    applies: Callable[[Fields, RolloutConfig], bool] = lambda fields, config: True


def _has_other_windows(fields: Fields, config: RolloutConfig) -> bool:
    kinds = fields.get("layer_types")
    return kinds is not None and [kind == "sliding_attention" for kind in kinds] != [not n % 2 for n in range(len(kinds))]


def _rope(fields: Fields) -> Fields | None:
    return fields.get("rope_parameters") or fields.get("rope_scaling")


def _scales_otherwise_than_yarn(fields: Fields, config: RolloutConfig) -> bool:
    return any((_rope(fields) or {}).get(name) for name in ("attention_factor", "mscale", "mscale_all_dim"))


def _lacks_parts_of_yarn(fields: Fields, config: RolloutConfig) -> bool:
    rope = _rope(fields)
    return rope is not None and not {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow"} <= rope.keys()


REFUSALS = (
    Refusal(
        frozenset({"minimax_m2"}),
        _CPU,
        "dtypes other than float32",
        "log-probs in bfloat16 are not numbers, without an error",
        "use dtype='float32', or engines on a GPU",
        lambda fields, config: config.dtype != "float32",
    ),
    Refusal(
        _GPT_OSS,
        _CPU,
        "dtypes other than bfloat16",
        'the first prompt ends with "expected scalar type BFloat16"',
        "use dtype='bfloat16'",
        lambda fields, config: config.dtype != "bfloat16",
    ),
    Refusal(
        _GPT_OSS,
        _ANY,
        "windows in other layers than every second one, beginning with the first",
        "silently different log-probs: vLLM does not read layer_types",
        "train it without vLLM",
        _has_other_windows,
    ),
    Refusal(
        _GPT_OSS,
        _ANY,
        "norms with another epsilon than 1e-5",
        "silently different log-probs: vLLM does not read rms_norm_eps",
        "use a model with rms_norm_eps=1e-5, as released ones have",
        lambda fields, config: bool(fields.get("rms_norm_eps", 1e-5) != 1e-5),
    ),
    Refusal(
        _GPT_OSS,
        _ANY,
        "rotary embeddings without all fields of YaRN",
        "the engine does not start: KeyError 'beta_fast', for example",
        "give rope_parameters factor, original_max_position_embeddings, beta_fast (32) and beta_slow (1)",
        _lacks_parts_of_yarn,
    ),
    Refusal(
        _GPT_OSS,
        _ANY,
        "YaRN with attention_factor, mscale or mscale_all_dim",
        "silently different log-probs: vLLM does not read them",
        "leave them out, or train it without vLLM",
        _scales_otherwise_than_yarn,
    ),
    Refusal(
        _GPT_OSS,
        _ANY,
        "attention without biases (attention_bias=false)",
        "silently different log-probs: vLLM adds biases of whatever was in its memory",
        "train it without vLLM",
        lambda fields, config: fields.get("attention_bias") is False,
    ),
    Refusal(
        _TYPES_WITH_A_HEAD,
        _ANY,
        "embeddings that are the head (tie_word_embeddings)",
        "log-probs are those of a head of random numbers, without an error: vLLM has one of its own, which no push reaches",
        "save the model with tie_word_embeddings=false and an lm_head.weight",
        lambda fields, config: bool(fields.get("tie_word_embeddings")),
    ),
    Refusal(
        SPARSE_TYPES,
        _ANY,
        "sparse attention over fewer tokens (index_topk) than a sequence may have (max_model_len)",
        'on a CPU the engine does not start: "Sparse Attention is not supported on CPU."; on a GPU it was not tried; up to '
        "index_topk tokens dense attention is the same, and is served",
        "use max_model_len of at most index_topk",
        lambda fields, config: int(fields.get("index_topk") or 0) < config.max_model_len,
    ),
    Refusal(
        LATENT_TYPES,
        _CPU,
        "latent attention with other sizes than kv_lora_rank=512 and qk_rope_head_dim=64",
        'the engine does not start: "Head dimension 96 is not supported by MLA" for a rank of 32',
        "use a model of those sizes, or engines on a GPU",
        lambda fields, config: any(fields.get(name, size) != size for name, size in _MLA_HEADS.items()),
    ),
    Refusal(
        LATENT_TYPES,
        _CPU,
        "adapters (max_adapters) beside latent attention",
        "vLLM looks weights up by names that adapters change: a push of weights ends in the middle with KeyError: "
        "'layers.0.self_attn.kv_a_proj_with_mqa.weight'",
        "use max_adapters=0, and push base and adapter as one model with WeightSync(..., merged=True)",
        lambda fields, config: config.max_adapters > 0,
    ),
    Refusal(
        frozenset(),
        _CPU,
        "speculative decoding",
        "the first step ends in a Triton kernel of the rejection sampler, greedy sampling too",
        "leave engine_args['speculative_config'] out",
        lambda fields, config: bool(config.engine_args.get("speculative_config")),
    ),
)


def has_deltanet(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") in DELTANET_TYPES


def has_latent_attention(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") in LATENT_TYPES


def check_served(config: RolloutConfig, device: str) -> None:
    """Checks a model's ``config.json`` against what engines on ``device`` can serve.

    Raises:
        CheckpointError: there is no ``config.json``, or it is damaged.
        ConfigError: ``tensor_parallel`` does not divide the heads of gated DeltaNet.
        UnsupportedError: one of :data:`REFUSALS`, or weights that are stored in FP8 or MXFP4.
    """
    model = read_hf_config(config.model_path)
    kind, fields = str(model.get("model_type")), text_config(model)
    stored = "FP8" if weight_blocks(model) is not None else "MXFP4" if stores_mxfp4(model) else ""
    if stored:
        raise UnsupportedError(
            f"RolloutConfig.model_path={config.model_path!r} has weights in {stored}, which vLLM computes in too; pushes "
            "are of weights as they are trained. Build the model once and save it with save_checkpoint(hf=True), and give "
            "that directory to trainer and engines",
            model_type=kind,
            refused=f"weights in {stored}",
        )
    for refusal in REFUSALS:
        concerned = not refusal.model_types or kind in refusal.model_types
        if concerned and device in refusal.devices and refusal.applies(fields, config):
            raise UnsupportedError(
                f"RolloutConfig.model_path={config.model_path!r} is a {kind}, dtype={config.dtype!r}: vLLM 0.30 on a "
                f"{device.upper()} does not serve {refusal.what} ({refusal.measured}); {refusal.instead}",
                model_type=kind,
                refused=refusal.what,
            )
    parts, of_deltanet = config.tensor_parallel, ("linear_num_key_heads", "linear_num_value_heads")
    ConfigError.refuse_all(
        ("RolloutConfig.tensor_parallel", parts, f"does not divide {name}={heads}; {nearest(parts, divisors(heads))}")
        for name in (of_deltanet if has_deltanet(model) else ())
        if isinstance(heads := fields.get(name), int) and heads % parts
    )


_V3: Mapping[str, Any] = {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
# Without them vLLM routes by a softmax, and has no place for the bias that experts are chosen with.
_SIGMOID: Mapping[str, Any] = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
# What GLM-5's fields are where there are none, and DeepSeek-V3's are not.
_GLM5: Mapping[str, Any] = {"n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5}
_OF_INDEXERS = ("index_", "indexer_")


def served_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ``config.json`` that vLLM is to read; equal to ``config`` where nothing has to change.

    Sparse attention (DeepSeek-V3.2, GLM-5) becomes latent attention over all tokens, which is the same while
    ``index_topk`` covers the sequence; longer ones are refused.

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
