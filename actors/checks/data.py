"""Checks that a run's prompts, examples and reward functions can be read."""

from __future__ import annotations

from collections.abc import Sequence

from actors.collect.held_out import HeldOutSet
from actors.collect.inputs import load_episode_inputs, load_inputs
from actors.options.sampled_config import EpisodeConfig, RLConfig, RunConfig


def find_data(config: RunConfig) -> str:
    """Reads all data that the run reads, as it reads them.

    Raises:
        ConfigError, BatchError: data or reward functions that cannot be used.
    """
    if isinstance(config, EpisodeConfig):
        episodes = load_episode_inputs(config)
        return f"{len(episodes.rows)} rows{_held_out(episodes.held_out)}, {config.task}"
    if not isinstance(config, RLConfig):
        return config.read_data()
    inputs = load_inputs(config)
    return f"{len(inputs.prompts)} prompts{_held_out(inputs.held_out)}, reward {config.reward}"


def _held_out(sets: Sequence[HeldOutSet]) -> str:
    return "".join(f", {len(each.prompts)} held out in {each.name}" for each in sets)
