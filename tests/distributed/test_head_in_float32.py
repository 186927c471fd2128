"""A head in float32 over layers in bfloat16, in layouts of two ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.native import assert_near, micro_batches, open_runtime, token_loss
from tests.support.quiet import write_quiet
from tests.support.rank_pool import RankPool

ENDS = ("model.norm.weight", "lm_head.weight")


def ends_job(model: str, settings: Mapping[str, Any]) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Log-probs, on ranks that have them, and the gradients of norm and head."""
    with open_runtime(model, **settings) as runtime:
        handle = runtime.build_model()
        result = runtime.forward_backward(handle, micro_batches([range(4), range(4, 8)]), token_loss)
        gradients = {name: value.clone() for name, value in runtime.export_gradients(handle) if name in ENDS}
    return torch.cat(list(result.output("log_probs"))) if result.outputs else None, gradients


@pytest.mark.shows("native: head_in_float32 gives tp, cp and pp a head that rounds nothing too")
@pytest.mark.parametrize(
    ("layout", "tied"), [({"tp": 2}, False), ({"cp": 2}, False), ({"pp": 2}, True)], ids=["tp2", "cp2", "pp2 tied"]
)
def test_a_head_in_float32_rounds_nothing_in_a_layout(
    ranks: RankPool, tmp_path: Path, layout: dict[str, int], tied: bool
) -> None:
    model = str(write_quiet(tmp_path / "model", tied=tied))
    log_probs, gradients = ranks.run(ends_job, model, {}, world_size=1)[0]
    settings = {"param_dtype": "bfloat16", "head_in_float32": True, "parallel": layout}
    for found, of_ends in ranks.run(ends_job, model, settings, world_size=2):
        if found is not None:
            torch.testing.assert_close(found, log_probs, atol=1e-5, rtol=0)
        assert_near(of_ends, gradients)
