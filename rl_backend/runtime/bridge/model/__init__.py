"""Megatron-Bridge's models: made from a Hugging Face directory, converted, adapted."""

from rl_backend.runtime.bridge.installed import import_megatron

import_megatron()  # in its own order, before any module here names a part of it
