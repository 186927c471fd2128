"""Hybrid, latent and sparse models on a tree of prefixes: hidden states and gradients of whole sequences."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_backend.model import ModelInput
from rl_backend.model.decoder import checkpoint_layers
from rl_backend.primitive.attention import Segments
from tests.support.deepseek import write_latent
from tests.support.families import load_native
from tests.support.qwen3_5 import write_qwen3_5, write_qwen3_next
from tests.support.random_trees import random_tree, require_same, unshared
from tests.support.sparse_models import write_sparse

WRITERS: dict[str, Callable[[Path], Path]] = {
    "qwen3_next": write_qwen3_next,
    "qwen3_5": write_qwen3_5,
    "deepseek_v3": partial(write_latent, "deepseek_v3"),
    "deepseek_v32": partial(write_sparse, model_type="deepseek_v32"),
    "glm_moe_dsa": partial(write_sparse, model_type="glm_moe_dsa"),
}


@pytest.mark.shows("model: Qwen3-Next, Qwen3.5, DeepSeek-V3, -V3.2 and GLM-5 on a tree of prefixes equal whole sequences")
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", WRITERS)
def test_hidden_states_and_gradients_are_those_of_whole_sequences(name: str, recompute: bool, tmp_path: Path) -> None:
    model: Any = load_native(WRITERS[name](tmp_path / "model")).double()
    # As a stage that is not the last: log-probs are another test's.
    model.norm = None
    if recompute:
        checkpoint_layers(list(model.each_layer()))
    tree = random_tree(3, (1, 2, 5, 9, 40))
    whole = unshared(tree)
    ids = torch.randint(0, 128, (tree.num_rows,), generator=torch.Generator().manual_seed(0))

    def hidden(rows: Tensor, position_ids: Tensor, segments: Segments) -> Tensor:
        states: Tensor = model(ModelInput(rows, position_ids, segments, max(whole.lengths), rows, 1.0, False))
        return states

    shared = hidden(ids, tree.position_ids, Segments.of_tree(tree, torch.device("cpu"))).index_select(0, whole.rows)
    expected = hidden(ids.index_select(0, whole.rows), whole.position_ids, whole.segments)
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    leaves = [each for name, each in trained.items() if name.startswith(("embed_tokens.", "layers."))]
    require_same(shared, expected, leaves, tolerance=1e-11)
