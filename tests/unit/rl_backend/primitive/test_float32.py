"""What keeps its float32 in a model of another dtype."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rl_backend.primitive.float32 import (
    KeptInFloat32,
    kept_ends,
    parameters_in_float32,
    round_parameters,
)


class Kept(KeptInFloat32):
    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.full((2,), 1.001))
        self.inner = nn.Linear(2, 2)


class Model(nn.Module):
    def __init__(self, layer_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.layer_dtype = layer_dtype
        self.first, self.last = nn.Linear(2, 3), nn.Linear(3, 2)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), Kept()), nn.Sequential(nn.Linear(2, 2), Kept())])

    def ends_in_float32(self) -> list[nn.Module]:
        return [] if self.layer_dtype is None else [self.first, self.last]


KEPT = {f"layers.{layer}.1.{name}" for layer in (0, 1) for name in ("values", "inner.weight", "inner.bias")}


def test_ends_are_asked_of_models_that_have_them() -> None:
    model = Model()
    assert list(kept_ends(model)) == []
    model.layer_dtype = torch.bfloat16
    assert list(kept_ends(model)) == [model.first, model.last]
    assert list(kept_ends(nn.Linear(2, 2))) == []


def test_parameters_of_kept_modules_are_named_as_in_the_whole_model() -> None:
    assert parameters_in_float32(Model()) == KEPT
    assert parameters_in_float32(Kept()) == {"values", "inner.weight", "inner.bias"}
    assert parameters_in_float32(nn.Linear(2, 2)) == frozenset()


@pytest.mark.parametrize("layer_dtype", [None, torch.bfloat16], ids=str)
def test_all_but_what_is_kept_is_rounded(layer_dtype: torch.dtype | None) -> None:
    model = Model(layer_dtype)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    round_parameters(model, torch.bfloat16)
    wide = {name for name, parameter in model.named_parameters() if parameter.dtype == torch.float32}
    ends = {f"{end}.{kind}" for end in ("first", "last") for kind in ("weight", "bias")}
    assert wide == KEPT | (ends if layer_dtype is not None else set())
    for name, parameter in model.named_parameters():
        # What is kept has been rounded on the way, or not at all: parameters are loaded afterwards.
        assert torch.equal(parameter.bfloat16(), before[name].bfloat16())
