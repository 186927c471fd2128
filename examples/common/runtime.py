"""The runtime that an example trains with."""

from __future__ import annotations

from typing import Any, Literal

from examples.common.cluster import resolve_dtype
from rl_backend import OptimizerConfig, RuntimeConfig
from rl_backend.contracts import BACKEND_CONFIGS, ConfigError
from rl_backend.contracts.runtime_config import import_plugins


def plugin_names(plugins: str) -> tuple[str, ...]:
    """``"a, b"`` -> ``("a", "b")``."""
    return tuple(name for part in plugins.split(",") if (name := part.strip()))


def require_backend(plugins: str, backend: str) -> None:
    """Imports plugins and finds the runtime, before anything is started.

    Raises:
        ConfigError: a plugin that cannot be imported.
        RegistryError: an unknown runtime.
    """
    import_plugins(plugin_names(plugins))
    BACKEND_CONFIGS.get(backend)


def make_runtime_config(
    *,
    model: str,
    backend: str,
    plugins: str,
    seed: int,
    max_tokens_per_micro_batch: int,
    dtype: Literal["auto", "float32", "bfloat16"],
    optimizer: OptimizerConfig,
) -> RuntimeConfig:
    """Needs Ray, which knows the GPUs. A runtime without ``param_dtype`` in its options keeps to its own dtype.

    Raises:
        ConfigError: a dtype is asked of a runtime that has no choice.
    """
    options: dict[str, Any] = {"optimizer": optimizer}
    if "param_dtype" in BACKEND_CONFIGS.get(backend).model_fields:
        options["param_dtype"] = resolve_dtype(dtype)
    elif dtype != "auto":
        raise ConfigError.of("dtype", dtype, f"runtime {backend!r} has no param_dtype; use auto")
    return RuntimeConfig(
        plugins=plugin_names(plugins),
        backend=backend,
        hf_path=model,
        seed=seed,
        max_tokens_per_micro_batch=max_tokens_per_micro_batch,
        backend_cfg=options,
    )
