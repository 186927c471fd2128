"""Dense Qwen3."""

from __future__ import annotations

from torch import nn

from rl_backend.model.qwen3.config import Qwen3Architecture, Qwen3Options, parse_config
from rl_backend.model.qwen3.model import Qwen3
from rl_backend.model.qwen3.parallelize import parallelize
from rl_backend.model.qwen3.weights import weight_names
from rl_backend.model.registry import BuildSettings, ModelFamily, register_model

__all__ = ["QWEN3", "Qwen3", "Qwen3Architecture", "Qwen3Options", "parse_config"]


def _build(arch: Qwen3Architecture, settings: BuildSettings) -> nn.Module:
    return Qwen3(arch, settings.head, settings.log_prob_chunk_tokens)


QWEN3 = ModelFamily(
    name="qwen3",
    hf_model_types=("qwen3",),
    options_type=Qwen3Options,
    parse_config=parse_config,
    build=_build,
    parallelize=parallelize,
    weight_names=weight_names,
    heads=("log_probs", "values"),
)
register_model(QWEN3)
