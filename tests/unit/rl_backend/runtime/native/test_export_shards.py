"""Shares of weights are in the dtype asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.native import open_runtime


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_shares_are_the_weights_in_the_dtype_asked_for(untied_model: Path, dtype: torch.dtype | None) -> None:
    with open_runtime(untied_model) as runtime:
        handle = runtime.build_model()
        held = {name: tensor.clone() for name, tensor in runtime.export_weights(handle)}
        shares = {share.name: share.tensor for share in runtime.export_shards(handle, dtype=dtype)}
    assert shares.keys() == held.keys()
    for name, tensor in shares.items():
        assert tensor.dtype == (dtype or torch.float32)
        assert torch.equal(tensor, held[name].to(tensor.dtype)), name
