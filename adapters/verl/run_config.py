"""Checks of a whole ``main_ppo`` configuration, made where verl reads it."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from adapters.verl.late_imports import when_imported, wrap_once
from adapters.verl.registration import is_ours
from rl_backend.contracts import ConfigError, UnsupportedError

# Losses that read the logits of the teacher's most probable tokens.
_TOP_K = ("forward_kl_topk",)
_DETACHED_WORKER = "verl.experimental.separation.engine_workers"
_NO_COPIES = (
    "has log-probs computed with weights that verl copies in Megatron's layout, which our engines do not have; set "
    "algorithm.rollout_correction.bypass_mode=True, which takes the rollout's log-probs"
)


def register() -> None:
    """Lets verl's ``validate_config``, which ``main_ppo`` calls first, refuse what our engines cannot do."""
    # verl's fully asynchronous trainer does not call it. There the worker that would copy weights refuses.
    when_imported(_DETACHED_WORKER, _refuse_copies)
    from verl import utils
    from verl.utils import config as module

    wrap_once(module, "validate_config", _validate_config)
    utils.validate_config = module.validate_config


def _validate_config(original: Callable[..., None], config: Any, *arguments: Any, **options: Any) -> None:
    require_run(config)
    original(config, *arguments, **options)


def require_run(config: Any) -> None:
    if not is_ours(config.actor_rollout_ref.actor):
        return
    correction: Any = config.algorithm.get("rollout_correction") or {}
    trainer = config.trainer
    wrong: list[tuple[str, Any, str]] = []
    if trainer.get("use_v1") and trainer.v1.trainer_mode == "separate_async" and not correction.get("bypass_mode"):
        wrong.append(("trainer.v1.trainer_mode", trainer.v1.trainer_mode, _NO_COPIES))
    model, engine = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout.checkpoint_engine.backend
    merge = bool(model.lora.get("merge", False))
    is_dora = model.lora.get("rank", 0) > 0 and model.lora.get("type") == "dora"
    has_adapter = max(model.lora.get("rank", 0), model.lora_rank) > 0
    if has_adapter and (engine == "delta_sharded" or (not merge and (engine != "naive" or is_dora))):
        problem = (
            f"with model.lora.merge={merge}: delta_sharded sends changes of weights that are trained themselves, and no "
            "adapter; the others send whole weights, lora.merge=True; naive sends an adapter too, lora.merge=False, but "
            "rollouts serve none of type dora"
        )
        wrong.append(("actor_rollout_ref.rollout.checkpoint_engine.backend", engine, problem))
    distillation: Any = config.get("distillation") or {}
    mode = distillation.get("enabled") and distillation.distillation_loss.loss_mode
    if mode in _TOP_K:
        problem = "reads a batch's logits, which are never kept; choose an estimator, such as k1 or k3, or verl's own engine"
        wrong.append(("distillation.distillation_loss.loss_mode", mode, problem))
    ConfigError.refuse_all(wrong)


def _refuse_copies(module: ModuleType) -> None:
    def handlers(original: Callable[..., Any], worker: Any) -> Any:
        from adapters.verl.engine import RuntimeEngine

        if isinstance(worker.actor.engine, RuntimeEngine):
            raise UnsupportedError(f"algorithm.rollout_correction.bypass_mode=False: {module.__name__} {_NO_COPIES}")
        return original(worker)

    wrap_once(module.DetachActorWorker, "_get_strategy_handlers", handlers)
