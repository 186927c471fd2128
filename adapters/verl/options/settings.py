"""Settings of an engine, read from verl's configurations."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from adapters.verl.options.decisions import (
    ADAM,
    CHECKPOINT,
    DDP,
    ENGINE,
    MODEL,
    OPTIMIZER,
    OURS,
    TRANSFORMER,
    require_supported,
)
from adapters.verl.options.lora import LoRASettings, lora_settings
from adapters.verl.options.megatron import (
    ModelFacts,
    bridge_options,
    has_experts,
    native_options,
    optimizer_on_host,
    text_config,
)
from rl_backend.contracts import ConfigError, Head, OptimizerConfig, ParallelConfig, RuntimeConfig

if TYPE_CHECKING:
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig

type RouterReplayMode = Literal["disabled", "R2", "R3"]

STATE = frozenset({"model", "optimizer", "extra"})
"""verl's names for weights, optimizer with schedules, and random state; a checkpoint's last two need its first."""

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
_ON_NATIVE = {
    f"{ENGINE}.use_megatron_fsdp": "backend=bridge keeps parameters whole; set backend=native, which shards them, or False",
    f"{OURS}.use_prefix_grouper": "backend=bridge computes every sequence by itself; set backend=native, or False",
}
# Of override_optimizer_config, what OptimizerConfig has.
OF_ADAM = ("adam_beta1", "adam_beta2", "adam_eps")


@dataclass(frozen=True)
class EngineSettings:
    """An engine's construction, without verl's objects.

    Attributes:
        runtime: for ``create_runtime``, with the default optimizer: verl knows ``total_training_steps`` only when
            ``initialize`` is called, where ``build_model`` takes :func:`optimizer_settings`.
        head: for ``build_model``, as ``forward_only``.
        param_offload: parameters and gradients are on the host outside ``train_mode`` and ``eval_mode``.
        optimizer_offload: the optimizer's state is on the host outside ``train_mode``.
        full_determinism: call verl's ``enable_full_determinism(runtime.seed)`` before the runtime is made.
        router_replay: which routes are replayed, in which pass.
        use_prefix_grouper: micro-batches are cut by the tokens that are computed.
        save_contents: what ``save_checkpoint`` writes, of ``model``, ``optimizer``, ``extra`` and ``hf_model``.
        load_contents: what ``load_checkpoint`` reads, of the same.
        lora: the adapter that is trained instead of the weights; None in a forward-only engine, as in verl's references.
    """

    runtime: RuntimeConfig
    head: Head
    forward_only: bool
    param_offload: bool
    optimizer_offload: bool
    full_determinism: bool
    router_replay: RouterReplayMode
    use_prefix_grouper: bool
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
    optimizer = None if engine_config.forward_only else optimizer_config
    if not engine_config.forward_only:
        _require_optimizer_config(optimizer_config)
    lora = lora_settings(model_config, dtype=engine_config.dtype, seed=engine_config.seed)
    if checkpoint_config is not None:
        _require_checkpoint_config(checkpoint_config, lora, sharded=engine_config.use_dist_checkpointing)
    on_host = optimizer is not None and optimizer_on_host(optimizer.override_optimizer_config)
    replay = engine_config.router_replay.mode
    if replay != "disabled" and not has_experts(model_config.hf_config):
        raise ConfigError.of(f"{ENGINE}.router_replay.mode", replay, "this model has no experts; set 'disabled'")
    first_weights = (
        engine_config.dist_checkpointing_path if engine_config.use_dist_checkpointing else model_config.local_path
    )
    return EngineSettings(
        runtime=RuntimeConfig(
            backend=_backend(engine_config),
            hf_path=str(first_weights),
            seed=engine_config.seed,
            max_tokens_per_micro_batch=_NO_LIMIT,
            backend_cfg=_backend_options(model_config, engine_config, optimizer),
        ),
        head=_HEADS[model_type],
        forward_only=engine_config.forward_only,
        param_offload=engine_config.param_offload,
        optimizer_offload=engine_config.optimizer_offload or on_host,
        full_determinism=engine_config.full_determinism,
        router_replay=replay,
        use_prefix_grouper=_groups_prefixes(engine_config),
        save_contents=frozenset(checkpoint_config.save_contents if checkpoint_config else ()),
        load_contents=frozenset(checkpoint_config.load_contents if checkpoint_config else ()),
        lora=None if engine_config.forward_only else lora,
    )


def optimizer_settings(config: McoreOptimizerConfig) -> OptimizerConfig:
    """verl's optimizer and schedule, once ``total_training_steps`` is set."""
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
    """Raises :class:`ConfigError` for what this configuration alone decides, before workers start."""
    require_supported(OURS, config)
    require_supported(ENGINE, config)
    require_supported(f"{ENGINE}.router_replay", config.router_replay)
    require_supported(f"{ENGINE}.qat", config.qat)
    if _backend(config) == "bridge":
        asked = (config.use_megatron_fsdp, _groups_prefixes(config))
        wrong = [(name, True, problem) for (name, problem), value in zip(_ON_NATIVE.items(), asked, strict=True) if value]
        ConfigError.refuse_all(wrong)


def require_contents(field: str, contents: frozenset[str], *, sharded: bool) -> None:
    """Raises :class:`ConfigError` for parts of a checkpoint that cannot be restored, or that verl does not know.

    Args:
        sharded: verl's ``use_dist_checkpointing``: ``model`` is in the training state alone.
    """
    alone: tuple[frozenset[str], ...] = (frozenset(), STATE) if sharded else (frozenset(), STATE, frozenset({"model"}))
    if contents - {"hf_model"} not in alone:
        names = "'hf_model'" if sharded else "'model' or 'hf_model'"
        problem = f"expected {sorted(STATE)}, which are one training state, restored together, or {names} alone for weights"
        raise ConfigError.of(f"checkpoint.{field}", sorted(contents), problem)


def _require_model_config(config: HFModelConfig) -> None:
    require_supported(MODEL, config)
    require_supported(f"{MODEL}.mtp", config.mtp)
    require_supported(f"{MODEL}.tiled_mlp", config.tiled_mlp or {})
    if config.hf_config_path not in (None, config.path):
        problem = "config.json of path is read; leave it at null, or at path"
        raise ConfigError.of(f"{MODEL}.hf_config_path", config.hf_config_path, problem)


def _require_optimizer_config(config: McoreOptimizerConfig | None) -> None:
    if not hasattr(config, "lr_decay_style"):
        problem = f"expected {OPTIMIZER} for a model that is trained: choose verl's configuration optim=megatron"
        raise ConfigError.of("optimizer_config", type(config).__name__, problem)
    require_supported(OPTIMIZER, config)


def _require_checkpoint_config(config: CheckpointConfig, lora: LoRASettings | None, *, sharded: bool) -> None:
    require_supported(CHECKPOINT, config)
    for name in ("save_contents", "load_contents"):
        require_contents(name, frozenset(getattr(config, name)), sharded=sharded)
    wrong: list[tuple[str, Any, str]] = []
    if getattr(config, "save_lora_only", False) and (lora is None or "hf_model" in config.save_contents):
        problem = "hf_model in save_contents is the merged model" if lora else "there is no LoRA; leave it at False"
        wrong.append((f"{CHECKPOINT}.save_lora_only", True, problem))
    if lora is not None and set(config.load_contents) == {"hf_model"}:
        problem = "an adapter cannot be read from the merged model; name 'model' for the adapter, or the training state"
        wrong.append(("checkpoint.load_contents", list(config.load_contents), problem))
    ConfigError.refuse_all(wrong)


def _backend(engine: McoreEngineConfig) -> str:
    # verl's own class has no such field.
    return str(getattr(engine, "backend", "native"))


def _groups_prefixes(engine: McoreEngineConfig) -> bool:
    return bool(getattr(engine, "use_prefix_grouper", False))


def _backend_options(
    model: HFModelConfig, engine: McoreEngineConfig, optimizer: McoreOptimizerConfig | None
) -> dict[str, Any]:
    from verl.utils.device import get_device_name

    parallel = _parallel_config(model, engine)
    recompute, transformer = _transformer_overrides(model, engine)
    of_optimizer = (optimizer.override_optimizer_config if optimizer else None) or {}
    given = {
        TRANSFORMER: transformer,
        DDP: engine.override_ddp_config or {},
        ADAM: {name: value for name, value in of_optimizer.items() if name not in OF_ADAM},
    }
    facts = ModelFacts(text_config(model.hf_config), engine.dtype)
    chosen = dict(getattr(engine, "backend_options", {}))
    # verl's platform decides the device, whatever else this machine has.
    options = {"parallel": parallel, "param_dtype": engine.dtype, "device": get_device_name(), **chosen}
    if engine.entropy_from_logits_with_chunking:
        options["log_prob_chunk_tokens"] = engine.entropy_from_logits_chunk_size
    translated: dict[str, Any]
    if _backend(engine) == "bridge":
        on_cpu = (get_device_name() if options["device"] == "auto" else options["device"]) == "cpu"
        has_kernels = not on_cpu and importlib.util.find_spec("transformer_engine") is not None
        translated = bridge_options(given, facts, parallel, transformer_engine=has_kernels)
        if engine.full_determinism:
            translated["override_transformer_config"]["deterministic_mode"] = True
        translated |= recompute
    else:
        translated = native_options(given, facts, parallel)
        translated["activation_checkpointing"] = _native_checkpointing(recompute)
    decided_by = {**dict.fromkeys(translated, "override_transformer_config too"), **_DECIDED_BY}
    if engine.entropy_from_logits_with_chunking:
        decided_by["log_prob_chunk_tokens"] = "entropy_from_logits_chunk_size"
    if _groups_prefixes(engine):
        options["share_prefixes"] = "auto"
        decided_by["share_prefixes"] = "use_prefix_grouper"
    _require_not_decided(chosen, decided_by)
    return options | translated


def _require_not_decided(chosen: Iterable[str], decided_by: Mapping[str, str]) -> None:
    twice = {name: decided_by[name] for name in chosen if name in decided_by}
    if twice:
        problem = "; ".join(f"{name!r} is decided by {field}" for name, field in twice.items())
        raise ConfigError(f"{OURS}.backend_options: {problem}; remove it")


def _parallel_config(model: HFModelConfig, engine: McoreEngineConfig) -> ParallelConfig:
    tp = engine.tensor_model_parallel_size
    if tp > 1 and not engine.sequence_parallel:
        raise ConfigError.of(f"{ENGINE}.sequence_parallel", False, f"always on with tensor_model_parallel_size={tp}")
    vpp, etp = engine.virtual_pipeline_model_parallel_size, engine.expert_tensor_parallel_size
    return ParallelConfig(
        tp=tp,
        pp=engine.pipeline_model_parallel_size,
        vpp=1 if vpp is None else vpp,
        cp=engine.context_parallel_size,
        ep=engine.expert_model_parallel_size,
        # verl's null for experts is the tensor parallelism of the rest of the model.
        etp=(tp if has_experts(model.hf_config) else 1) if etp is None else etp,
    )


def _transformer_overrides(model: HFModelConfig, engine: McoreEngineConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    given = dict(engine.override_transformer_config or {})
    others = {name: value for name, value in given.items() if name not in _RECOMPUTE}
    recompute = {
        name: given[name] for name, default in _RECOMPUTE.items() if name in given and given[name] not in (None, default)
    }
    granularity = recompute.get("recompute_granularity")
    if granularity == "selective" and given.get("recompute_modules") is not None:
        recompute["recompute_modules"] = given["recompute_modules"]
    if recompute and granularity is None:
        problem = f"{', '.join(recompute)} read with recompute_granularity only; set it too"
        raise ConfigError(f"{TRANSFORMER}: {problem}")
    if not recompute and model.enable_gradient_checkpointing:
        recompute = dict(_EVERY_LAYER)
    return recompute, others


def _native_checkpointing(recompute: Mapping[str, Any]) -> str:
    if any(value != _EVERY_LAYER.get(name) for name, value in recompute.items()):
        expected = ", ".join(f"{name}={value}" for name, value in _EVERY_LAYER.items())
        problem = f"backend=native recomputes each layer by itself: {expected}; set these, or backend=bridge"
        raise ConfigError.of(TRANSFORMER, dict(recompute), problem)
    return "full" if recompute else "none"
