"""The native runtime: PyTorch alone, in every layout of ``ParallelConfig``."""

from rl_backend.runtime.native.handle import NativeHandle as NativeHandle
from rl_backend.runtime.native.runtime import NativeRuntime as NativeRuntime
