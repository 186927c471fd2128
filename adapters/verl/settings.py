"""What an engine is built from, read from verl's configurations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rl_backend.contracts import ConfigError, Head, OptimizerConfig, ParallelConfig, RuntimeConfig

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
        async_save: files are written while training goes on.
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
    async_save: bool


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
        model_type: ``language_model`` or ``value_model``.

    Raises:
        ConfigError: a field that cannot be honoured, by name, with the reason.
    """
    backend = getattr(engine_config, "backend", "native")
    options = dict(getattr(engine_config, "backend_options", {}))
    return EngineSettings(
        runtime=RuntimeConfig(
            backend=backend,
            hf_path=model_config.local_path,
            seed=engine_config.seed,
            max_tokens_per_micro_batch=_NO_LIMIT,
            backend_cfg={"parallel": _parallel(engine_config), "param_dtype": engine_config.dtype, **options},
        ),
        head=_head(model_type),
        forward_only=engine_config.forward_only,
        param_offload=engine_config.param_offload,
        grad_offload=engine_config.param_offload,
        optimizer_offload=engine_config.optimizer_offload,
        full_determinism=engine_config.full_determinism,
        router_replay=engine_config.router_replay.mode,
        save_contents=frozenset(checkpoint_config.save_contents if checkpoint_config else ()),
        load_contents=frozenset(checkpoint_config.load_contents if checkpoint_config else ()),
        async_save=checkpoint_config.async_save if checkpoint_config else False,
    )


def optimizer_settings(config: McoreOptimizerConfig) -> OptimizerConfig:
    """verl's optimizer and schedule, once ``total_training_steps`` is set.

    Raises:
        ConfigError: values that cannot be honoured.
    """
    decay_steps = config.lr_decay_steps or config.total_training_steps
    # As verl: 0 and negative values delegate to the ratio, and the ratio is of the decay, not of the training.
    warmup_steps = config.lr_warmup_steps or 0
    if warmup_steps <= 0:
        warmup_steps = int(config.lr_warmup_steps_ratio * max(decay_steps, 0))
    return OptimizerConfig(
        optimizer=config.optimizer,
        lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_init=config.lr_warmup_init,
        lr_warmup_steps=warmup_steps,
        lr_decay_steps=config.lr_decay_steps,
        lr_decay_style=config.lr_decay_style.replace("_", "-"),
        lr_wsd_decay_style=config.lr_wsd_decay_style,
        lr_wsd_decay_steps=config.lr_wsd_decay_steps,
        total_training_steps=config.total_training_steps,
        weight_decay=config.weight_decay,
        weight_decay_incr_style=config.weight_decay_incr_style,
        betas=tuple(config.betas),
        clip_grad=config.clip_grad,
    )


def _parallel(config: McoreEngineConfig) -> Mapping[str, Any]:
    return ParallelConfig(
        tp=config.tensor_model_parallel_size,
        pp=config.pipeline_model_parallel_size,
        vpp=config.virtual_pipeline_model_parallel_size or 1,
        cp=config.context_parallel_size,
        ep=config.expert_model_parallel_size,
        etp=config.expert_tensor_parallel_size or 1,
    ).model_dump()


def _head(model_type: str) -> Head:
    if model_type == "language_model":
        return "log_probs"
    if model_type == "value_model":
        return "values"
    raise ConfigError.of("model_type", model_type, "expected 'language_model' or 'value_model'")
