"""Mistral 7B and Nemo."""

from rl_backend.model.dense import dense_family
from rl_backend.model.mistral.config import parse_config
from rl_backend.model.registry import register_model

MISTRAL = dense_family("mistral", parse_config)
register_model(MISTRAL)
