"""Router replay in a run: which pass of the policy records the experts of tokens, and which are sent to them again."""

from __future__ import annotations

from typing import Literal

from rl_backend.checkpoint.hf_reader import read_hf_config
from rl_backend.contracts import ConfigError
from rl_backend.runtime import RouterReplay

type RouterReplayMode = Literal["off", "R2", "R3"]
"""``R2``: the pass for the old log-probs records routes, updates replay them. ``R3``: both replay vLLM's."""

OLD_POLICY: dict[RouterReplayMode, RouterReplay] = {"off": "off", "R2": "record", "R3": "replay"}
UPDATE: dict[RouterReplayMode, RouterReplay] = {"off": "off", "R2": "replay", "R3": "replay"}

_NUMBER_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def require_experts(option: str, mode: RouterReplayMode, model: str) -> None:
    """Refuses replay for a model whose ``config.json`` names no experts.

    Raises:
        ConfigError: a dense model.
    """
    if mode == "off":
        return
    config = read_hf_config(model)
    if not any(config.get(name) for name in _NUMBER_OF_EXPERTS):
        raise ConfigError.of(
            option,
            mode,
            f"{model} is a dense model (its config.json has none of {', '.join(_NUMBER_OF_EXPERTS)}); use off",
        )
