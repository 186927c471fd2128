"""Settings of an engine, read from verl's configurations."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from adapters.verl.options.decisions import ADAM, CHECKPOINT, DDP, ENGINE, MODEL, OPTIMIZER, TRANSFORMER, require_supported
from adapters.verl.options.lora import LoRASettings, lora_settings
from adapters.verl.options.megatron import bridge_options, native_options, optimizer_on_host
from adapters.verl.options.model_facts import has_experts, model_facts
from rl_backend.contracts import ConfigError, Head, OptimizerConfig, ParallelConfig, RuntimeConfig

if TYPE_CHECKING:
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig

type RouterReplayMode = Literal["disabled", "R2", "R3"]

STATE = frozenset({"model", "optimizer", "extra"})
"""verl's names for weights, optimizer with schedules, and random state; a checkpoint's last two need its first."""

_BACKENDS = ("native", "bridge")
_OURS = "RLBackendEngineConfig"
_HEADS: Mapping[str, Head] = {"language_model": "log_probs", "value_model": "values"}
# verl splits a batch into micro-batches, by max_token_len_per_gpu or micro_batch_size_per_gpu of each call.
_NO_LIMIT = 2**31 - 1
# The recomputation of engine/megatron.yaml: Megatron's and verl's defaults, which ask for nothing.
_RECOMPUTE: Mapping[str, Any] = {
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_num_layers": None,
    "recompute_modules": ["core_attn"],
}
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
OF_ADAM = ("adam_beta1", "adam_beta2", "adam_eps")


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
        router_replay: which routes are replayed, in which pass.
        save_contents: what ``save_checkpoint`` writes, of ``model``, ``optimizer``, ``extra`` and ``hf_model``.
        load_contents: what ``load_checkpoint`` reads, of the same.
        lora: the adapter that is trained instead of the weights; None in a forward-only engine, as in verl's references.
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
    lora = lora_settings(model_config, dtype=engine_config.dtype, seed=engine_config.seed)
    if checkpoint_config is not None:
        _require_checkpoint_config(checkpoint_config, lora, sharded=engine_config.use_dist_checkpointing)
    on_host = optimizer is not None and optimizer_on_host(optimizer.override_optimizer_config)
    replay = engine_config.router_replay.mode
    if replay != "disabled" and not has_experts(model_config.hf_config):
        raise ConfigError.of(f"{ENGINE}.router_replay.mode", replay, "this model has no experts; set 'disabled'")
    if model_type not in _HEADS:
        raise ConfigError.of("model_type", model_type, f"expected one of {', '.join(map(repr, _HEADS))}")
    return EngineSettings(
        runtime=RuntimeConfig(
            backend=_backend(engine_config),
            hf_path=_first_weights(model_config, engine_config),
            seed=engine_config.seed,
            max_tokens_per_micro_batch=_NO_LIMIT,
            backend_cfg=_backend_options(model_config, engine_config, optimizer),
        ),
        head=_HEADS[model_type],
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
    betas = tuple(overrides.get(name, beta) for name, beta in zip(OF_ADAM, config.betas, strict=False))
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
    """Checks what this configuration alone decides, so that it can be refused before workers start.

    Raises:
        ConfigError: a value that cannot be honoured.
    """
    require_supported(ENGINE, config)
    require_supported(f"{ENGINE}.router_replay", config.router_replay)
    require_supported(f"{ENGINE}.qat", config.qat)
    backend, options = _backend(config), getattr(config, "backend_options", {})
    if config.use_megatron_fsdp and backend != "native":
        raise ConfigError.of(
            f"{ENGINE}.use_megatron_fsdp",
            True,
            "backend=bridge keeps parameters whole; set backend=native, which shards them, or leave it at False",
        )
    if config.dtype not in ("bfloat16", "float32"):
        raise ConfigError.of(f"{ENGINE}.dtype", config.dtype, "expected 'bfloat16' or 'float32'")
    if backend not in _BACKENDS:
        raise ConfigError.of(f"{_OURS}.backend", backend, f"expected one of {', '.join(map(repr, _BACKENDS))}")
    if not isinstance(options, Mapping):
        raise ConfigError.of(f"{_OURS}.backend_options", options, "expected a dictionary of the backend's fields")


def require_contents(field: str, contents: frozenset[str], *, sharded: bool) -> None:
    """Checks the parts that a checkpoint is to have.

    Raises:
        ConfigError: parts that cannot be restored, or that verl does not know.
    """
    state, name = contents & STATE, f"checkpoint.{field}"
    if contents - STATE - {"hf_model"}:
        raise ConfigError.of(name, sorted(contents), f"expected {sorted(STATE)} and 'hf_model'")
    if state and state != STATE and (sharded or state != {"model"}):
        alone = "'hf_model'" if sharded else "'model' or 'hf_model'"
        raise ConfigError.of(
            name,
            sorted(contents),
            f"{sorted(STATE)} are one training state, restored together; name all three, or {alone} alone for weights",
        )


def _require_model_config(config: HFModelConfig) -> None:
    require_supported(MODEL, config)
    require_supported(f"{MODEL}.mtp", config.mtp)
    if config.hf_config_path not in (None, config.path):
        raise ConfigError.of(
            f"{MODEL}.hf_config_path", config.hf_config_path, "config.json of path is read; leave it at null, or at path"
        )
    if (config.tiled_mlp or {}).get("enabled"):
        problem = "models are this package's own; leave it at False"
        raise ConfigError.of(f"{MODEL}.tiled_mlp.enabled", config.tiled_mlp["enabled"], problem)


def _require_optimizer_config(config: McoreOptimizerConfig | None) -> McoreOptimizerConfig:
    if config is None:
        raise ConfigError.of("optimizer_config", None, f"expected {OPTIMIZER}, or {ENGINE}.forward_only=True")
    if not hasattr(config, "lr_decay_style"):
        problem = f"expected {OPTIMIZER}: choose verl's configuration optim=megatron"
        raise ConfigError.of("optimizer_config", type(config).__name__, problem)
    require_supported(OPTIMIZER, config)
    return config


def _require_checkpoint_config(config: CheckpointConfig, lora: LoRASettings | None, *, sharded: bool) -> None:
    require_supported(CHECKPOINT, config)
    for name in ("save_contents", "load_contents"):
        require_contents(name, frozenset(getattr(config, name)), sharded=sharded)
    if getattr(config, "save_lora_only", False) and (lora is None or "hf_model" in config.save_contents):
        problem = (
            "hf_model in save_contents is the merged model; remove one" if lora else "there is no LoRA; leave it at False"
        )
        raise ConfigError.of(f"{CHECKPOINT}.save_lora_only", True, problem)
    if lora is not None and set(config.load_contents) == {"hf_model"}:
        raise ConfigError.of(
            "checkpoint.load_contents",
            list(config.load_contents),
            "an adapter cannot be read from the merged model; name 'model' for the adapter alone, or the training state",
        )


def _first_weights(model: HFModelConfig, engine: McoreEngineConfig) -> str:
    """The directory that the first weights come from."""
    if not engine.use_dist_checkpointing:
        return str(model.local_path)
    path = engine.dist_checkpointing_path
    if not path or not (Path(path) / "config.json").is_file():
        raise ConfigError.of(
            f"{ENGINE}.dist_checkpointing_path",
            path,
            "with use_dist_checkpointing first weights come from it, and it must be a Hugging Face directory, with "
            "config.json; convert a distributed checkpoint of Megatron, or set use_dist_checkpointing=False to start from "
            "model.path",
        )
    return str(path)


def _backend(engine: McoreEngineConfig) -> str:
    return str(getattr(engine, "backend", "native"))


def _backend_options(
    model: HFModelConfig, engine: McoreEngineConfig, optimizer: McoreOptimizerConfig | None
) -> dict[str, Any]:
    """Fields of ``NativeConfig`` or ``BridgeConfig``, without the optimizer."""
    from verl.utils.device import get_device_name

    backend, chosen = _backend(engine), dict(getattr(engine, "backend_options", {}))

    def require_not_chosen(names: Mapping[str, Any], decided_by: str) -> None:
        for name in [name for name in names if name in chosen]:
            raise ConfigError.of(f"{_OURS}.backend_options[{name!r}]", chosen[name], f"decided by {decided_by}")

    for name, decided_by in _DECIDED_BY.items():
        require_not_chosen({name: None}, decided_by)
    parallel = _parallel_config(model, engine)
    # verl's platform decides the device, whatever else this machine has.
    options = {"parallel": parallel, "param_dtype": engine.dtype, "device": get_device_name(), **chosen}
    if engine.entropy_from_logits_with_chunking:
        chunk = {"log_prob_chunk_tokens": engine.entropy_from_logits_chunk_size}
        require_not_chosen(chunk, "entropy_from_logits_chunk_size, because entropy_from_logits_with_chunking is set")
        options |= chunk
    recompute, transformer = _transformer_overrides(model, engine)
    given = {
        TRANSFORMER: transformer,
        DDP: engine.override_ddp_config or {},
        ADAM: {
            name: value
            for name, value in ((optimizer.override_optimizer_config if optimizer else None) or {}).items()
            if name not in OF_ADAM
        },
    }
    facts = model_facts(model.hf_config, has_experts=has_experts(model.hf_config), dtype=engine.dtype)
    translated: dict[str, Any]
    if backend == "bridge":
        on_cpu = (get_device_name() if options["device"] == "auto" else options["device"]) == "cpu"
        has_kernels = not on_cpu and importlib.util.find_spec("transformer_engine") is not None
        translated = bridge_options(given, facts, parallel, transformer_engine=has_kernels)
        if engine.full_determinism:
            translated["override_transformer_config"]["deterministic_mode"] = True
        translated |= recompute
    else:
        translated = native_options(given, facts, parallel)
        translated["activation_checkpointing"] = _native_checkpointing(recompute)
    require_not_chosen(translated, "override_transformer_config too")
    return options | translated


def _parallel_config(model: HFModelConfig, engine: McoreEngineConfig) -> ParallelConfig:
    """The layout; verl's null for expert tensor parallelism is that of the rest of the model."""
    tp = engine.tensor_model_parallel_size
    if tp > 1 and not engine.sequence_parallel:
        raise ConfigError.of(f"{ENGINE}.sequence_parallel", False, f"always on with tensor_model_parallel_size={tp}")
    if engine.context_parallel_size > 1 and _backend(engine) == "bridge":
        problem = "backend=bridge has no context parallelism; set backend=native, or 1"
        raise ConfigError.of(f"{ENGINE}.context_parallel_size", engine.context_parallel_size, problem)
    vpp, etp = engine.virtual_pipeline_model_parallel_size, engine.expert_tensor_parallel_size
    return ParallelConfig(
        tp=tp,
        pp=engine.pipeline_model_parallel_size,
        vpp=1 if vpp is None else vpp,
        cp=engine.context_parallel_size,
        ep=engine.expert_model_parallel_size,
        etp=(tp if has_experts(model.hf_config) else 1) if etp is None else etp,
    )


def _transformer_overrides(model: HFModelConfig, engine: McoreEngineConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Megatron's fields of recomputation that ask for something, and the other fields."""
    given = dict(engine.override_transformer_config or {})
    others = {name: value for name, value in given.items() if name not in _RECOMPUTE}
    recompute = {
        name: given[name] for name, default in _RECOMPUTE.items() if name in given and given[name] not in (None, default)
    }
    granularity = recompute.get("recompute_granularity")
    if granularity == "selective" and given.get("recompute_modules") is not None:
        recompute["recompute_modules"] = given["recompute_modules"]
    if granularity is None:
        for name, value in recompute.items():
            raise ConfigError.of(f"{TRANSFORMER}[{name!r}]", value, "read with recompute_granularity only; set it too")
        if model.enable_gradient_checkpointing:
            recompute = dict(_EVERY_LAYER)
    return recompute, others


def _native_checkpointing(recompute: Mapping[str, Any]) -> str:
    if not recompute:
        return "none"
    for name, value in recompute.items():
        if value != _EVERY_LAYER.get(name):
            raise ConfigError.of(
                f"{TRANSFORMER}[{name!r}]",
                value,
                "backend=native recomputes each layer by itself: recompute_granularity=full, recompute_method=uniform, "
                "recompute_num_layers=1; set these, or backend=bridge",
            )
    return "full"
