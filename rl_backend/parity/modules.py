"""Modules whose outputs every side must have."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from rl_backend.contracts import ConfigError


def required_modules(hf_config: Mapping[str, Any], stored_names: Collection[str]) -> tuple[str, ...]:
    """Paths of the layers and of the modules beside their list that have weights: the embedding and the last norm.

    The list is where the stored names are numbered, ``model.layers`` in ``model.layers.0.mlp.up_proj.weight``.

    Args:
        hf_config: ``config.json``, whose ``num_hidden_layers`` counts the layers.
        stored_names: of the tensors in the checkpoint.

    Raises:
        ConfigError: ``num_hidden_layers`` is no positive whole number, or the checkpoint has not as many layers.
    """
    count = hf_config.get("text_config", hf_config).get("num_hidden_layers")
    if not isinstance(count, int) or count < 1:
        raise ConfigError.of("config.json num_hidden_layers", count, "expected a whole number of at least 1")
    numbered = [match for name in stored_names if (match := re.match(r"(.+?)\.(\d+)\.", name))]
    lists = dict.fromkeys(match[1] for match in numbered if int(match[2]) == count - 1)
    if not lists:
        raise ConfigError.of("config.json num_hidden_layers", count, f"the checkpoint has no layer {count - 1}")
    parents = {path.rpartition(".")[0] for path in lists}
    modules = dict.fromkeys(name.rpartition(".")[0] for name in stored_names)
    beside = [module for module in modules if module.rpartition(".")[0] in parents]
    return (*beside, *(f"{path}.{index}" for path in lists for index in range(count)))
