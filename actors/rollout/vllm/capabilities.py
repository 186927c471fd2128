"""Models that vLLM 0.30 cannot serve, by model type, each with a measurement. Needs no vLLM.

:data:`REFUSALS` is read before an engine starts, and by whoever tabulates what the project can do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from actors.rollout.config import RolloutConfig
from rl_backend.checkpoint.hf_reader import read_hf_config
from rl_backend.contracts import ConfigError, UnsupportedError, stores_mxfp4, text_config, weight_blocks
from rl_backend.model.blocks import divisors, nearest

type Fields = Mapping[str, Any]
"""Of :func:`~rl_backend.contracts.text_config`."""

DELTANET_TYPES = frozenset({"qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next"})
"""``model_type`` of models that mix attention with gated DeltaNet, whose sequences have a recurrent state."""
SPARSE_TYPES = frozenset({"deepseek_v32", "glm_moe_dsa"})
"""``model_type`` of models whose latent attention reads the tokens that an indexer chooses."""
LATENT_TYPES = frozenset({"deepseek_v3", "kimi_k2", "glm4_moe_lite"}) | SPARSE_TYPES
"""``model_type`` of models with latent attention."""
_TYPES_WITH_A_HEAD = LATENT_TYPES | {"glm4_moe", "gpt_oss", "minimax_m2", "qwen3_next"}
"""``model_type`` of models whose classes in vLLM never read ``tie_word_embeddings``."""
_MLA_HEADS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}


@dataclass(frozen=True)
class Refusal:
    """Something that vLLM's build for a device cannot serve.

    Attributes:
        model_types: of ``config.json``; empty for every model.
        device: ``cpu`` or ``cuda``.
        what: of the model or the configuration, in words.
        measured: what happens without the refusal.
        instead: what to do.
        applies: whether it concerns a model's fields and a configuration.
    """

    model_types: frozenset[str]
    device: str
    what: str
    measured: str
    instead: str
    applies: Callable[[Fields, RolloutConfig], bool] = lambda fields, config: True


def _reads_fewer_tokens(fields: Fields, config: RolloutConfig) -> bool:
    return int(fields.get("index_topk") or 0) < config.max_model_len


def _has_other_windows(fields: Fields, config: RolloutConfig) -> bool:
    kinds = fields.get("layer_types")
    return kinds is not None and [kind == "sliding_attention" for kind in kinds] != [not n % 2 for n in range(len(kinds))]


def _has_another_epsilon(fields: Fields, config: RolloutConfig) -> bool:
    return bool(fields.get("rms_norm_eps", 1e-5) != 1e-5)


def _rope(fields: Fields) -> Fields | None:
    return fields.get("rope_parameters") or fields.get("rope_scaling")


def _scales_otherwise_than_yarn(fields: Fields, config: RolloutConfig) -> bool:
    return any((_rope(fields) or {}).get(name) for name in ("attention_factor", "mscale", "mscale_all_dim"))


def _lacks_parts_of_yarn(fields: Fields, config: RolloutConfig) -> bool:
    rope = _rope(fields)
    return rope is not None and not {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow"} <= rope.keys()


def _has_other_mla_heads(fields: Fields, config: RolloutConfig) -> bool:
    return any(fields.get(name, size) != size for name, size in _MLA_HEADS.items())


REFUSALS = (
    Refusal(
        frozenset({"minimax_m2"}),
        "cpu",
        "dtypes other than float32",
        "log-probs in bfloat16 are not numbers, without an error",
        "use dtype='float32', or engines on a GPU",
        lambda fields, config: config.dtype != "float32",
    ),
    Refusal(
        frozenset({"gpt_oss"}),
        "cpu",
        "dtypes other than bfloat16",
        'the first prompt ends with "expected scalar type BFloat16"',
        "use dtype='bfloat16'",
        lambda fields, config: config.dtype != "bfloat16",
    ),
    *(
        Refusal(frozenset({"gpt_oss"}), device, what, measured, instead, applies)
        for device in ("cpu", "cuda")
        for what, measured, instead, applies in (
            (
                "windows in other layers than every second one, beginning with the first",
                "silently different log-probs: vLLM does not read layer_types",
                "train it without vLLM",
                _has_other_windows,
            ),
            (
                "norms with another epsilon than 1e-5",
                "silently different log-probs: vLLM does not read rms_norm_eps",
                "use a model with rms_norm_eps=1e-5, as released ones have",
                _has_another_epsilon,
            ),
            (
                "rotary embeddings without all fields of YaRN",
                "the engine does not start: KeyError 'beta_fast', for example",
                "give rope_parameters factor, original_max_position_embeddings, beta_fast (32) and beta_slow (1)",
                _lacks_parts_of_yarn,
            ),
            (
                "YaRN with attention_factor, mscale or mscale_all_dim",
                "silently different log-probs: vLLM does not read them",
                "leave them out, or train it without vLLM",
                _scales_otherwise_than_yarn,
            ),
            (
                "attention without biases (attention_bias=false)",
                "silently different log-probs: vLLM adds biases of whatever was in its memory",
                "train it without vLLM",
                lambda fields, config: fields.get("attention_bias") is False,
            ),
        )
    ),
    *(
        Refusal(
            _TYPES_WITH_A_HEAD,
            device,
            "embeddings that are the head (tie_word_embeddings)",
            "log-probs are those of a head of random numbers, without an error: vLLM has one of its own, which no push "
            "reaches",
            "save the model with tie_word_embeddings=false and an lm_head.weight",
            lambda fields, config: bool(fields.get("tie_word_embeddings")),
        )
        for device in ("cpu", "cuda")
    ),
    *(
        Refusal(
            SPARSE_TYPES,
            device,
            "sparse attention over fewer tokens (index_topk) than a sequence may have (max_model_len)",
            f"{measured}; up to index_topk tokens dense attention is the same, and is served",
            "use max_model_len of at most index_topk",
            _reads_fewer_tokens,
        )
        for device, measured in (
            ("cpu", 'the engine does not start: "Sparse Attention is not supported on CPU."'),
            ("cuda", "it was not tried, and pushes into its indexers neither"),
        )
    ),
    Refusal(
        LATENT_TYPES,
        "cpu",
        "latent attention with other sizes than kv_lora_rank=512 and qk_rope_head_dim=64",
        'the engine does not start: "Head dimension 96 is not supported by MLA" for a rank of 32',
        "use a model of those sizes, or engines on a GPU",
        _has_other_mla_heads,
    ),
    Refusal(
        LATENT_TYPES,
        "cpu",
        "adapters (max_adapters) beside latent attention",
        "vLLM looks weights up by names that adapters change: a push of weights ends in the middle with KeyError: "
        "'layers.0.self_attn.kv_a_proj_with_mqa.weight'",
        "use max_adapters=0, and push base and adapter as one model with WeightSync(..., merged=True)",
        lambda fields, config: config.max_adapters > 0,
    ),
    Refusal(
        frozenset(),
        "cpu",
        "speculative decoding",
        "the first step ends in a Triton kernel of the rejection sampler, greedy sampling too",
        "leave engine_args['speculative_config'] out",
        lambda fields, config: bool(config.engine_args.get("speculative_config")),
    ),
)
"""In the order in which they are looked for."""


def has_deltanet(config: Mapping[str, Any]) -> bool:
    """Whether ``config.json`` is of a model with gated DeltaNet."""
    return config.get("model_type") in DELTANET_TYPES


def has_latent_attention(config: Mapping[str, Any]) -> bool:
    """Whether ``config.json`` is of a model with latent attention."""
    return config.get("model_type") in LATENT_TYPES


def check_served(config: RolloutConfig, device: str) -> None:
    """Checks a model's ``config.json`` against what engines on ``device``, ``cpu`` or ``cuda``, can serve.

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
        if concerned and refusal.device == device and refusal.applies(fields, config):
            raise UnsupportedError(
                f"RolloutConfig.model_path={config.model_path!r} is a {kind}, dtype={config.dtype!r}: vLLM 0.30 on a "
                f"{device.upper()} does not serve {refusal.what} ({refusal.measured}); {refusal.instead}",
                model_type=kind,
                refused=refusal.what,
            )
    if has_deltanet(model):
        _check_parts(fields, config.tensor_parallel)


def _check_parts(fields: Fields, parts: int) -> None:
    for name in ("linear_num_key_heads", "linear_num_value_heads"):
        heads = fields.get(name)
        if isinstance(heads, int) and heads % parts:
            raise ConfigError.of(
                "RolloutConfig.tensor_parallel", parts, f"does not divide {name}={heads}; {nearest(parts, divisors(heads))}"
            )
