"""Parameters that are computed with in float32 in a model of another dtype."""

from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
from torch import nn


class KeptInFloat32(nn.Module):
    """A module whose parameters keep their float32 where those of the rest of a model are rounded.

    The native runtime looks for this type: FSDP gathers such a module by itself and unrounded, and a model that is not
    trained has it in float32.
    """


class EndsInFloat32(nn.Module):
    """A model whose own parameters, those outside its layers, may keep their float32 where those of layers are rounded.

    The native runtime looks for this type as it does for :class:`KeptInFloat32`. Exports round these parameters as they do
    all others.

    Attributes:
        end_names: attributes that are modules outside the layers; each may be None.
        layer_dtype: dtype of what goes into layers; None where the whole model is computed in one dtype.
    """

    end_names: ClassVar[tuple[str, ...]] = ()
    layer_dtype: torch.dtype | None = None

    def ends(self) -> Iterator[nn.Module]:
        """The modules outside the layers."""
        yield from (module for name in self.end_names if (module := getattr(self, name)) is not None)


def kept_ends(module: nn.Module) -> Sequence[nn.Module]:
    """The ends of a model that are computed with in float32; none where they are computed with as its layers are."""
    return list(module.ends()) if isinstance(module, EndsInFloat32) and module.layer_dtype is not None else []


def parameters_in_float32(module: nn.Module) -> frozenset[str]:
    """Names of the parameters of :class:`KeptInFloat32` in ``module``."""
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
