"""Runtimes: the atomic operations of distributed training behind one interface."""

from rl_backend.runtime.base import RouterReplay, Runtime
from rl_backend.runtime.registry import check_config, create_runtime, register_runtime

__all__ = ["RouterReplay", "Runtime", "check_config", "create_runtime", "register_runtime"]
