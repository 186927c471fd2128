"""Dense Qwen3."""

from rl_backend.model.dense import dense_family
from rl_backend.model.qwen3.config import parse_config
from rl_backend.model.registry import register_model

QWEN3 = dense_family("qwen3", parse_config)
register_model(QWEN3)
