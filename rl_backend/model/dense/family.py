"""A model family that is a dense decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from rl_backend.model.dense.architecture import DenseArchitecture, DenseOptions
from rl_backend.model.dense.layout import check_layout
from rl_backend.model.dense.model import DenseDecoder
from rl_backend.model.dense.parallelize import parallelize
from rl_backend.model.dense.weights import weight_names
from rl_backend.model.registry import BuildSettings, ModelFamily

STAGE_COPIES = {"tied_head.weight": "embed_tokens.weight"}
"""See :attr:`~rl_backend.model.ModelFamily.stage_copies`."""


def dense_family(name: str, parse_config: Callable[[Mapping[str, Any]], DenseArchitecture]) -> ModelFamily:
    """The family of the ``model_type`` called ``name``, all of whose differences are in its architecture."""
    return ModelFamily(
        name=name,
        hf_model_types=(name,),
        options_type=DenseOptions,
        parse_config=parse_config,
        build=_build,
        parallelize=parallelize,
        weight_names=weight_names,
        heads=("log_probs", "values"),
        max_length=max_length,
        num_layers=num_layers,
        stage_copies=STAGE_COPIES,
        check_layout=check_layout,
    )


def _build(arch: DenseArchitecture, settings: BuildSettings) -> nn.Module:
    return DenseDecoder(arch, settings.head, settings.log_prob_chunk_tokens, settings.stage)


def max_length(arch: DenseArchitecture) -> int:
    """Longest sequence, in tokens."""
    return arch.max_length


def num_layers(arch: DenseArchitecture) -> int:
    """Layers of the whole model."""
    return arch.num_layers
