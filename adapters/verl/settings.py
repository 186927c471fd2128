"""Settings of an engine, read from verl's configurations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from adapters.verl import field_decisions
from adapters.verl.backend_options import ADAM, BACKENDS, backend_options, has_experts
from adapters.verl.checkpoint_contents import require_contents
from adapters.verl.field_decisions import refusal, require_supported
from adapters.verl.lora_settings import LoRASettings, lora_settings
from adapters.verl.megatron_overrides import optimizer_on_host
from rl_backend.contracts import ConfigError, Head, OptimizerConfig, RuntimeConfig

if TYPE_CHECKING:
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig

type RouterReplayMode = Literal["disabled", "R2", "R3"]

# verl splits a batch into micro-batches, by max_token_len_per_gpu or micro_batch_size_per_gpu of each call.
_NO_LIMIT = 2**31 - 1


@dataclass(frozen=True)
class EngineSettings:
    """An engine's construction, without verl's objects.

    Attributes:
        runtime: for ``create_runtime``. Its optimizer is the default one: verl knows ``total_training_steps`` only when
            ``initialize`` is called, where ``build_model`` takes :func:`optimizer_settings`.
        head: for ``build_model``.
        forward_only: for ``build_model``.
        param_offload: parameters are on the host outside ``train_mode`` and ``eval_mode``.
        grad_offload: so are gradients.
        optimizer_offload: so is the optimizer's state outside ``train_mode``.
        full_determinism: call verl's ``enable_full_determinism(runtime.seed)`` before the runtime is made.
        router_replay: what replays the routes of which pass.
        save_contents: what ``save_checkpoint`` writes, of ``model``, ``optimizer``, ``extra`` and ``hf_model``.
        load_contents: what ``load_checkpoint`` reads, of the same.
        lora: the adapter that is trained instead of the weights; a forward-only engine has none, as verl's references.
    """

    runtime: RuntimeConfig
    head: Head
    forward_only: bool
    param_offload: bool
    grad_offload: bool
    optimizer_offload: bool
    full_determinism: bool
    router_replay: RouterReplayMode
    save_contents: frozenset[str]
    load_contents: frozenset[str]
    lora: LoRASettings | None


def engine_settings(
    model_config: HFModelConfig,
    engine_config: McoreEngineConfig,
    optimizer_config: McoreOptimizerConfig | None,
    checkpoint_config: CheckpointConfig | None,
    *,
    model_type: str,
) -> EngineSettings:
    """Reads verl's four configurations.

    Args:
        optimizer_config: not read for a forward-only engine.
        checkpoint_config: None neither saves nor loads.
        model_type: ``language_model`` or ``value_model``.

    Raises:
        ConfigError: a field that cannot be honoured, by name, with the reason.
    """
    require_engine_config(engine_config)
    _require_model_config(model_config)
    optimizer = None if engine_config.forward_only else _require_optimizer_config(optimizer_config)
    if checkpoint_config is not None:
        require_supported("CheckpointConfig", checkpoint_config, field_decisions.CHECKPOINT)
        for name in ("save_contents", "load_contents"):
            contents = frozenset(getattr(checkpoint_config, name))
            require_contents(name, contents, sharded=engine_config.use_dist_checkpointing)
    lora = lora_settings(model_config, dtype=engine_config.dtype, seed=engine_config.seed)
    _require_saved_alone(checkpoint_config, lora)
    on_host = optimizer is not None and optimizer_on_host(optimizer.override_optimizer_config)
    replay = engine_config.router_replay.mode
    if replay != "disabled" and not has_experts(model_config):
        raise ConfigError.of("McoreEngineConfig.router_replay.mode", replay, "this model has no experts; set 'disabled'")
    return EngineSettings(
        runtime=RuntimeConfig(
            backend=getattr(engine_config, "backend", "native"),
            hf_path=_first_weights(model_config, engine_config),
            seed=engine_config.seed,
            max_tokens_per_micro_batch=_NO_LIMIT,
            backend_cfg=backend_options(model_config, engine_config, optimizer),
        ),
        head=_head(model_type),
        forward_only=engine_config.forward_only,
        param_offload=engine_config.param_offload,
        grad_offload=engine_config.param_offload,
        optimizer_offload=engine_config.optimizer_offload or on_host,
        full_determinism=engine_config.full_determinism,
        router_replay=replay,
        save_contents=frozenset(checkpoint_config.save_contents if checkpoint_config else ()),
        load_contents=frozenset(checkpoint_config.load_contents if checkpoint_config else ()),
        lora=None if engine_config.forward_only else lora,
    )


def _first_weights(model: HFModelConfig, engine: McoreEngineConfig) -> str:
    """The directory that the first weights come from."""
    if not engine.use_dist_checkpointing:
        return str(model.local_path)
    path = engine.dist_checkpointing_path
    if not path or not (Path(path) / "config.json").is_file():
        raise ConfigError.of(
            "McoreEngineConfig.dist_checkpointing_path",
            path,
            "with use_dist_checkpointing first weights come from it, and it has to be a Hugging Face directory, with "
            "config.json; convert a distributed checkpoint of Megatron, or set use_dist_checkpointing=False to start from "
            "model.path",
        )
    return str(path)


def optimizer_settings(config: McoreOptimizerConfig) -> OptimizerConfig:
    """verl's optimizer and schedule, once ``total_training_steps`` is set.

    Raises:
        ConfigError: values that cannot be honoured.
    """
    decay_steps = config.total_training_steps if config.lr_decay_steps is None else config.lr_decay_steps
    # As verl: 0 and negative values delegate to the ratio, and the ratio is of the decay, not of the training.
    warmup_steps = config.lr_warmup_steps or 0
    if warmup_steps <= 0:
        warmup_steps = int(config.lr_warmup_steps_ratio * max(decay_steps, 0))
    overrides = config.override_optimizer_config or {}
    betas = tuple(overrides.get(name, beta) for name, beta in zip(ADAM, config.betas, strict=False))
    eps = {"eps": overrides["adam_eps"]} if "adam_eps" in overrides else {}
    style = config.lr_decay_style.replace("_", "-")
    # verl's configurations and scripts give these whatever the style, and Megatron reads what it has a use for.
    decay = {} if style == "constant" else {"min_lr": config.min_lr, "lr_decay_steps": config.lr_decay_steps}
    if style == "WSD":
        decay |= {"lr_wsd_decay_style": config.lr_wsd_decay_style, "lr_wsd_decay_steps": config.lr_wsd_decay_steps}
    if warmup_steps > 0:
        decay["lr_warmup_init"] = config.lr_warmup_init
    return OptimizerConfig(
        lr=config.lr,
        lr_warmup_steps=warmup_steps,
        lr_decay_style=style,
        **decay,
        total_training_steps=config.total_training_steps,
        weight_decay=config.weight_decay,
        weight_decay_incr_style=config.weight_decay_incr_style,
        betas=betas,
        clip_grad=config.clip_grad,
        **eps,
    )


def require_engine_config(config: McoreEngineConfig) -> None:
    """Raises :class:`ConfigError` for what needs no more than this configuration to be refused."""
    where = "McoreEngineConfig"
    require_supported(where, config, field_decisions.ENGINE)
    require_supported(f"{where}.router_replay", config.router_replay, field_decisions.ROUTER_REPLAY)
    require_supported(f"{where}.qat", config.qat, field_decisions.QAT)
    if config.use_megatron_fsdp and getattr(config, "backend", "native") != "native":
        raise ConfigError.of(
            f"{where}.use_megatron_fsdp",
            True,
            "backend=bridge keeps parameters whole; set backend=native, which shards them, or leave it at False",
        )
    if config.dtype not in ("bfloat16", "float32"):
        raise ConfigError.of(f"{where}.dtype", config.dtype, "expected 'bfloat16' or 'float32'")
    backend = getattr(config, "backend", "native")
    if backend not in BACKENDS:
        raise ConfigError.of("RLBackendEngineConfig.backend", backend, f"expected one of {', '.join(map(repr, BACKENDS))}")
    options = getattr(config, "backend_options", {})
    if not isinstance(options, Mapping):
        raise ConfigError.of(
            "RLBackendEngineConfig.backend_options", options, "expected a dictionary of the backend's fields"
        )


def _require_model_config(config: HFModelConfig) -> None:
    where, decisions = "HFModelConfig", field_decisions.MODEL
    require_supported(where, config, decisions)
    require_supported(f"{where}.mtp", config.mtp, field_decisions.MTP)
    if config.hf_config_path not in (None, config.path):
        raise refusal(where, "hf_config_path", config.hf_config_path, decisions["hf_config_path"])
    if (config.tiled_mlp or {}).get("enabled"):
        raise refusal(where, "tiled_mlp.enabled", config.tiled_mlp["enabled"], decisions["tiled_mlp"])


def _require_saved_alone(config: CheckpointConfig | None, lora: LoRASettings | None) -> None:
    """Refuses contents of checkpoints that an adapter, or a model without one, does not have."""
    if config is None:
        return
    if getattr(config, "save_lora_only", False) and (lora is None or "hf_model" in config.save_contents):
        problem = (
            "hf_model in save_contents is the merged model; leave it out" if lora else "there is no LoRA; leave it at False"
        )
        raise ConfigError.of("CheckpointConfig.save_lora_only", True, problem)
    if lora is not None and set(config.load_contents) == {"hf_model"}:
        raise ConfigError.of(
            "checkpoint.load_contents",
            list(config.load_contents),
            "an adapter is not found again in the merged model; name 'model' for the adapter alone, or the training state",
        )


def _require_optimizer_config(config: McoreOptimizerConfig | None) -> McoreOptimizerConfig:
    if config is None:
        raise ConfigError.of(
            "optimizer_config", None, "expected McoreOptimizerConfig, or McoreEngineConfig.forward_only=True"
        )
    if not hasattr(config, "lr_decay_style"):
        raise ConfigError.of(
            "optimizer_config",
            type(config).__name__,
            "expected McoreOptimizerConfig: choose verl's configuration optim=megatron",
        )
    require_supported("McoreOptimizerConfig", config, field_decisions.OPTIMIZER)
    return config


def _head(model_type: Any) -> Head:
    if model_type == "language_model":
        return "log_probs"
    if model_type == "value_model":
        return "values"
    raise ConfigError.of("model_type", model_type, "expected 'language_model' or 'value_model'")
