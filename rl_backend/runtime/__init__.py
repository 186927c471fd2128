"""Runtimes: the atomic operations of distributed training behind one interface."""

from rl_backend.runtime.interface import RankPlace, RouterReplay, Runtime
from rl_backend.runtime.registry import check_config, check_weights, create_runtime, register_runtime

__all__ = ["RankPlace", "RouterReplay", "Runtime", "check_config", "check_weights", "create_runtime", "register_runtime"]
