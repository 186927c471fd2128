"""The class to name as ``_target_`` where verl has ``McoreEngineConfig``.

``actor_rollout_ref.actor.megatron._target_=adapters.verl.engine_config.RLBackendEngineConfig`` makes verl run that role on
:mod:`adapters.verl.engine`. Importing this module, as Hydra and unpickling do, registers the engines.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from verl.workers.config import McoreEngineConfig

from adapters.verl.registration import register_config_class
from adapters.verl.settings import require_engine_config


@dataclass
class RLBackendEngineConfig(McoreEngineConfig):
    """verl's ``McoreEngineConfig`` and what it has no field for; ``dtype`` may also be ``float32``.

    Attributes:
        backend: ``native`` or ``bridge``.
        backend_options: fields of that runtime's configuration (:class:`~rl_backend.contracts.NativeConfig`,
            :class:`~rl_backend.contracts.BridgeConfig`) that no field of verl's decides.

    Raises:
        ConfigError: a value that cannot be honoured.
    """

    backend: str = "native"
    backend_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        dtype = self.dtype
        # verl's own check knows two 16-bit types only.
        if dtype == "float32":
            object.__setattr__(self, "dtype", "bfloat16")
        super().__post_init__()
        object.__setattr__(self, "dtype", dtype)
        require_engine_config(self)


register_config_class()
