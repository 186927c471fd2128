"""Mixtures of experts on data-parallel ranks: gradients, packed weights in and out, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.test_export import early_close_job, stored_weights
from tests.support.moe import unpacked, write_moe
from tests.support.native import (
    assert_equal_tensors,
    assert_near,
    deal,
    gradients_job,
    micro_batches,
    open_runtime,
    relative_difference,
    token_loss,
    weights,
)
from tests.support.rank_pool import RankPool

SPLIT = [[0, 1], [2, 3], [4, 5], [6, 7]]
BETWEEN, FEW_TOKENS = "qwen3_moe, dense layers between", "qwen3_moe, experts without tokens"
EXPERT_BYTES = 32 * 64 * 4


@pytest.mark.shows("model: mixtures of experts on 2 and 4 data-parallel ranks match one rank's gradients to 1e-5")
@pytest.mark.parametrize(("model", "world_size"), [("qwen3_moe", 2), (BETWEEN, 4), (FEW_TOKENS, 2), ("mixtral", 2)])
def test_gradients_are_those_of_one_rank(ranks: RankPool, tmp_path: Path, model: str, world_size: int) -> None:
    path = str(write_moe(model, tmp_path / "model"))
    expected = gradients_job(path, [SPLIT], {})
    settings = {"activation_checkpointing": "full"}
    result = ranks.run(gradients_job, path, deal(SPLIT, world_size), settings, world_size=world_size)[0]
    assert_near(result, expected)


@pytest.mark.shows("weights: packed experts are read by shard and exported bit-equal, tensor by tensor, on 2 and 4 ranks")
@pytest.mark.parametrize(
    ("model", "byte_budget", "world_size"),
    [(BETWEEN, None, 4), (BETWEEN, 128 * 64 * 4, 4), ("mixtral", 10**9, 2), ("mixtral", 128 * 64 * 4, 1)],
)
def test_packed_experts_are_exported_as_the_directory_holds_them(
    ranks: RankPool, tmp_path: Path, model: str, byte_budget: int | None, world_size: int
) -> None:
    path = write_moe(model, tmp_path / "model")
    results = ranks.run(packed_export_job, str(path), {"byte_budget": byte_budget}, world_size=world_size)
    stored = stored_weights(path)
    for names, exported in results:
        assert names == results[0][0]
        assert_equal_tensors(exported, stored)


def packed_export_job(model: str, settings: dict[str, Any]) -> tuple[list[str], dict[str, Tensor]]:
    with open_runtime(model) as runtime:
        handle = runtime.build_model()
        exported = {name: tensor.clone() for name, tensor in runtime.export_weights(handle, **settings)}
        infos = {info.name: (info.shape, info.nbytes) for info in runtime.weight_infos(handle)}
        assert list(infos) == list(exported)
        assert infos == {name: (tuple(tensor.shape), tensor.nbytes) for name, tensor in exported.items()}
    return list(exported), exported


def trained_export_job(model: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """One expert of trained weights and gradients in pieces, against the packed parameters."""
    with open_runtime(model) as runtime:
        handle = runtime.build_model()
        names = [f"model.layers.1.mlp.experts.{expert}.up_proj.weight" for expert in (5, 0, 3)]
        runtime.forward_backward(handle, micro_batches([[0, 1]]), token_loss)
        gradients = {name: tensor.clone() for name, tensor in runtime.export_gradients(handle, names=names)}
        runtime.optimizer_step(handle)
        exported = {
            name: tensor.clone()
            for name, tensor in runtime.export_weights(
                handle, dtype=torch.bfloat16, byte_budget=EXPERT_BYTES, names=[*names, "model.norm.weight"]
            )
        }
        held = unpacked(handle.weight_names, weights(handle))
    for name in names:
        assert torch.equal(exported[name], held[name].to(torch.bfloat16))
    return exported, gradients


def test_single_experts_are_exported_after_training_in_the_dtype_asked_for(ranks: RankPool, tmp_path: Path) -> None:
    path = str(write_moe(BETWEEN, tmp_path / "model"))
    expected_weights, expected_gradients = trained_export_job(path)
    for exported, gradients in ranks.run(trained_export_job, path, world_size=4):
        assert list(exported) == list(expected_weights) and list(gradients) == list(expected_gradients)
        for name, tensor in exported.items():
            assert tensor.dtype == torch.bfloat16
            torch.testing.assert_close(tensor, expected_weights[name], atol=1e-3, rtol=0.01)
        for name, gradient in gradients.items():
            assert gradient.dtype == torch.float32
            assert relative_difference(gradient, expected_gradients[name]) < 1e-5


@pytest.mark.parametrize("taken", [1, 12])
def test_closing_an_export_between_packed_and_other_weights_ends_it_on_all_ranks(
    ranks: RankPool, tmp_path: Path, taken: int
) -> None:
    model = write_moe("mixtral", tmp_path / "model")
    everything = len(stored_weights(model))
    closing, other = ranks.run(early_close_job, str(model), taken, 10**9)
    assert closing == (taken, False, everything)
    assert other == (everything, True, everything)
