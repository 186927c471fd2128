"""The native runtime: PyTorch alone, FSDP2 data parallel."""

from rl_backend.runtime.native.handle import NativeHandle
from rl_backend.runtime.native.runtime import NativeRuntime

__all__ = ["NativeHandle", "NativeRuntime"]
