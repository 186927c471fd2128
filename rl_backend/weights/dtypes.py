"""torch dtypes and the names they have in a manifest."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_backend.contracts import TensorInfo, UnsupportedError


def name_of_dtype(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def dtype_from_name(name: str) -> torch.dtype:
    """``"bfloat16"`` -> ``torch.bfloat16``; raises :class:`~rl_backend.contracts.UnsupportedError` for any other name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedError(f"dtype {name!r} is not a torch dtype; expected a name such as 'float32' or 'bfloat16'")
    return dtype


def tensor_info(name: str, tensor: Tensor) -> TensorInfo:
    """Name, shape, dtype and bytes of a full tensor; no offset, no digest."""
    return TensorInfo(name=name, shape=tuple(tensor.shape), dtype=name_of_dtype(tensor.dtype), nbytes=tensor.nbytes)
