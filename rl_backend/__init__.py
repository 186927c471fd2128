"""A training backend for RL on language models: the atomic operations of distributed training behind one interface.

What is imported here is the public interface. Names are imported when they are first used, so that
``import rl_backend`` (and ``rl-backend doctor`` on a machine where something is broken) needs nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_backend.lazy import lazy_names

__version__ = "0.1.0"

if TYPE_CHECKING:
    from rl_backend.contracts import LORA_FIELD as LORA_FIELD
    from rl_backend.contracts import AdamParams as AdamParams
    from rl_backend.contracts import BackendConfig as BackendConfig
    from rl_backend.contracts import ForwardResult as ForwardResult
    from rl_backend.contracts import Head as Head
    from rl_backend.contracts import LoRAConfig as LoRAConfig
    from rl_backend.contracts import LoRAInfo as LoRAInfo
    from rl_backend.contracts import LossFn as LossFn
    from rl_backend.contracts import Metric as Metric
    from rl_backend.contracts import ModelHandle as ModelHandle
    from rl_backend.contracts import ModelOptions as ModelOptions
    from rl_backend.contracts import ModelOutput as ModelOutput
    from rl_backend.contracts import NativeConfig as NativeConfig
    from rl_backend.contracts import OptimizerConfig as OptimizerConfig
    from rl_backend.contracts import PackedBatch as PackedBatch
    from rl_backend.contracts import PackedWeight as PackedWeight
    from rl_backend.contracts import ParallelConfig as ParallelConfig
    from rl_backend.contracts import RLBackendError as RLBackendError
    from rl_backend.contracts import RuntimeConfig as RuntimeConfig
    from rl_backend.contracts import StepResult as StepResult
    from rl_backend.contracts import TensorInfo as TensorInfo
    from rl_backend.contracts import TokenSequence as TokenSequence
    from rl_backend.contracts import WeightManifest as WeightManifest
    from rl_backend.contracts import WeightShard as WeightShard
    from rl_backend.model import BuildSettings as BuildSettings
    from rl_backend.model import ModelFamily as ModelFamily
    from rl_backend.model import ModelInput as ModelInput
    from rl_backend.model import register_model as register_model
    from rl_backend.runtime import RankPlace as RankPlace
    from rl_backend.runtime import Runtime as Runtime
    from rl_backend.runtime import check_config as check_config
    from rl_backend.runtime import create_runtime as create_runtime
    from rl_backend.runtime import register_runtime as register_runtime

__all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
