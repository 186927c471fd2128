"""The configuration class that replaces verl's ``McoreEngineConfig``, and the choice of an engine by a configuration.

Importing this module, as Hydra and unpickling do, registers the engines.
"""

import dataclasses
import importlib
import logging
import os
from dataclasses import dataclass, field
from typing import Any

from verl.workers.config import McoreEngineConfig

from adapters.verl.options.settings import require_engine_config
from adapters.verl.registration import VENDOR_VARIABLE, register_config_class
from adapters.verl.trainers import GROUPER, register_prefix_groups
from rl_backend.contracts import ConfigError, UnsupportedError

# verl's model type -> our class, and verl's.
_ENGINES = {"language_model": "LanguageModelEngine", "value_model": "ValueModelEngine"}
_VERLS_ENGINES = {"language_model": "MegatronEngineWithLMHead", "value_model": "MegatronEngineWithValueHead"}

logger = logging.getLogger(__name__)
# verl's root logger shows warnings only, and users look for the line that names the engine.
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))


@dataclass
class RLBackendEngineConfig(McoreEngineConfig):
    """verl's ``McoreEngineConfig`` with three more fields; ``dtype`` may also be ``float32``.

    Attributes:
        backend: ``native`` or ``bridge``.
        backend_options: fields of that runtime's configuration (:class:`~rl_backend.contracts.NativeConfig`,
            :class:`~rl_backend.contracts.BridgeConfig`) that no field of verl's decides.
        use_prefix_grouper: sequences that begin alike are computed as one, and micro-batches cut by what is computed. The
            actor's own field of this name sets it.
    """

    backend: str = "native"
    backend_options: dict[str, Any] = field(default_factory=dict)
    use_prefix_grouper: bool = False

    def __post_init__(self) -> None:
        dtype = self.dtype
        # verl's own check accepts two 16-bit types only.
        if dtype == "float32":
            object.__setattr__(self, "dtype", "bfloat16")
        super().__post_init__()
        object.__setattr__(self, "dtype", dtype)
        require_engine_config(self)


def choose_engine(model_type: str, engine_config: Any, backend: str | None) -> tuple[type, Any]:
    """The engine's class and the configuration that it takes.

    Args:
        backend: for verl's own configuration class; None builds verl's own engine from it.

    Raises:
        ConfigError: verl's own configuration class on a device that verl's Megatron engine does not have.
        UnsupportedError: verl's Megatron engine cannot be imported here.
    """
    if not isinstance(engine_config, RLBackendEngineConfig):
        if backend is None:
            return _verls_engine(model_type), engine_config
        values = {each.name: getattr(engine_config, each.name) for each in dataclasses.fields(engine_config)}
        grouper = getattr(engine_config, GROUPER, False)
        engine_config = RLBackendEngineConfig(**values, backend=backend, use_prefix_grouper=grouper)
        reason = f"{VENDOR_VARIABLE}={os.getenv(VENDOR_VARIABLE)}"
    else:
        reason = "the configuration's class is RLBackendEngineConfig"
    engine: type = getattr(importlib.import_module("adapters.verl.engine"), _ENGINES[model_type])
    if _is_first_rank():
        logger.info("verl engine: rl_backend's %s, backend %s, because %s", engine.__name__, engine_config.backend, reason)
    return engine, engine_config


def _verls_engine(model_type: str) -> type:
    from verl.utils.device import get_device_name

    if get_device_name() != "cuda":
        raise ConfigError.of(
            "engine_config",
            "McoreEngineConfig",
            f"verl's Megatron engine does not run on {get_device_name()}; set _target_ of this role to "
            "adapters.verl.engine_config.RLBackendEngineConfig",
        )
    engine: type | None = getattr(importlib.import_module("verl.workers.engine"), _VERLS_ENGINES[model_type], None)
    if engine is None:
        # verl sets the name to None where the import fails, and only warns.
        raise UnsupportedError(f"verl's {_VERLS_ENGINES[model_type]} cannot be imported here; verl's warning has the cause")
    if _is_first_rank():
        logger.info("verl engine: verl's own %s, because the configuration's class is verl's", engine.__name__)
    return engine


def _is_first_rank() -> bool:
    import torch.distributed as dist

    return not dist.is_initialized() or dist.get_rank() == 0


register_config_class()
register_prefix_groups()
