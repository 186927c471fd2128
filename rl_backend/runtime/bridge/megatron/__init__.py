"""Megatron on this machine: process groups, layers without Transformer Engine, calls of CUDA on a CPU."""

from rl_backend.runtime.bridge.installed import import_megatron

import_megatron()  # in its own order, before any module here names a part of it
