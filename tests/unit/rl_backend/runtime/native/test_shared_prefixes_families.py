"""Every family trains with shared prefixes computed once as without."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest

from rl_backend.data import prefixes
from tests.support.deepseek import write_latent
from tests.support.matrix import sampled
from tests.support.models import write_tiny
from tests.support.moe import write_moe
from tests.support.qwen3_5 import write_qwen3_5, write_qwen3_next
from tests.support.random_trees import sequences_of_a_tree
from tests.support.sparse_models import write_sparse
from tests.support.variants import VARIANTS, write_variant
from tests.unit.rl_backend.runtime.native.test_shared_prefixes import assert_same, batch_of, compute

WRITERS: Mapping[str, Callable[[Path], Path]] = {
    **{name: partial(write_tiny, name) for name in ("llama", "mistral", "qwen2", "qwen3")},
    **{name: partial(write_variant, name) for name in VARIANTS},
    **{name: partial(write_moe, name) for name in ("mixtral", "qwen3_moe", "glm4_moe", "gpt_oss", "minimax_m2")},
    **{name: partial(write_latent, name) for name in ("deepseek_v3", "kimi_k2", "glm4_moe_lite")},
    **{name: partial(write_sparse, model_type=name) for name in ("deepseek_v32", "glm_moe_dsa")},
    "qwen3_5": write_qwen3_5,
    "qwen3_5_moe": partial(write_qwen3_5, moe=True),
    "qwen3_next": write_qwen3_next,
}


@pytest.mark.shows("runtime: all families train with shared prefixes as without, to 1e-10 in float64")
@pytest.mark.parametrize(
    "family", sampled(WRITERS, "gemma3_text", "gpt_oss", "deepseek_v3", "glm_moe_dsa", "qwen3_5_moe", "qwen3_next")
)
def test_a_family_trains_as_with_whole_sequences(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "SHORTEST_RUN", 1)
    path, batches = WRITERS[family](tmp_path / "model"), [batch_of(sequences_of_a_tree(5), 5)]
    assert_same(compute(path, batches, share_prefixes="auto"), compute(path, batches), batches)
