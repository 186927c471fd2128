"""Exporting weights from several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from rl_backend.contracts import (
    CheckpointError,
    ConfigError,
    ExportInterruptedError,
    NativeConfig,
    ParallelConfig,
    RuntimeConfig,
    TensorPart,
)
from rl_backend.lab.plan.make import make_plan
from rl_backend.lab.plan.memory import Workload
from rl_backend.weights.staging import require_covered
from tests.support.models import write_tiny_qwen3
from tests.support.moe import write_moe
from tests.support.native import assert_equal_tensors, open_runtime, train, weights
from tests.support.rank_pool import RankPool

LARGEST = 128 * 64 * 4
BUDGETS = [None, LARGEST, 3 * LARGEST + 5, 10**9]


def stored_weights(model: Path) -> dict[str, Tensor]:
    stored: dict[str, Tensor] = {}
    for file in model.glob("*.safetensors"):
        stored.update(load_file(file))
    return stored


def export_job(model: str, settings: dict[str, Any], steps: int) -> tuple[list[str], dict[str, Tensor], dict[str, Tensor]]:
    with open_runtime(model) as runtime:
        handle = runtime.build_model()
        train(runtime, handle, steps)
        exported = {name: tensor.clone() for name, tensor in runtime.export_weights(handle, **settings)}
        for info, (name, tensor) in zip(
            runtime.weight_infos(handle, dtype=settings.get("dtype")), exported.items(), strict=True
        ):
            assert (info.name, info.shape, info.nbytes) == (name, tuple(tensor.shape), tensor.nbytes)
            assert f"torch.{info.dtype}" == str(tensor.dtype)
        held = {handle.weight_names[name]: tensor for name, tensor in weights(handle).items()}
    return list(exported), exported, held


@pytest.mark.parametrize("byte_budget", BUDGETS)
@pytest.mark.parametrize("world_size", [2, 4])
def test_every_rank_exports_what_the_directory_holds_in_one_order(
    ranks: RankPool, untied_model: Path, byte_budget: int | None, world_size: int
) -> None:
    results = ranks.run(export_job, str(untied_model), {"byte_budget": byte_budget}, 0, world_size=world_size)
    for names, exported, _ in results:
        assert names == results[0][0]
        assert_equal_tensors(exported, stored_weights(untied_model))


def rectangles_job(
    model: str, layout: dict[str, int], dtype: torch.dtype | None
) -> tuple[tuple[TensorPart, ...], dict[str, Tensor], dict[str, Tensor]]:
    with open_runtime(model, parallel=layout) as runtime:
        handle = runtime.build_model()
        train(runtime, handle, 1)
        planned = runtime.shard_infos(handle, dtype=dtype)
        require_covered(runtime.weight_infos(handle, dtype=dtype), planned)
        shards = runtime.export_shards(handle, dtype=dtype)
        sent = {str(shard): shard.tensor.clone() for shard in shards if shard.tensor.numel()}
        exported = {name: tensor.clone() for name, tensor in runtime.export_weights(handle, dtype=dtype)}
    return planned, sent, exported


@pytest.mark.shows("weights: ranks of any layout hold rectangles that are every weight once, and each sends an even share")
@pytest.mark.parametrize(
    ("family", "layout", "share"),
    [
        ("untied", {"tp": 2}, 0.27),
        ("tied", {"tp": 2, "pp": 2}, 0.5),
        ("untied", {"tp": 4}, 0.27),
        ("odd", {}, 0.35),
        ("mixture", {"ep": 2}, 0.27),
        ("mixture", {"ep": 2, "tp": 2}, 0.27),
    ],
    ids=str,
)
def test_what_ranks_send_is_every_weight_once_in_even_shares(
    ranks: RankPool, untied_model: Path, tied_model: Path, tmp_path: Path, family: str, layout: dict[str, int], share: float
) -> None:
    written = {
        "odd": lambda: write_tiny_qwen3(tmp_path, vocab_size=129, hidden_size=66, intermediate_size=3),
        "mixture": lambda: write_moe("qwen3_moe", tmp_path / "model"),
        "untied": lambda: untied_model,
        "tied": lambda: tied_model,
    }
    dtype = torch.bfloat16 if family == "mixture" else None
    path = str(written[family]())
    results = ranks.run(rectangles_job, path, layout, dtype, world_size=4)
    planned, _, exported = results[0]
    assert all(each == planned for each, *_ in results)
    found = {name: torch.full_like(tensor, torch.nan) for name, tensor in exported.items()}
    for rank, (_, sent, _) in enumerate(results):
        mine = {str(part): part for part in planned if part.rank == rank}
        assert sent.keys() == mine.keys()
        for text, tensor in sent.items():
            assert tensor.dtype == exported[mine[text].name].dtype
            found[mine[text].name][mine[text].region] = tensor
        assert sum(tensor.nbytes for tensor in sent.values()) <= share * sum(each.nbytes for each in exported.values())
    assert_equal_tensors(found, exported)
    config = RuntimeConfig(hf_path=path, backend_cfg=NativeConfig(parallel=ParallelConfig(**layout), param_dtype="float32"))
    work = Workload(
        sequence_length=64, micro_batch_tokens=64, num_micro_batches=2, sync_dtype="bfloat16" if dtype else "float32"
    )
    assert make_plan(config, 4, work).sync_sent == [sum(each.nbytes for each in sent.values()) for _, sent, _ in results]


def test_a_tied_lm_head_is_not_exported(ranks: RankPool, tied_model: Path) -> None:
    names, exported, _ = ranks.run(export_job, str(tied_model), {}, 0)[0]
    assert "lm_head.weight" not in names
    assert_equal_tensors(exported, stored_weights(tied_model))


def test_trained_weights_are_converted_to_the_dtype_asked_for(ranks: RankPool, untied_model: Path) -> None:
    settings = {"dtype": torch.bfloat16, "byte_budget": LARGEST}
    for _, exported, held in ranks.run(export_job, str(untied_model), settings, 2):
        assert_equal_tensors(exported, {name: tensor.to(torch.bfloat16) for name, tensor in held.items()})


def odd_rows_job(model: str, budget: int | None) -> None:
    with open_runtime(model) as runtime:
        handle = runtime.build_model()
        train(runtime, handle, 1)
        exported = {name: tensor.clone() for name, tensor in runtime.export_weights(handle, byte_budget=budget)}
        assert_equal_tensors(exported, {handle.weight_names[name]: tensor for name, tensor in weights(handle).items()})


@pytest.mark.parametrize("budget", [None, 10**9])
def test_rows_that_do_not_divide_by_the_ranks_are_exported_whole(
    ranks: RankPool, tmp_path: Path, budget: int | None
) -> None:
    model = write_tiny_qwen3(tmp_path, vocab_size=129, hidden_size=66, intermediate_size=3)
    ranks.run(odd_rows_job, str(model), budget, world_size=4)


def early_close_job(model: str, taken: int, budget: int | None) -> tuple[int, bool, int]:
    """Tensors seen, whether it was interrupted, and tensors of a complete export afterwards. Rank 0 closes early."""
    with open_runtime(model) as runtime:
        handle = runtime.build_model()
        stream = runtime.export_weights(handle, byte_budget=budget)
        seen, interrupted = 0, False
        try:
            if dist.get_rank() == 0 and taken == 0:
                del stream
            else:
                for _ in stream:
                    seen += 1
                    if dist.get_rank() == 0 and seen == taken:
                        break
                del stream
        except ExportInterruptedError:
            interrupted = True
        return seen, interrupted, sum(1 for _ in runtime.export_weights(handle))


@pytest.mark.shows("runtime: an export keeps a byte budget, has one order on every rank, and any rank may close it early")
@pytest.mark.parametrize("taken", [0, 1, 10, 25])
@pytest.mark.parametrize("budget", [None, 3 * LARGEST, 10**9])
def test_closing_early_on_one_rank_ends_the_export_on_all(
    ranks: RankPool, untied_model: Path, taken: int, budget: int | None
) -> None:
    closing, *others = ranks.run(early_close_job, str(untied_model), taken, budget, world_size=4)
    assert closing == (taken, False, 25)
    for seen, interrupted, afterwards in others:
        assert interrupted
        assert taken <= seen <= 25
        assert afterwards == 25


def refusals_job(model: str) -> list[str]:
    messages = []
    with open_runtime(model) as runtime:
        handle = runtime.build_model()
        for settings in ({"byte_budget": LARGEST - 1}, {"names": ["model.norm.weight", "model.nrom.weight"]}):
            with pytest.raises(ConfigError) as caught:
                runtime.export_weights(handle, **settings)
            messages.append(str(caught.value))
        chosen = {name for name, _ in runtime.export_weights(handle, names=["model.norm.weight"], byte_budget=256)}
        assert chosen == {"model.norm.weight"}
    return messages


def test_a_budget_too_small_and_unknown_names_are_refused_before_anything_is_gathered(
    ranks: RankPool, untied_model: Path
) -> None:
    budget, names = ranks.run(refusals_job, str(untied_model))[0]
    assert "model.embed_tokens.weight" in budget
    assert str(LARGEST) in budget
    assert "model.nrom.weight" in names


def hf_directory_job(model: str, path: str, blocked: str) -> tuple[dict[str, Tensor], str]:
    with open_runtime(model) as runtime:
        handle = runtime.build_model()
        train(runtime, handle, 1)
        with pytest.raises(CheckpointError) as caught:
            runtime.save_checkpoint(handle, blocked, hf=True)
        runtime.save_checkpoint(handle, path, hf=True)
        held = {handle.weight_names[name]: tensor for name, tensor in weights(handle).items()}
    with open_runtime(path) as runtime:
        handle = runtime.build_model(forward_only=True)
        read = {handle.weight_names[name]: tensor for name, tensor in weights(handle).items()}
        assert_equal_tensors(read, held)
    return held, str(caught.value)


def test_a_hugging_face_directory_holds_the_trained_weights_and_loads_again(
    ranks: RankPool, untied_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    path, blocked = tmp_path / "new" / "hf", tmp_path / "file" / "hf"
    for held, message in ranks.run(hf_directory_job, str(untied_model), str(path), str(blocked)):
        assert_equal_tensors(stored_weights(path), held)
        assert "cannot make the directory" in message
