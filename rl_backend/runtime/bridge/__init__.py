"""The ``bridge`` runtime: Megatron-Core through Megatron-Bridge."""

from rl_backend.runtime.bridge.installed import import_megatron

import_megatron()

from rl_backend.runtime.bridge.runtime import BridgeRuntime  # noqa: E402 - Megatron is imported first, in its own order

__all__ = ["BridgeRuntime"]
