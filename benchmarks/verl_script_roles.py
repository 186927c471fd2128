"""verl's example scripts as configurations of roles, with our engine switched in, and what it refuses of them."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir, initialize_config_module
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict

from benchmarks.verl_script_commands import Command

TARGET = "adapters.verl.engine_config.RLBackendEngineConfig"
_ROLES = {"actor": "actor_rollout_ref.actor.megatron", "ref": "actor_rollout_ref.ref.megatron", "critic": "critic.megatron"}
# Of composed overrides that verl's release has and the installed verl has not.
_UNKNOWN = re.compile(r"Could not override '([^']+)'")


@dataclass(frozen=True)
class MegatronScript:
    """A script that trains with Megatron, composed by the installed verl.

    Attributes:
        command: what the script runs.
        config_name: of verl's yaml.
        overrides: those of the command that the installed verl has a field for.
        left_out: the others.
        config: what the installed verl composes of ``overrides``.
    """

    command: Command
    config_name: str
    overrides: tuple[str, ...]
    left_out: tuple[str, ...]
    config: DictConfig

    @property
    def is_sft(self) -> bool:
        return "sft_trainer" in self.command.trainer

    def switched(self, backend: str, *more: str) -> DictConfig:
        """The configuration with the overrides that put every role on our engine, and more, made by the installed verl."""
        roles = ["engine"] if self.is_sft else list(_ROLES.values())
        switch = [each for role in roles for each in (f"{role}._target_={TARGET}", f"+{role}.backend={backend}")]
        with _installed():
            return compose(self.config_name, overrides=[*self.overrides, *switch, *more])


def megatron_scripts(sources: Path, commands: Sequence[Command]) -> tuple[list[MegatronScript], dict[str, str]]:
    """Commands whose roles are Megatron's, and what hydra says to others that name Megatron.

    The release's own yaml must compose them. Where the installed verl has lost a field since, its override is left out.
    """
    found, broken = [], {}
    for command in commands:
        name = "sft_trainer_engine" if "sft_trainer" in command.trainer else "ppo_trainer"
        overrides = []
        for each in command.overrides:
            if each.startswith("--config-name="):
                name = each.removeprefix("--config-name=").removesuffix(".yaml")
            elif not each.startswith("--"):
                overrides.append(each)
        try:
            with _release(sources):
                config = compose(name, overrides=overrides)
        except HydraException as error:
            if "megatron" in " ".join([name, *overrides]):
                broken[command.script] = str(error).splitlines()[0]
            continue
        if is_megatron(config):
            found.append(_composed(command, name, overrides))
    return found, broken


def is_megatron(config: DictConfig) -> bool:
    """Whether verl would build its Megatron engine for what is trained."""
    if "actor_rollout_ref" in config:
        return bool(config.actor_rollout_ref.actor.strategy == "megatron")
    return str(config.engine.get("_target_")).endswith("McoreEngineConfig")


def _composed(command: Command, name: str, overrides: Sequence[str]) -> MegatronScript:
    kept, left_out = list(overrides), []
    while True:
        try:
            with _installed():
                config = compose(name, overrides=kept)
        except HydraException as error:
            unknown = _UNKNOWN.search(str(error))
            if unknown is None:
                raise
            lost = [each for each in kept if each.partition("=")[0] == unknown[1]]
            left_out += lost
            kept = [each for each in kept if each not in lost]
            if not lost:
                raise
        else:
            return MegatronScript(command, name, tuple(kept), tuple(left_out), config)


def _installed() -> AbstractContextManager[Any]:
    return initialize_config_module("verl.trainer.config", version_base=None)


def _release(sources: Path) -> AbstractContextManager[Any]:
    return initialize_config_dir(str(sources.resolve() / "verl/trainer/config"), version_base=None)


def roles(config: DictConfig) -> Iterator[tuple[str, Callable[[], tuple[Any, ...]], str]]:
    """(name, maker of verl's four configurations, verl's model type) of each role that trains or scores."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass

    if "actor_rollout_ref" not in config:
        parts = (config.model, config.engine, config.optim, config.checkpoint)
        yield "sft", lambda: tuple(map(omega_conf_to_dataclass, parts)), "language_model"
        return
    names = ["actor", *(["ref"] if need_reference_policy(config) else [])]
    for name in names:
        yield name, partial(_actor_or_ref, config, name), "language_model"
    if need_critic(config):

        def critic() -> tuple[Any, ...]:
            made = omega_conf_to_dataclass(config.critic)
            return made.model, made.engine, made.optim, made.checkpoint

        yield "critic", critic, "value_model"


def _actor_or_ref(config: DictConfig, name: str) -> tuple[Any, ...]:
    from verl.utils.config import omega_conf_to_dataclass

    model = omega_conf_to_dataclass(config.actor_rollout_ref.model)
    part = copy.deepcopy(config.actor_rollout_ref)[name]
    OmegaConf.resolve(part)
    with open_dict(part):
        if name == "ref":
            # As verl's worker does before it reads them.
            for old, new in (("_micro_batch_size_per_gpu", "_micro_batch_size_per_gpu"), ("_use_dynamic_bsz", "")):
                value = part.pop(f"log_prob{old}", None)
                part["ppo_micro_batch_size_per_gpu" if new else "use_dynamic_bsz"] = value
            part.ppo_max_token_len_per_gpu = part.pop("log_prob_max_token_len_per_gpu", None)
            part.ppo_micro_batch_size = part.pop("log_prob_micro_batch_size", None)
            part.ppo_mini_batch_size = config.actor_rollout_ref.actor.ppo_mini_batch_size
            from verl.workers.config import MtpConfig

            model.mtp = MtpConfig(enable=False)
    made = omega_conf_to_dataclass(part)
    return model, made.engine, made.optim, made.checkpoint


def refusal(config: DictConfig) -> str | None:
    """What our engine refuses of a switched configuration; None where every role is accepted."""
    from adapters.verl.options.settings import engine_settings
    from adapters.verl.run_config import require_run
    from rl_backend.contracts import RLBackendError

    try:
        if "actor_rollout_ref" in config:
            require_run(config)
        for _name, make, model_type in roles(config):
            engine_settings(*make(), model_type=model_type)
    except RLBackendError as error:
        return str(error)
    except HydraException as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
            if isinstance(cause, RLBackendError):
                return str(cause)
        raise
    return None
