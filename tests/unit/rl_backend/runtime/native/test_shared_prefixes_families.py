"""Every family trains with shared prefixes computed once as without."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_backend.data import prefixes
from tests.support.matrix import sampled
from tests.support.random_trees import sequences_of_a_tree
from tests.support.small_models import FAMILIES, WRITERS
from tests.unit.rl_backend.runtime.native.test_shared_prefixes import assert_same, batch_of, compute


@pytest.mark.shows("runtime: all families train with shared prefixes as without, to 1e-10 in float64")
@pytest.mark.parametrize(
    "family", sampled(FAMILIES, "gemma3_text", "gpt_oss", "deepseek_v3", "glm_moe_dsa", "qwen3_5_moe", "qwen3_next")
)
def test_a_family_trains_as_with_whole_sequences(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "SHORTEST_RUN", 1)
    path, batches = WRITERS[family](tmp_path / "model"), [batch_of(sequences_of_a_tree(5), 5)]
    assert_same(compute(path, batches, share_prefixes="auto"), compute(path, batches), batches)
