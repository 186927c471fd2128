"""What a model is, read from its directory and the configuration, before anything is built."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rl_backend.checkpoint.hf_reader import read_hf_config
from rl_backend.contracts import Head, NativeConfig, WeightName
from rl_backend.model import BuildSettings, ModelFamily, find_model


class ModelDescription(NamedTuple):
    """A model of a family.

    Attributes:
        family: that of the configuration, or the one that claims the directory.
        architecture: the family's own description.
        hf_config: ``config.json``.
        settings: how to build all of it.
    """

    family: ModelFamily
    architecture: Any
    hf_config: Mapping[str, Any]
    settings: BuildSettings

    @property
    def weight_names(self) -> Mapping[str, WeightName]:
        return self.family.weight_names(self.architecture, self.settings.head)


def describe_model(hf_path: Path | str, native: NativeConfig, head: Head) -> ModelDescription:
    """Reads ``config.json`` alone.

    Raises:
        CheckpointError: no directory with a ``config.json``.
        UnsupportedError: the model family, a head that it does not have, or a feature that its configuration asks for.
    """
    hf_config = read_hf_config(hf_path)
    family = find_model(native.model, hf_config)
    family.require_head(head)
    options = native.model_cfg if native.model_cfg is not None else family.options_type()
    settings = BuildSettings(options, head, native.log_prob_chunk_tokens)
    return ModelDescription(family, family.parse_config(hf_config), hf_config, settings)
