"""Qwen3 with mixtures of experts."""

from rl_backend.model.moe import ExpertNames, moe_family
from rl_backend.model.qwen3_moe.config import parse_config
from rl_backend.model.registry import register_model

QWEN3_MOE = moe_family("qwen3_moe", parse_config, ExpertNames())
register_model(QWEN3_MOE)
