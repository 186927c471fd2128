"""The runtime's own configuration from verl's engine, model and optimizer configurations."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from adapters.verl.megatron_overrides import TRANSFORMER_FIELD, bridge_options, native_options
from adapters.verl.model_facts import model_facts, text_config
from rl_backend.contracts import ConfigError, ParallelConfig

if TYPE_CHECKING:
    from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig

BACKENDS = ("native", "bridge")

# The recomputation of engine/megatron.yaml: Megatron's and verl's defaults, which ask for nothing.
_AT_REST: Mapping[str, Any] = {
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_num_layers": None,
    "recompute_modules": ["core_attn"],
}
_RECOMPUTE = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")
_EVERY_LAYER = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
_DECIDED_BY = {
    "parallel": "tensor_model_parallel_size and its like",
    "optimizer": "the role's optim",
    "param_dtype": "dtype",
    "activation_checkpointing": "model.enable_gradient_checkpointing",
    **dict.fromkeys(_RECOMPUTE, "override_transformer_config"),
    "override_transformer_config": "the field of that name",
    "override_ddp_config": "the field of that name",
    "override_optimizer_config": "optim.override_optimizer_config",
}
# Of override_optimizer_config, what OptimizerConfig has.
ADAM = ("adam_beta1", "adam_beta2", "adam_eps")


def backend_options(
    model: HFModelConfig, engine: McoreEngineConfig, optimizer: McoreOptimizerConfig | None
) -> dict[str, Any]:
    """Fields of ``NativeConfig`` or ``BridgeConfig``, the optimizer left out.

    Raises:
        ConfigError: a field that the backend cannot honour.
    """
    backend = getattr(engine, "backend", "native")
    chosen = dict(getattr(engine, "backend_options", {}))
    for name, value in chosen.items():
        if name in _DECIDED_BY:
            raise ConfigError.of(
                f"RLBackendEngineConfig.backend_options[{name!r}]", value, f"decided by {_DECIDED_BY[name]}"
            )
    parallel = parallel_config(model, engine)
    options: dict[str, Any] = {"parallel": parallel, "param_dtype": engine.dtype, "device": _device(), **chosen}
    if engine.entropy_from_logits_with_chunking:
        if "log_prob_chunk_tokens" in chosen:
            raise ConfigError.of(
                "RLBackendEngineConfig.backend_options['log_prob_chunk_tokens']",
                chosen["log_prob_chunk_tokens"],
                "decided by entropy_from_logits_chunk_size, because entropy_from_logits_with_chunking is set",
            )
        options["log_prob_chunk_tokens"] = engine.entropy_from_logits_chunk_size
    recompute, overrides = _transformer_overrides(model, engine)
    given = (optimizer.override_optimizer_config if optimizer else None) or {}
    optimizer_overrides = {name: value for name, value in given.items() if name not in ADAM}
    if backend == "bridge" and engine.full_determinism:
        overrides["deterministic_mode"] = True
    facts = model_facts(model.hf_config, has_experts=has_experts(model), dtype=engine.dtype)
    dictionaries = (overrides, engine.override_ddp_config or {}, optimizer_overrides)
    if backend == "bridge":
        device = _device() if chosen.get("device", "auto") == "auto" else chosen["device"]
        translated = bridge_options(*dictionaries, facts, parallel, transformer_engine=_has_transformer_engine(device))
    else:
        translated = native_options(*dictionaries, facts, parallel)
    for name in [name for name in translated if name in chosen]:
        raise ConfigError.of(
            f"RLBackendEngineConfig.backend_options[{name!r}]", chosen[name], "decided by override_transformer_config too"
        )
    options |= translated
    return (
        options | recompute
        if backend == "bridge"
        else {**options, "activation_checkpointing": _native_checkpointing(recompute)}
    )


def parallel_config(model: HFModelConfig, engine: McoreEngineConfig) -> ParallelConfig:
    """The layout; verl's null for expert tensor parallelism is that of the rest of the model."""
    tp = engine.tensor_model_parallel_size
    if tp > 1 and not engine.sequence_parallel:
        raise ConfigError.of("McoreEngineConfig.sequence_parallel", False, f"always on with tensor_model_parallel_size={tp}")
    if engine.context_parallel_size > 1 and getattr(engine, "backend", "native") == "bridge":
        raise ConfigError.of(
            "McoreEngineConfig.context_parallel_size",
            engine.context_parallel_size,
            "backend=bridge has no context parallelism; set backend=native, or 1",
        )
    vpp, etp = engine.virtual_pipeline_model_parallel_size, engine.expert_tensor_parallel_size
    return ParallelConfig(
        tp=tp,
        pp=engine.pipeline_model_parallel_size,
        vpp=1 if vpp is None else vpp,
        cp=engine.context_parallel_size,
        ep=engine.expert_model_parallel_size,
        etp=(tp if has_experts(model) else 1) if etp is None else etp,
    )


def has_experts(model: HFModelConfig) -> bool:
    """Whether ``config.json`` gives a number of experts."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return any(getattr(text_config(model.hf_config), name, None) for name in names)


def _device() -> str:
    """That of verl's platform, whatever else this machine has."""
    from verl.utils.device import get_device_name

    name: str = get_device_name()
    return name


def _has_transformer_engine(device: str) -> bool:
    return device != "cpu" and importlib.util.find_spec("transformer_engine") is not None


def _transformer_overrides(model: HFModelConfig, engine: McoreEngineConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Megatron's fields of recomputation, and the others that ask for something."""
    given = dict(engine.override_transformer_config or {})
    asked = {name: value for name, value in given.items() if name not in _AT_REST or value not in (None, _AT_REST[name])}
    recompute = {name: asked.pop(name) for name in _RECOMPUTE if name in asked}
    granularity = recompute.get("recompute_granularity")
    if granularity == "selective" and given.get("recompute_modules") is not None:
        recompute["recompute_modules"] = given["recompute_modules"]
    if granularity is None:
        for name, value in recompute.items():
            raise ConfigError.of(f"{TRANSFORMER_FIELD}[{name!r}]", value, "read with recompute_granularity only; set it too")
        if model.enable_gradient_checkpointing:
            recompute = dict(_EVERY_LAYER)
    return recompute, asked


def _native_checkpointing(recompute: Mapping[str, Any]) -> str:
    if not recompute:
        return "none"
    for name, value in recompute.items():
        if value != _EVERY_LAYER.get(name):
            raise ConfigError.of(
                f"{TRANSFORMER_FIELD}[{name!r}]",
                value,
                "backend=native recomputes each layer by itself: recompute_granularity=full, recompute_method=uniform, "
                "recompute_num_layers=1; set these, or backend=bridge",
            )
    return "full"
