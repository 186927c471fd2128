"""Parameters that are computed with in float32 in a model of another dtype."""

import torch
from torch import nn


class KeptInFloat32(nn.Module):
    """A module whose parameters keep their float32 where those of the rest of a model are rounded.

    The native runtime looks for this type: FSDP gathers such a module by itself and unrounded, and a model that is not
    trained has it in float32.
    """


def parameters_in_float32(module: nn.Module) -> frozenset[str]:
    """Names of the parameters of :class:`KeptInFloat32` in ``module``."""
    parts = [(path, part) for path, part in module.named_modules() if isinstance(part, KeptInFloat32)]
    return frozenset(f"{path}.{name}".removeprefix(".") for path, part in parts for name, _ in part.named_parameters())


def round_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    """Rounds parameters to ``dtype`` in place, all but those of :class:`KeptInFloat32`."""
    module.to(dtype)
    for part in module.modules():
        if isinstance(part, KeptInFloat32):
            part.to(torch.float32)
