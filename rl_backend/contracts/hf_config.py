"""Facts of a Hugging Face ``config.json`` that are read of a model of any family."""

from collections.abc import Mapping
from typing import Any


def text_config(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What ``config.json`` says about the language model: ``text_config`` of a model that has other parts too, else all.

    Sizes are there (``vocab_size``, ``hidden_size``, ``num_hidden_layers``), ``model_type`` and ``architectures`` of the
    directory are not.
    """
    nested = hf_config.get("text_config")
    return nested if isinstance(nested, Mapping) else hf_config
