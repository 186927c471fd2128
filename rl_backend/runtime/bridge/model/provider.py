"""Megatron-Bridge's model provider: its settings, from this runtime's options and the user's own values, and what it builds.

Megatron deprecates the provider and the model that it builds: no other file of the package names them.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.bridge import AutoBridge
from megatron.bridge.models.gpt_provider import GPTModelProvider, default_layer_spec
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.transformer.enums import AttnBackend
from torch import nn

from rl_backend.contracts import ConfigError, Head, RuntimeConfig, UnsupportedError
from rl_backend.runtime.bridge.checks import LayerSizes, require_layout
from rl_backend.runtime.bridge.config import BridgeConfig, megatron_sizes
from rl_backend.runtime.bridge.installed import has_transformer_engine
from rl_backend.runtime.bridge.megatron.deltanet import has_deltanet, require_deltanet_kernels
from rl_backend.runtime.bridge.megatron.groups import BridgeGroups
from rl_backend.runtime.bridge.megatron.local_layers import LATENT_EPS, LOCAL_LAYERS, use_local_layers

_NONDETERMINISTIC = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"

_LOCAL_ATTENTION = ("masked_softmax_fusion", "attention_softmax_in_fp32")  # what Megatron's own attention alone reads


def make_provider(
    bridge: AutoBridge, config: RuntimeConfig, groups: BridgeGroups, head: Head, *, transformer_engine: bool
) -> GPTModelProvider:
    """The provider with this runtime's settings, finished.

    Raises:
        ConfigError: an override that cannot hold here, or a layout that Megatron refuses.
        UnsupportedError: what Megatron would ignore or cannot do on this device.
    """
    options = config.options(BridgeConfig)
    provider = read_provider(bridge, config.hf_path)
    sizes = LayerSizes(
        num_layers=provider.num_layers,
        num_attention_heads=provider.num_attention_heads,
        num_key_value_heads=provider.num_query_groups or provider.num_attention_heads,
        ffn_hidden_size=provider.ffn_hidden_size,
        num_experts=provider.num_moe_experts or 0,
        shared_expert_size=provider.moe_shared_expert_intermediate_size,
        linear_num_key_heads=provider.linear_num_key_heads if has_deltanet(provider) else None,
        model_type=bridge.hf_pretrained.config.model_type,
    )
    # Before anything is set: both compare with what the model has by itself.
    require_layout(options, sizes, transformer_engine=transformer_engine)
    check_overrides_of_model(options, provider, transformer_engine=transformer_engine)
    settings = _settings(options, provider, groups.device, head)
    settings |= fused_kernels(provider) if transformer_engine else LOCAL_LAYERS
    # The user's values last: they win where a check has let them through.
    for name, value in {**settings, **options.override_transformer_config}.items():
        # Megatron compares with members of its enumeration only.
        setattr(provider, name, AttnBackend[value] if name == "attention_backend" else value)
    # After the settings: layers and kernels are chosen by the dtype and the parallelism that they give.
    require_deltanet_kernels(options, provider, groups.device)
    if not transformer_engine:
        use_local_layers(provider, default_layer_spec)
    elif provider.multi_latent_attention and provider.layernorm_epsilon != LATENT_EPS:
        raise UnsupportedError(
            f"config.json has rms_norm_eps={provider.layernorm_epsilon}: Transformer Engine's layers give it to the norms "
            f"of latents too, which the model has with {LATENT_EPS}; the native runtime may serve it",
            rms_norm_eps=provider.layernorm_epsilon,
        )
    elif provider.deterministic_mode:
        require_deterministic_kernels()
    # Last: it derives fields from all others.
    try:
        provider.finalize()
    except (AssertionError, ValueError) as error:
        raise ConfigError(f"Megatron refuses the configuration of {config.hf_path}: {error}") from error
    return provider


def build_chunks(
    provider: GPTModelProvider,
    ddp_config: DistributedDataParallelConfig,
    groups: BridgeGroups,
    *,
    trained: bool,
    prepare: Callable[[list[nn.Module]], list[nn.Module]],
) -> Sequence[Any]:
    """This rank's model chunks, in Megatron's DDP where they are ``trained``; ``prepare`` gets them before."""
    chunks: Sequence[Any] = provider.provide_distributed_model(
        ddp_config=ddp_config,
        wrap_with_ddp=trained,
        use_cpu_initialization=groups.device.type == "cpu",
        init_model_with_meta_device=False,
        pre_wrap_hook=prepare,
        pg_collection=groups.pg,
    )
    return chunks


def uses_transformer_engine(device: torch.device) -> bool:
    """Whether layers are Transformer Engine's: on CUDA where it is installed; Megatron's own elsewhere."""
    return device.type == "cuda" and has_transformer_engine()


def packs_sequences(options: BridgeConfig, *, transformer_engine: bool) -> bool:
    """Whether attention takes packed sequences; Transformer Engine's kernels for them are of 16-bit types."""
    return transformer_engine and options.param_dtype != "float32"


def fused_kernels(provider: Any) -> dict[str, bool]:
    """Kernels for layers of Transformer Engine that Megatron-Bridge leaves off for some families, Qwen's among them.

    Without the first, rotary embeddings of packed sequences are a loop over them, of 11 kernels for each and with lengths
    that the host reads back from the device. They have not been run.
    """
    kernels = {}
    # Megatron gives the kernel no scale, which YaRN has; of latents it is for training alone.
    plain = provider.position_embedding_type == "rope" and not provider.rotary_interleaved
    if plain and not provider.multi_latent_attention:
        kernels["apply_rope_fusion"] = True
    # Megatron refuses or ignores other activations.
    gated = provider.activation_func is F.silu and provider.gated_linear_unit
    if gated and not provider.glu_linear_offset and provider.activation_func_clamp_value is None:
        kernels["bias_activation_fusion"] = True
    return kernels


def _settings(options: BridgeConfig, provider: Any, device: torch.device, head: Head) -> dict[str, Any]:
    parallel, dtype = options.parallel, getattr(torch, options.param_dtype)
    settings: dict[str, Any] = {
        **megatron_sizes(parallel),
        "sequence_parallel": parallel.tp > 1,
        "variable_seq_lengths": parallel.pp > 1,
        # With two stages each neighbour is the previous and the next one, and only separate sends tell these apart.
        "overlap_p2p_comm": parallel.vpp > 1,
        "batch_p2p_comm": parallel.vpp == 1,
        # For a bug of PyTorch before 2.1.
        "batch_p2p_sync": False,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "autocast_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        "should_pad_vocab": provider.vocab_size % parallel.tp != 0,
        "make_vocab_size_divisible_by": 1,
        "mtp_num_layers": None,
        "moe_token_dispatcher_type": "alltoall",
        **{name: getattr(options, name) for name in ("recompute_granularity", "recompute_method", "recompute_num_layers")},
        # The runtime loads all weights.
        "perform_initialization": False,
        "use_cpu_initialization": device.type == "cpu",
    }
    if options.recompute_modules is not None:
        settings["recompute_modules"] = list(options.recompute_modules)
    if head == "values":
        settings["share_embeddings_and_output_weights"] = False
    if provider.num_moe_experts is not None:
        # A policy gradient is not the place for a balancing loss that nobody asked for.
        settings |= {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0, "moe_router_dtype": "fp32"}
        # Megatron-Bridge gives some families 1e-3; ExpertBalance moves biases in its place.
        settings["moe_router_bias_update_rate"] = 0.0
    return settings


def override[T](field: str, config_type: Callable[..., T], overrides: Mapping[str, Any], settings: Mapping[str, Any]) -> T:
    """One of Megatron's dataclasses from this runtime's settings and the user's; raises :class:`ConfigError` for values that
    it refuses."""
    try:
        return config_type(**{**settings, **overrides})
    except (AssertionError, ValueError, TypeError) as error:
        raise ConfigError(f"{field}={dict(overrides)!r}: Megatron refuses it: {error}") from error


def check_overrides_of_model(options: BridgeConfig, provider: Any, *, transformer_engine: bool) -> None:
    """Raises one :class:`ConfigError` for all overrides that this model, of which nothing is set yet, or device would
    ignore.
    """
    ConfigError.refuse_all(_ignored_overrides(options, provider, transformer_engine))


def _ignored_overrides(options: BridgeConfig, provider: Any, transformer_engine: bool) -> Iterator[tuple[str, Any, str]]:
    padded = not packs_sequences(options, transformer_engine=transformer_engine)
    for name, value in options.override_transformer_config.items():
        field = f"BridgeConfig.override_transformer_config[{name!r}]"
        needs_engine = name == "attention_backend" or (name in LOCAL_LAYERS and value != LOCAL_LAYERS[name])
        if needs_engine and not transformer_engine:
            yield field, value, "needs layers of Transformer Engine: CUDA and the package transformer-engine"
        elif name == "attention_backend" and value not in AttnBackend.__members__:
            yield field, value, f"expected one of {', '.join(map(repr, AttnBackend.__members__))}"
        if transformer_engine and name in _LOCAL_ATTENTION and value != getattr(provider, name):
            yield field, value, "Transformer Engine's attention, which this device has, would ignore it; leave it out"
        if name.startswith("moe_") and provider.num_moe_experts is None:
            yield field, value, "this model has no experts, so Megatron would ignore it"
        elif name == "moe_expert_capacity_factor" and value is not None and padded:
            yield (
                field,
                value,
                "sequences are padded here, and padding would take the places of tokens; leave it out, or use "
                "param_dtype='bfloat16' on CUDA with the package transformer-engine",
            )
    rate, name = options.expert_bias_rate, "apply_wd_to_qk_layernorm"
    if rate and not provider.moe_router_enable_expert_bias:
        yield "BridgeConfig.expert_bias_rate", rate, "routers of this model have no bias; leave it out"
    value = options.override_optimizer_config.get(name)
    if value and not provider.qk_layernorm:
        problem = "this model has no norms of queries and keys, so Megatron would ignore it; leave it out"
        yield f"BridgeConfig.override_optimizer_config[{name!r}]", value, problem


def require_deterministic_kernels() -> None:
    """Sets what Transformer Engine reads; raises :class:`ConfigError` where the environment asks for the contrary."""
    # Without it Megatron refuses to build Transformer Engine's attention.
    given = os.environ.setdefault(_NONDETERMINISTIC, "0")
    if given != "0":
        raise ConfigError.of(
            "BridgeConfig.override_transformer_config['deterministic_mode']",
            True,
            f"the environment has {_NONDETERMINISTIC}={given}, with which Transformer Engine may choose kernels that are "
            "not deterministic; unset it, or set it to 0",
        )


# What transformers computes with where config.json does not say; Megatron-Bridge passes on None.
_YARN_DEFAULTS: Mapping[str, Any] = {
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_mscale": 1.0,
    "yarn_mscale_all_dim": 0.0,
    "yarn_correction_range_round_to_int": True,
}


def read_provider(bridge: AutoBridge, hf_path: str) -> GPTModelProvider:
    """What Megatron-Bridge makes of ``config.json``; raises :class:`UnsupportedError` if Megatron computes another model
    from it.
    """
    hf_config = bridge.hf_pretrained.config
    # First: Megatron-Bridge would also train the indexers, with a loss that nobody asked for.
    indexed = getattr(hf_config, "index_topk", None)
    if indexed is not None:
        raise UnsupportedError(
            f"config.json has index_topk={indexed}, sparse attention, which the bridge runtime does not have; the native "
            "runtime may serve it",
            index_topk=indexed,
        )
    try:
        provider = bridge.to_megatron_provider(load_weights=False)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise UnsupportedError(
            f"Megatron-Bridge cannot read the configuration of {hf_path}: {error}; the native runtime may serve it"
        ) from error
    if not isinstance(provider, GPTModelProvider):
        raise UnsupportedError(
            f"Megatron-Bridge builds {hf_path} with {type(provider).__name__}; this runtime trains GPTModelProvider "
            "models only"
        )
    complete_provider(hf_config, provider)
    complete_rope(hf_config, provider)
    require_same_model(hf_config, provider)
    return provider


def complete_rope(hf_config: Any, provider: Any) -> None:
    """Sets what Megatron-Bridge leaves out of rotary embeddings, and Megatron has."""
    kind, rope = _rope(hf_config)
    if rope.get("partial_rotary_factor") is not None:
        provider.rotary_percent = float(rope["partial_rotary_factor"])
    if kind == "linear":
        provider.seq_len_interpolation_factor = float(rope["factor"])
    if kind == "yarn":
        for name, default in _YARN_DEFAULTS.items():
            if getattr(provider, name) is None:
                setattr(provider, name, default)


def _rope(hf_config: Any) -> tuple[str, dict[str, Any]]:
    """The kind and the parameters of the rotary embedding."""
    rope: dict[str, Any] = getattr(hf_config, "rope_parameters", None) or getattr(hf_config, "rope_scaling", None) or {}
    return rope.get("rope_type") or rope.get("type") or "default", rope


def _has_rope(kind: str, rope: Mapping[str, Any], provider: Any) -> bool:
    """Whether Megatron computes the same rotary embedding."""
    latent = bool(provider.multi_latent_attention)
    match kind:
        case "default":
            return True
        case "linear":
            return not latent
        case "yarn":
            # Of heads that rotate in part Megatron's YaRN gives other angles.
            whole = provider.position_embedding_type == "yarn" and provider.rotary_percent == 1.0
            # Of two scales transformers takes both or none.
            scaled_alike = bool(rope.get("mscale")) == bool(rope.get("mscale_all_dim"))
            of_latents = scaled_alike and rope.get("truncate") is not False
            return (of_latents if latent else whole) and rope.get("attention_factor") is None
        case "llama3":
            fixed = (rope.get("low_freq_factor"), rope.get("high_freq_factor"), rope.get("original_max_position_embeddings"))
            return not latent and bool(provider.rope_scaling) and fixed == (1.0, 4.0, 8192)
    return False


def require_same_model(hf_config: Any, provider: Any) -> None:
    """Raises one :class:`UnsupportedError` for all of transformers' ``hf_config`` that the completed ``provider`` leaves
    out.
    """
    found = [
        *_differences(hf_config, provider),
        *(_differences_of_latents(hf_config, provider) if provider.multi_latent_attention else ()),
        *(_differences_of_experts(hf_config, provider) if provider.num_moe_experts is not None else ()),
    ]
    if found:
        raise UnsupportedError(f"config.json has {'; '.join(found)}; the native runtime may serve it", differences=found)


def _differences(hf_config: Any, provider: Any) -> Iterator[str]:
    kind, rope = _rope(hf_config)
    if not _has_rope(kind, rope, provider):
        yield f"rope parameters {rope!r}, which Megatron would compute differently or ignore"
    window, layers = getattr(hf_config, "sliding_window", None), getattr(hf_config, "layer_types", None) or ()
    slides = window is not None and (any("sliding" in layer for layer in layers) if layers else True)
    if slides and provider.window_size is None:
        yield f"sliding_window={window}, which Megatron-Bridge does not pass on"
    if getattr(hf_config, "norm_topk_prob", None) is False and not provider.moe_router_pre_softmax:
        yield "norm_topk_prob=False, which Megatron-Bridge does not pass on: weights of a token's experts would add up to 1"
    if getattr(provider, "use_mup", False):
        yield "scaled logits (MuP), which the bridge runtime does not have"
    if hf_config.model_type == "gpt_oss":
        if hf_config.hidden_size == 2 * hf_config.intermediate_size:
            yield (
                f"hidden_size={hf_config.hidden_size}, twice intermediate_size={hf_config.intermediate_size}: "
                "Megatron-Bridge tells experts from their transposes by their shape, and cannot here"
            )
        if kind != "yarn":
            yield f"rope parameters {rope!r}: Megatron-Bridge gives every gpt_oss YaRN"


def _differences_of_latents(hf_config: Any, provider: Any) -> Iterator[str]:
    if getattr(hf_config, "rope_interleave", True) is False:
        yield "rope_interleave=False: Megatron's latent attention rotates neighbouring features, the model halves"
    if hf_config.tie_word_embeddings and not provider.share_embeddings_and_output_weights:
        yield "tie_word_embeddings=True: Megatron-Bridge's models with latent attention have a head of their own"


def _differences_of_experts(hf_config: Any, provider: Any) -> Iterator[str]:
    step, listed = getattr(hf_config, "decoder_sparse_step", None) or 1, getattr(hf_config, "mlp_only_layers", None) or []
    dense = [layer for layer in range(provider.num_layers) if layer in listed or (layer + 1) % step]
    if dense and provider.moe_layer_freq == 1:
        yield (
            f"decoder_sparse_step={step}, mlp_only_layers={list(listed)}: layers {dense} have no experts, and "
            "Megatron-Bridge gives experts to every layer"
        )
    if provider.moe_router_score_function != "sigmoid":
        return
    # Megatron scores a group of experts by its k // topk_group highest, the published rule by its two highest; and it
    # normalises weights where there are several experts, whatever norm_topk_prob says.
    groups, chosen, top_k = provider.moe_router_num_groups, provider.moe_router_group_topk, provider.moe_router_topk
    if groups and chosen and chosen < groups and top_k != 2 * chosen:
        yield (
            f"n_group={groups}, topk_group={chosen}, num_experts_per_tok={top_k}: Megatron scores a group by its "
            f"num_experts_per_tok // topk_group = {top_k // chosen} best experts, the model by its two best (set "
            "num_experts_per_tok to twice topk_group)"
        )
    normalised = getattr(hf_config, "norm_topk_prob", None) is not False
    if normalised != (top_k > 1):
        yield (
            f"norm_topk_prob={normalised} and num_experts_per_tok={top_k}: Megatron normalises the weights of several "
            "experts, and never that of one"
        )


def complete_provider(hf_config: Any, provider: Any) -> None:
    """Sets what Megatron-Bridge takes as it is in released models."""
    if hf_config.model_type in ("glm4_moe", "gpt_oss"):
        provider.share_embeddings_and_output_weights = bool(hf_config.tie_word_embeddings)
    match hf_config.model_type:
        case "glm4_moe" | "glm4_moe_lite":
            shared = getattr(hf_config, "n_shared_experts", None) or 1
            provider.moe_shared_expert_intermediate_size = hf_config.moe_intermediate_size * shared
            kinds = getattr(hf_config, "mlp_layer_types", None)
            if kinds is not None:
                provider.moe_layer_freq = [int(kind == "sparse") for kind in kinds]
        case "gpt_oss":
            _, rope = _rope(hf_config)
            provider.yarn_rotary_scaling_factor = float(rope.get("factor", 1.0))
            provider.yarn_original_max_position_embeddings = rope.get("original_max_position_embeddings")
            provider.yarn_beta_fast = float(rope.get("beta_fast") or 32.0)
            provider.yarn_beta_slow = float(rope.get("beta_slow") or 1.0)
            provider.yarn_correction_range_round_to_int = rope.get("truncate", True)
            provider.window_attn_skip_freq = [int("sliding" in kind) for kind in hf_config.layer_types]
            provider.activation_func_clamp_value = float(getattr(hf_config, "swiglu_limit", 7.0))
