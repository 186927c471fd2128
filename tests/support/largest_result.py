"""How large the largest tensor is that a piece of code makes."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LargestResult(TorchDispatchMode):
    """Bytes of the largest tensor that an operation has made."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view:
            self.nbytes = max(self.nbytes, result.untyped_storage().nbytes())
        # What an operation casts inside is not seen here: a sum in int64 makes its input so first.
        if func is torch.ops.aten.sum.dim_IntList or func is torch.ops.aten.sum.default:
            self.nbytes = max(self.nbytes, args[0].numel() * 8)
        return result
