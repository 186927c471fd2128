"""Whether a run's prompts, or its examples, and its reward functions can be read."""

from __future__ import annotations

from actors.run.collect import load_inputs
from actors.run.config import TrainingConfig
from actors.run.rl_config import RLConfig


def find_data(config: TrainingConfig) -> str:
    """Reads all data that the run reads, as it reads them.

    Raises:
        ConfigError, BatchError: data or reward functions that cannot be used.
    """
    if not isinstance(config, RLConfig):
        return config.read_data()
    inputs = load_inputs(config)
    held_out = "".join(f", {len(each.prompts)} held out in {each.name}" for each in inputs.held_out)
    return f"{len(inputs.prompts)} prompts{held_out}, reward {config.reward}"
