"""The bridge runtime's weights under Hugging Face names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rl_backend.contracts import VALUE_HEAD_WEIGHTS, ConfigError, ExportInterruptedError
from tests.support.bridge_runs import open_bridge
from tests.support.bridge_state import exported, stored_weights, train_bridge, write_tiny_mixture
from tests.support.critic import squared_error
from tests.support.models import write_tiny_qwen3
from tests.support.native import assert_equal_tensors, open_runtime
from tests.support.rank_pool import RankPool

GATE_AND_UP = 2 * 128 * 64 * 4
LAYOUTS = [(1, {}), (2, {}), (2, {"tp": 2}), (2, {"pp": 2}), (4, {"tp": 2, "pp": 2})]
MIXTURE_LAYOUTS = [(1, {}), (2, {"ep": 2}), (2, {"tp": 2}), (4, {"ep": 2, "pp": 2})]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_mixture(tmp_path_factory.mktemp("mixture"))


def export_job(model: str, layout: dict[str, int], settings: dict[str, Any]) -> dict[str, Tensor]:
    with open_bridge(model, layout) as runtime:
        handle = runtime.build_model(forward_only=True)
        weights = exported(runtime, handle, **settings)
        infos = runtime.weight_infos(handle, dtype=settings.get("dtype"))
        for info, (name, tensor) in zip(infos, weights.items(), strict=True):
            assert (info.name, info.shape, info.nbytes) == (name, tuple(tensor.shape), tensor.nbytes)
            assert f"torch.{info.dtype}" == str(tensor.dtype)
    return weights


@pytest.mark.shows("bridge: every layout exports the directory's names and shapes, under a byte budget")
@pytest.mark.parametrize(("world_size", "layout"), LAYOUTS, ids=str)
def test_every_rank_exports_what_the_directory_holds_in_one_order(
    ranks: RankPool, untied_model: Path, world_size: int, layout: dict[str, int]
) -> None:
    results = ranks.run(export_job, str(untied_model), layout, {"byte_budget": GATE_AND_UP}, world_size=world_size)
    for weights in results:
        assert list(weights) == list(results[0])
        assert_equal_tensors(weights, stored_weights(untied_model))


@pytest.mark.parametrize(("world_size", "layout"), MIXTURE_LAYOUTS, ids=str)
def test_experts_are_exported_one_by_one_from_every_rank(
    ranks: RankPool, mixture: Path, world_size: int, layout: dict[str, int]
) -> None:
    results = ranks.run(export_job, str(mixture), layout, {}, world_size=world_size)
    for weights in results:
        assert list(weights) == list(results[0])
        assert_equal_tensors(weights, stored_weights(mixture))


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}], ids=str)
def test_a_tied_lm_head_and_padding_of_the_vocabulary_are_not_exported(
    ranks: RankPool, tmp_path: Path, layout: dict[str, int]
) -> None:
    model = write_tiny_qwen3(tmp_path, vocab_size=129)
    for weights in ranks.run(export_job, str(model), layout, {"dtype": torch.bfloat16}):
        assert "lm_head.weight" not in weights
        assert_equal_tensors(weights, {name: tensor.bfloat16() for name, tensor in stored_weights(model).items()})


def early_close_job(model: str, layout: dict[str, int], taken: int, budget: int | None) -> tuple[int, bool, int]:
    """Tensors seen, whether it was interrupted, and tensors of a complete export afterwards. Rank 0 closes early."""
    with open_bridge(model, layout) as runtime:
        handle = runtime.build_model(forward_only=True)
        stream = runtime.export_weights(handle, byte_budget=budget)
        seen, interrupted = 0, False
        try:
            if dist.get_rank() > 0 or taken:
                for _ in stream:
                    seen += 1
                    if dist.get_rank() == 0 and seen == taken:
                        break
            del stream
        except ExportInterruptedError:
            interrupted = True
        return seen, interrupted, len(exported(runtime, handle))


@pytest.mark.parametrize(("layout", "budget"), [({"tp": 2}, None), ({"pp": 2}, 3 * GATE_AND_UP), ({}, 10**9)], ids=str)
@pytest.mark.parametrize("taken", [0, 10, 25])
def test_closing_early_on_one_rank_ends_the_export_on_all(
    ranks: RankPool, untied_model: Path, layout: dict[str, int], budget: int | None, taken: int
) -> None:
    closing, other = ranks.run(early_close_job, str(untied_model), layout, taken, budget)
    assert closing == (taken, False, 25)
    assert other[1]
    assert taken <= other[0] <= 25
    assert other[2] == 25


def refusals_job(model: str) -> list[str]:
    messages = []
    with open_bridge(model, {"tp": 2}) as runtime:
        handle = runtime.build_model(forward_only=True)
        for settings in ({"byte_budget": GATE_AND_UP - 1}, {"names": ["model.norm.weight", "model.nrom.weight"]}):
            with pytest.raises(ConfigError) as caught:
                runtime.export_weights(handle, **settings)
            messages.append(str(caught.value))
        chosen = ["model.norm.weight", "model.layers.1.self_attn.k_proj.weight"]
        assert set(exported(runtime, handle, names=chosen)) == set(chosen)
        assert set(exported(runtime, handle, names=chosen[:1], byte_budget=256)) == set(chosen[:1])
    return messages


def test_a_budget_too_small_and_unknown_names_are_refused_before_anything_is_gathered(
    ranks: RankPool, untied_model: Path
) -> None:
    budget, names = ranks.run(refusals_job, str(untied_model))[0]
    assert "mlp.gate_proj.weight (gathered with" in budget
    assert str(GATE_AND_UP) in budget
    assert "model.nrom.weight" in names


def hf_job(model: str, layout: dict[str, int], head: Any, steps: int, path: str) -> dict[str, Tensor]:
    with open_bridge(model, layout) as runtime:
        handle = runtime.build_model(head=head)
        if steps:
            train_bridge(runtime, handle, steps, loss=squared_error)
        runtime.save_checkpoint(handle, path, hf=True)
        weights = exported(runtime, handle)
    with open_bridge(path, layout) as runtime:
        handle = runtime.build_model(head=head, forward_only=True)
        assert_equal_tensors(exported(runtime, handle), weights)
    return weights


def native_hf_job(model: str, head: Any, path: str) -> None:
    with open_runtime(model) as runtime:
        runtime.save_checkpoint(runtime.build_model(head=head, forward_only=True), path, hf=True)


@pytest.mark.parametrize("head", ["log_probs", "values"])
@pytest.mark.parametrize(("world_size", "layout"), [(1, {}), (2, {"pp": 2})], ids=str)
def test_a_hugging_face_directory_is_the_one_that_the_native_runtime_writes(
    ranks: RankPool, untied_model: Path, tmp_path: Path, head: str, world_size: int, layout: dict[str, int]
) -> None:
    bridge, native = tmp_path / "bridge", tmp_path / "native"
    ranks.run(hf_job, str(untied_model), layout, head, 0, str(bridge), world_size=world_size)
    ranks.run(native_hf_job, str(untied_model), head, str(native), world_size=1)
    assert_equal_tensors(stored_weights(bridge), stored_weights(native))
    assert {file.name for file in bridge.iterdir()} == {file.name for file in native.iterdir()}
    assert json.loads((bridge / "config.json").read_text()) == json.loads((native / "config.json").read_text())


def test_a_trained_value_head_is_exported_from_the_last_stage_to_every_rank(
    ranks: RankPool, untied_model: Path, tmp_path: Path
) -> None:
    for weights in ranks.run(hf_job, str(untied_model), {"pp": 2}, "values", 1, str(tmp_path / "hf")):
        assert all(weights[name].abs().max() > 0 for name in VALUE_HEAD_WEIGHTS)
        assert_equal_tensors(stored_weights(tmp_path / "hf"), weights)
