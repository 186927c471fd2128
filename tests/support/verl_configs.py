"""verl's configurations as its entry points make them, from its own yaml."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import open_dict
from transformers import AutoConfig

TARGET = "adapters.verl.engine_config.RLBackendEngineConfig"
ROLES = ("actor", "ref", "critic", "sft")


class RoleConfigs(NamedTuple):
    """The four configurations of one role, and verl's name for its model."""

    model: Any
    engine: Any
    optimizer: Any
    checkpoint: Any
    model_type: str


@functools.cache
def role_configs(role: str, model: Path, *overrides: str) -> RoleConfigs:
    """As verl's ``main_ppo`` or ``sft_trainer`` reads them with the command line that docs/verl.md gives.

    Args:
        role: ``actor``, ``ref``, ``critic`` or ``sft``.
        overrides: of the command line.
    """
    from hydra import compose, initialize_config_module
    from verl.utils.config import omega_conf_to_dataclass

    engine, hf = {
        "actor": ("actor_rollout_ref.actor.megatron", "actor_rollout_ref.model"),
        "ref": ("actor_rollout_ref.ref.megatron", "actor_rollout_ref.model"),
        "critic": ("critic.megatron", "critic.model"),
        "sft": ("engine", "model"),
    }[role]
    line = [f"{engine}._target_={TARGET}", f"{hf}.path={model}", f"+{hf}.load_tokenizer=False", *overrides]
    with initialize_config_module("verl.trainer.config", version_base=None):
        if role == "sft":
            config = compose("sft_trainer_engine", overrides=["engine=megatron", "optim=megatron", *line])
            parts = (config.model, config.engine, config.optim, config.checkpoint)
            return RoleConfigs(*map(omega_conf_to_dataclass, parts), "language_model")
        config = compose("ppo_trainer", overrides=["model_engine=megatron", *line])
    if role == "critic":
        config.critic.ppo_micro_batch_size_per_gpu = 1
        critic = omega_conf_to_dataclass(config.critic)
        return RoleConfigs(critic.model, critic.engine, critic.optim, critic.checkpoint, "value_model")
    model_config = omega_conf_to_dataclass(config.actor_rollout_ref.model)
    part = config.actor_rollout_ref[role]
    with open_dict(part):
        part.ppo_micro_batch_size_per_gpu = 1
        if role == "ref":
            # As verl's worker does before it reads them.
            for name in [name for name in part if name.startswith("log_prob_")]:
                part.pop(name)
    actor = omega_conf_to_dataclass(part)
    return RoleConfigs(model_config, actor.engine, actor.optim, actor.checkpoint, "language_model")


def changed(configs: RoleConfigs, **values: Any) -> RoleConfigs:
    """A copy with other values; a key is a path from ``RoleConfigs`` with double underscores."""
    configs = copy.deepcopy(configs)
    for path, value in values.items():
        *way, last = path.split("__")
        place: Any = configs
        for name in way:
            place = place[name] if isinstance(place, dict) else getattr(place, name)
        if isinstance(place, dict):
            place[last] = value
        else:
            object.__setattr__(place, last, value)
    return configs


def write_config(model_type: str, architecture: str, path: Path, **fields: Any) -> Path:
    """A directory with ``config.json`` alone."""
    AutoConfig.for_model(model_type, architectures=[architecture], **fields).save_pretrained(path)
    return path
