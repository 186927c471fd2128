"""The engine of the bridge runtime, and its models."""

from rl_backend.runtime.bridge.installed import import_megatron

import_megatron()  # in its own order, before any module here names a part of it
