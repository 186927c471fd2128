"""Checks of a whole ``main_ppo`` configuration, beyond those of the roles, where verl reads it."""

from __future__ import annotations

import functools
import os
from typing import Any

from adapters.verl.registration import VENDOR_VARIABLE, VENDORS
from rl_backend.contracts import ConfigError

_CHECKS = "_rl_backend_checks"
_OURS = "adapters.verl.engine_config."
# Losses that read the logits of the teacher's most probable tokens.
_TOP_K = ("forward_kl_topk",)


def register() -> None:
    """Lets verl's ``validate_config``, which every trainer calls first, refuse what our engines cannot do."""
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
    """Refuses, of an actor on our engine, top-k distillation and adapters that its rollouts could not be given.

    Args:
        config: of ``main_ppo``, composed.

    Raises:
        ConfigError: by name, with what is offered.
    """
    if not _is_ours(config.actor_rollout_ref.actor):
        return
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


def _is_ours(actor: Any) -> bool:
    if actor.get("strategy") != "megatron":
        return False
    target = str(actor.megatron.get("_target_"))
    return target.startswith(_OURS) or os.environ.get(VENDOR_VARIABLE) in VENDORS
