"""Qwen2 and Qwen2.5."""

from rl_backend.model.dense import dense_family
from rl_backend.model.qwen2.config import parse_config
from rl_backend.model.registry import register_model

QWEN2 = dense_family("qwen2", parse_config)
register_model(QWEN2)
