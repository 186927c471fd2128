"""Mixtral 8x7B and 8x22B."""

from rl_backend.model.mixtral.config import parse_config
from rl_backend.model.moe import ExpertNames, moe_family
from rl_backend.model.registry import register_model

MIXTRAL = moe_family("mixtral", parse_config, ExpertNames("block_sparse_moe", "w1", "w3", "w2"))
register_model(MIXTRAL)
