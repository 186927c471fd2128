"""Layers that keep a part of what they compute train as those that keep all of it, or nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rl_backend.contracts import ConfigError
from rl_backend.model.decoder import PRODUCTS, checkpoint_layers
from rl_backend.primitive.attention import ATTENDS
from rl_backend.runtime.native.layout import check_config
from tests.support.deepseek import write_latent
from tests.support.models import write_tiny
from tests.support.moe import write_moe
from tests.support.native import gradients, make_config, micro_batches, open_runtime, token_loss
from tests.support.qwen3_5 import write_qwen3_5
from tests.support.sparse_models import write_sparse
from tests.support.variants import write_variant

FAMILIES: Mapping[str, tuple[Callable[[Path], Path], dict[str, Any]]] = {
    "dense": (lambda path: write_tiny("qwen3", path), {}),
    "dense in bfloat16": (lambda path: write_tiny("qwen3", path), {"param_dtype": "bfloat16"}),
    "windows": (lambda path: write_variant("gemma3_text", path), {}),
    "windows, sinks, experts": (lambda path: write_moe("gpt_oss", path), {}),
    "latents, experts": (lambda path: write_latent("deepseek_v3", path), {}),
    "chosen keys": (lambda path: write_sparse(path, "glm_moe_dsa"), {}),
    "states": (write_qwen3_5, {}),
}


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def trained(path: Path, **settings: Any) -> tuple[dict[str, torch.Tensor], float, Counter[str]]:
    with open_runtime(path, **settings) as runtime:
        handle, operations = runtime.build_model(), _Operations()
        with operations:
            loss = runtime.forward_backward(handle, micro_batches([[0, 1, 2], [3, 4, 5]]), token_loss).loss
        return gradients(handle), loss, operations.counts


@pytest.mark.shows("runtime: selective activation checkpointing changes no bit of a gradient")
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_kept_changes_no_bit_and_what_is_recomputed_is_as_said(family: str, tmp_path: Path) -> None:
    write, settings = FAMILIES[family]
    path = write(tmp_path)
    found = {kept: trained(path, activation_checkpointing=kept, **settings) for kept in ("none", "selective", "full")}
    expected, loss, _ = found["none"]
    for kept in ("selective", "full"):
        assert found[kept][1] == loss
        assert found[kept][0].keys() == expected.keys()
        assert all(torch.equal(gradient, expected[name]) for name, gradient in found[kept][0].items())
    attended, products = (
        {kept: sum(counts[str(each)] for each in operations) for kept, (_, _, counts) in found.items()}
        for operations in (ATTENDS, PRODUCTS)
    )
    assert attended["selective"] == attended["none"] > 0
    assert attended["full"] == 2 * attended["none"]
    # Of the products that a layer runs again the last one is not computed, as nothing needs it.
    again = {kept: products[kept] - products["none"] for kept in ("selective", "full")}
    assert 0 < again["selective"] <= 0.6 * again["full"]


def test_nothing_is_recomputed_in_a_pass_without_gradients_and_compiled_layers_are_refused(tmp_path: Path) -> None:
    path = write_tiny("qwen3", tmp_path)
    with pytest.raises(ConfigError, match=r"compile=True: activation_checkpointing='selective' chooses among operations"):
        check_config(make_config(path, compile=True, activation_checkpointing="selective"))
    layer = torch.nn.Linear(2, 2)
    checkpoint_layers([layer], "none")
    assert layer.forward.__func__ is torch.nn.Linear.forward  # type: ignore[attr-defined]
