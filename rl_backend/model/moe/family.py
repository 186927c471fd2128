"""A model family that is a decoder with mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from rl_backend.contracts import RoutedLayers
from rl_backend.model.dense.family import STAGE_COPIES, max_length, num_layers
from rl_backend.model.moe.architecture import MoEArchitecture, MoEOptions
from rl_backend.model.moe.layout import check_layout
from rl_backend.model.moe.model import MoEDecoder
from rl_backend.model.moe.parallelize import parallelize
from rl_backend.model.moe.weights import ExpertNames, weight_names
from rl_backend.model.registry import BuildSettings, ModelFamily
from rl_backend.primitive.router import RouterLossCoefficients


def moe_family(name: str, parse_config: Callable[[Mapping[str, Any]], MoEArchitecture], experts: ExpertNames) -> ModelFamily:
    """The family of the ``model_type`` called ``name``, whose differences are in its architecture and its names."""
    return ModelFamily(
        name=name,
        hf_model_types=(name,),
        options_type=MoEOptions,
        parse_config=parse_config,
        build=_build,
        parallelize=parallelize,
        weight_names=partial(weight_names, experts=experts),
        heads=("log_probs", "values"),
        max_length=max_length,
        num_layers=num_layers,
        stage_copies=STAGE_COPIES,
        check_layout=check_layout,
        routed_layers=_routed_layers,
    )


def _routed_layers(arch: MoEArchitecture) -> RoutedLayers:
    return RoutedLayers(arch.router.num_experts, arch.router.top_k, arch.sparse)


def _build(arch: MoEArchitecture, settings: BuildSettings) -> nn.Module:
    options = settings.options
    assert isinstance(options, MoEOptions), "the registry checks the type of model_cfg"
    coefficients = RouterLossCoefficients(options.router_aux_loss_coef, options.router_z_loss_coef)
    return MoEDecoder(arch, settings.head, settings.log_prob_chunk_tokens, coefficients, settings.stage)
