"""What a model of another dtype computes in float32: sums, and some parameters."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which numbers of ``dtype`` are added up: float32 or better."""
    # ``torch.promote_types`` is an operation to the host.
    return torch.float64 if dtype == torch.float64 else torch.float32


def widened(x: Tensor) -> Tensor:
    """``x`` in its :func:`wide_dtype`."""
    return x.to(wide_dtype(x.dtype))


class KeptInFloat32(nn.Module):
    """A module whose parameters keep their float32 where those of the rest of a model are rounded. FSDP gathers it by
    itself.
    """


@runtime_checkable
class EndsInFloat32(Protocol):
    """A model whose own parameters, those outside its layers, may keep their float32 where those of layers are rounded."""

    def ends_in_float32(self) -> Sequence[nn.Module]:
        """Modules outside the layers that compute in float32; none where they compute in the dtype of the layers."""


def kept_ends(module: nn.Module) -> Sequence[nn.Module]:
    return module.ends_in_float32() if isinstance(module, EndsInFloat32) else ()


def parameters_in_float32(module: nn.Module) -> frozenset[str]:
    parts = [(path, part) for path, part in module.named_modules() if isinstance(part, KeptInFloat32)]
    return frozenset(f"{path}.{name}".removeprefix(".") for path, part in parts for name, _ in part.named_parameters())


def round_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    """Rounds parameters to ``dtype`` in place, all but those of :class:`KeptInFloat32` and of ends that keep theirs."""
    module.to(dtype)
    for end in kept_ends(module):
        end.to(torch.float32)
    for part in module.modules():
        if isinstance(part, KeptInFloat32):
            part.to(torch.float32)
