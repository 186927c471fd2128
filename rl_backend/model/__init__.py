"""Models by kind of block. Importing this package registers the built-in families."""

from rl_backend.model.families import LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE
from rl_backend.model.input import BuildSettings, ModelInput, ModelStage
from rl_backend.model.registry import MODEL_FAMILIES, ModelFamily, find_model, register_model

__all__ = [
    "LLAMA",
    "MISTRAL",
    "MIXTRAL",
    "MODEL_FAMILIES",
    "QWEN2",
    "QWEN3",
    "QWEN3_MOE",
    "BuildSettings",
    "ModelFamily",
    "ModelInput",
    "ModelStage",
    "find_model",
    "register_model",
]
