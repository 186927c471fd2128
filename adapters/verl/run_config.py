"""Checks of a whole ``main_ppo`` configuration, beyond those of the roles, where verl reads it."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from adapters.verl.late_imports import when_imported
from adapters.verl.registration import is_ours
from rl_backend.contracts import ConfigError, UnsupportedError

_CHECKS = "_rl_backend_checks"
# Losses that read the logits of the teacher's most probable tokens.
_TOP_K = ("forward_kl_topk",)
_DETACHED_WORKER = "verl.experimental.separation.engine_workers"
_NO_COPIES = (
    "has log-probs computed with weights that verl copies in Megatron's layout, which our engines do not have; set "
    "algorithm.rollout_correction.bypass_mode=True, which takes the rollout's log-probs"
)


def register() -> None:
    """Lets verl's ``validate_config``, which ``main_ppo`` calls first, refuse what our engines cannot do.

    verl's fully asynchronous trainer does not call it: the worker that would copy weights refuses them by itself.
    """
    when_imported(_DETACHED_WORKER, _refuse_copies)
    from verl import utils
    from verl.utils import config as module

    original = module.validate_config
    if hasattr(original, _CHECKS):
        return

    @functools.wraps(original)
    def validate_config(config: Any, *arguments: Any, **options: Any) -> None:
        require_run(config)
        original(config, *arguments, **options)

    setattr(validate_config, _CHECKS, True)
    module.validate_config = utils.validate_config = validate_config


def require_run(config: Any) -> None:
    """Refuses, of an actor on our engine, top-k distillation, adapters that its rollouts could not be given, and a trainer
    that copies its weights.

    Args:
        config: of ``main_ppo``, composed.

    Raises:
        ConfigError: by name, with what is offered.
    """
    if not is_ours(config.actor_rollout_ref.actor):
        return
    correction: Any = config.algorithm.get("rollout_correction") or {}
    trainer = config.trainer
    if trainer.get("use_v1") and trainer.v1.trainer_mode == "separate_async" and not correction.get("bypass_mode"):
        raise ConfigError.of("trainer.v1.trainer_mode", trainer.v1.trainer_mode, _NO_COPIES)
    model, engine = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout.checkpoint_engine.backend
    has_adapter = max(model.lora.get("rank", 0), model.lora_rank) > 0
    if has_adapter and engine == "delta_sharded":
        raise ConfigError.of(
            "actor_rollout_ref.rollout.checkpoint_engine.backend",
            engine,
            "sends changes of weights that are trained themselves; with LoRA choose 'naive', or another and lora.merge=True",
        )
    if model.lora.get("rank", 0) > 0 and model.lora.get("type") == "dora" and not model.lora.get("merge", False):
        raise ConfigError.of(
            "actor_rollout_ref.model.lora.merge",
            False,
            "rollouts serve no DoRA adapters; with lora.type=dora set it to True",
        )
    if has_adapter and not model.lora.get("merge", False) and engine != "naive":
        raise ConfigError.of(
            "actor_rollout_ref.rollout.checkpoint_engine.backend",
            engine,
            "sends whole weights only, and actor_rollout_ref.model.lora.merge=False keeps the adapter apart; set "
            "lora.merge=True, or choose 'naive' here",
        )
    distillation: Any = config.get("distillation") or {}
    mode = distillation.get("enabled") and distillation.distillation_loss.loss_mode
    if mode in _TOP_K:
        raise ConfigError.of(
            "distillation.distillation_loss.loss_mode",
            mode,
            "reads a batch's logits, which are never kept; choose an estimator, such as k1 or k3, or verl's own engine",
        )


def _refuse_copies(module: ModuleType) -> None:
    worker = module.DetachActorWorker
    original = worker._get_strategy_handlers

    @functools.wraps(original)
    def _get_strategy_handlers(self: Any) -> Any:
        from adapters.verl.engine import RuntimeEngine

        if isinstance(self.actor.engine, RuntimeEngine):
            raise UnsupportedError(f"algorithm.rollout_correction.bypass_mode=False: {module.__name__} {_NO_COPIES}")
        return original(self)

    worker._get_strategy_handlers = _get_strategy_handlers
