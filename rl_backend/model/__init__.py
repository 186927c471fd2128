"""Model families. Importing this package registers the built-in ones."""

from rl_backend.model.qwen3 import QWEN3
from rl_backend.model.registry import MODEL_FAMILIES, BuildSettings, ModelFamily, ModelInput, find_model, register_model

__all__ = ["MODEL_FAMILIES", "QWEN3", "BuildSettings", "ModelFamily", "ModelInput", "find_model", "register_model"]
