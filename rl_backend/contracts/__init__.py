"""What crosses a boundary: configurations, batches, losses, results, handles, errors and weight manifests."""

from rl_backend.contracts.base_config import BaseConfig
from rl_backend.contracts.batch import PackedBatch, TokenSequence
from rl_backend.contracts.errors import (
    BatchError,
    CheckpointError,
    ClusterLostError,
    ConfigError,
    EngineDeadError,
    EngineDirtyError,
    ExportInterruptedError,
    GroupFailedError,
    HandleError,
    OperationOrderError,
    ParityError,
    RegistryError,
    RLBackendError,
    RolloutError,
    RunFolderError,
    ScheduleError,
    UnsupportedError,
    WeightCheckError,
    WeightSyncError,
    WeightVersionError,
)
from rl_backend.contracts.handle import ModelHandle
from rl_backend.contracts.head import VALUE_HEAD_WEIGHTS, Head
from rl_backend.contracts.loss import LossFn, Metric, MetricValue, ModelOutput
from rl_backend.contracts.optimizer_config import OptimizerConfig
from rl_backend.contracts.parallel_config import ParallelConfig
from rl_backend.contracts.registry import Registry
from rl_backend.contracts.result import ForwardResult, PendingStepResult, StepResult, merge_metrics
from rl_backend.contracts.routed_experts import RoutedLayers, check_routes, route_dtype, route_fields
from rl_backend.contracts.runtime_config import (
    BACKEND_CONFIGS,
    MODEL_CONFIGS,
    BackendConfig,
    ModelOptions,
    NativeConfig,
    RuntimeConfig,
)
from rl_backend.contracts.weight_names import PackedWeight, WeightName, stored_names, stored_tensors
from rl_backend.contracts.weights import UNVERSIONED, TensorInfo, WeightManifest, WeightShard

__all__ = [
    "BACKEND_CONFIGS",
    "MODEL_CONFIGS",
    "UNVERSIONED",
    "VALUE_HEAD_WEIGHTS",
    "BackendConfig",
    "BaseConfig",
    "BatchError",
    "CheckpointError",
    "ClusterLostError",
    "ConfigError",
    "EngineDeadError",
    "EngineDirtyError",
    "ExportInterruptedError",
    "ForwardResult",
    "GroupFailedError",
    "HandleError",
    "Head",
    "LossFn",
    "Metric",
    "MetricValue",
    "ModelHandle",
    "ModelOptions",
    "ModelOutput",
    "NativeConfig",
    "OperationOrderError",
    "OptimizerConfig",
    "PackedBatch",
    "PackedWeight",
    "ParallelConfig",
    "ParityError",
    "PendingStepResult",
    "RLBackendError",
    "Registry",
    "RegistryError",
    "RolloutError",
    "RunFolderError",
    "RoutedLayers",
    "RuntimeConfig",
    "ScheduleError",
    "StepResult",
    "TensorInfo",
    "TokenSequence",
    "UnsupportedError",
    "WeightCheckError",
    "WeightManifest",
    "WeightName",
    "WeightShard",
    "WeightSyncError",
    "WeightVersionError",
    "check_routes",
    "merge_metrics",
    "route_dtype",
    "route_fields",
    "stored_names",
    "stored_tensors",
]
