"""What the kernels of flash-linear-attention are given, which only CUDA has: a stand-in computes the rule here."""

from __future__ import annotations

import importlib.machinery
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_backend.primitive.gated_delta import fla_gated_delta_rule, gated_delta_rule, has_fla, l2_normalised

LENGTHS, KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM = (3, 70, 1), 2, 6, 4, 5


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the kernel has been called with."""
    seen: dict[str, Any] = {}

    def chunk_gated_delta_rule(
        query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, *, scale: float, cu_seqlens: Tensor
    ) -> tuple[Tensor, None]:
        seen.update(query=query, key=key, value=value, decay=decay, beta=beta, scale=scale, cu_seqlens=cu_seqlens)
        q, k, v, g, b = (each[0] for each in (scale * query, key, value, decay, beta))
        return gated_delta_rule(q, k, v, g, b, cu_seqlens.diff().tolist()).to(value.dtype)[None], None

    for name in ("fla", "fla.ops", "fla.ops.gated_delta_rule"):
        module = ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    vars(sys.modules["fla.ops.gated_delta_rule"])["chunk_gated_delta_rule"] = chunk_gated_delta_rule
    return seen


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_kernels_get_a_batch_of_one_with_a_key_for_every_value(
    given: dict[str, Any], dtype: torch.dtype, tolerance: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    total = sum(LENGTHS)

    def random(*shape: int) -> Tensor:
        return torch.randn(total, *shape, generator=generator)

    query, key = (l2_normalised(random(KEY_HEADS, KEY_DIM)) for _ in range(2))
    value, decay, beta = random(HEADS, VALUE_DIM), -random(HEADS).sigmoid(), random(HEADS).sigmoid()
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    found = fla_gated_delta_rule(query, key, value.to(dtype), decay, beta, cu_seqlens)
    assert found.dtype == dtype and found.shape == (total, HEADS, VALUE_DIM)
    torch.testing.assert_close(
        found.float(), gated_delta_rule(query, key, value, decay, beta, LENGTHS), atol=tolerance, rtol=tolerance
    )
    assert given["query"].shape == given["key"].shape == (1, total, HEADS, KEY_DIM)
    assert given["query"].dtype == given["key"].dtype == given["value"].dtype == dtype
    assert given["decay"].dtype == given["beta"].dtype == torch.float32, "decays are not rounded"
    assert all(given[name].is_contiguous() for name in ("query", "key", "value", "decay", "beta"))
    assert given["scale"] == 1.0 and given["cu_seqlens"].dtype == torch.int64


@pytest.mark.usefixtures("given")
def test_kernels_are_there_where_their_package_is() -> None:
    assert has_fla()


def test_kernels_are_not_there_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "fla" else 1)
    assert not has_fla()
