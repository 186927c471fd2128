"""Llama 1 to 3."""

from rl_backend.model.dense import dense_family
from rl_backend.model.llama.config import parse_config
from rl_backend.model.registry import register_model

LLAMA = dense_family("llama", parse_config)
register_model(LLAMA)
