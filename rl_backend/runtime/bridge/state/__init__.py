"""Training state in Megatron: the optimizer, and rectangles of tensors for checkpoints."""

from rl_backend.runtime.bridge.installed import import_megatron

# Megatron is imported in its own order, before any module here names a part of it.
import_megatron()
