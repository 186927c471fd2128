"""Model families. Importing this package registers the built-in ones."""

from rl_backend.model.llama import LLAMA
from rl_backend.model.mistral import MISTRAL
from rl_backend.model.mixtral import MIXTRAL
from rl_backend.model.qwen2 import QWEN2
from rl_backend.model.qwen3 import QWEN3
from rl_backend.model.qwen3_moe import QWEN3_MOE
from rl_backend.model.registry import (
    MODEL_FAMILIES,
    BuildSettings,
    ModelFamily,
    ModelInput,
    ModelStage,
    find_model,
    register_model,
)

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
