"""Records of the two sides of a comparison that are made by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from rl_backend.lab.parity.compare import Comparison, SideRecord, Tolerances, compare

TOLERANCES = Tolerances.of("float32")
MODULES = ("embed", "layer.0", "layer.1")


def values(seed: int, *shape: int) -> Tensor:
    """Numbers of a seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def record(**changes: Any) -> SideRecord:
    """Of two steps; Adam's first step moves every element by 1e-3."""
    loaded = {"a": values(1, 3, 5), "b": values(2, 7)}
    gradients = {"a": values(3, 3, 5), "b": values(4, 7)}
    made = SideRecord(
        activations={
            "embed": values(5, 6, 4),
            "layer.0": values(6, 6, 4),
            "layer.0.mlp": values(7, 6, 4),
            "layer.1": values(8, 6, 4),
        },
        log_probs=values(9, 6),
        losses=[2.0, 1.5, 1.0],
        grad_norms=[4.0, 3.0, 2.0],
        loaded_weights=loaded,
        gradients=gradients,
        weights={name: value - 1e-3 * gradients[name].sign() for name, value in loaded.items()},
    )
    return dataclasses.replace(made, **changes)


def compared(candidate: SideRecord, reference: SideRecord | None = None) -> Comparison:
    """With :data:`SAME`, unless there is another reference."""
    return compare(reference or record(), candidate, TOLERANCES, MODULES)


def times(named: Any, name: str, factor: float) -> dict[str, Tensor]:
    """A copy with one tensor multiplied."""
    return {each: value * (factor if each == name else 1.0) for each, value in named.items()}


SAME = record()
