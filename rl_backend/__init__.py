"""A training backend for RL on language models: the atomic operations of distributed training behind one interface.

What is listed in ``__all__`` is the public interface. Names are imported when they are first used, so that
``import rl_backend`` (and ``rl-backend doctor`` on a machine where something is broken) needs nothing else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from rl_backend.contracts import (
        LORA_FIELD,
        AdamParams,
        BackendConfig,
        ForwardResult,
        Head,
        LoRAConfig,
        LoRAInfo,
        LossFn,
        Metric,
        ModelHandle,
        ModelOptions,
        ModelOutput,
        NativeConfig,
        OptimizerConfig,
        PackedBatch,
        PackedWeight,
        ParallelConfig,
        RLBackendError,
        RuntimeConfig,
        StepResult,
        TensorInfo,
        TokenSequence,
        WeightManifest,
        WeightShard,
    )
    from rl_backend.model import BuildSettings, ModelFamily, ModelInput, register_model
    from rl_backend.runtime import RankPlace, Runtime, check_config, create_runtime, register_runtime

__all__ = [
    "LORA_FIELD",
    "AdamParams",
    "BackendConfig",
    "BuildSettings",
    "ForwardResult",
    "Head",
    "LoRAConfig",
    "LoRAInfo",
    "LossFn",
    "Metric",
    "ModelFamily",
    "ModelHandle",
    "ModelInput",
    "ModelOptions",
    "ModelOutput",
    "NativeConfig",
    "OptimizerConfig",
    "PackedBatch",
    "PackedWeight",
    "ParallelConfig",
    "RLBackendError",
    "RankPlace",
    "Runtime",
    "RuntimeConfig",
    "StepResult",
    "TensorInfo",
    "TokenSequence",
    "WeightManifest",
    "WeightShard",
    "check_config",
    "create_runtime",
    "register_model",
    "register_runtime",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        # Contracts first: a name of theirs needs neither models nor runtimes.
        for room in ("contracts", "model", "runtime"):
            module = importlib.import_module(f"rl_backend.{room}")
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
