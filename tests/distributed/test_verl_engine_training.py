"""verl's engines train the same in every layout, skip what is not finite, and go on from a checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.matrix import sampled
from tests.support.models import write_tiny
from tests.support.moe import write_moe
from tests.support.qwen3_5 import write_qwen3_5
from tests.support.rank_pool import RankPool
from tests.support.verl_batches import make_batch, rows
from tests.support.verl_engine import mean_loss, open_engine

IMPORT_SECONDS = 300.0

BY_TOKENS = {"use_dynamic_bsz": True, "max_token_len_per_gpu": 38, "global_batch_size": 8}

ZBV = {"backend_options": {"pipeline_schedule": "zbv"}}
LAYOUTS: dict[str, tuple[str, str, dict[str, int], dict[str, Any]]] = {
    "native dp": ("dense", "native", {}, {}),
    "native tp": ("dense", "native", {"tp": 2}, {}),
    "native cp": ("dense", "native", {"cp": 2}, {}),
    "native pp": ("dense", "native", {"pp": 2}, {}),
    "native pp in the shape of a V": ("dense", "native", {"pp": 2, "vpp": 2}, ZBV),
    "native ep": ("mixture", "native", {"ep": 2}, {}),
    "native dp, groups": ("dense", "native", {}, {"grouped": True}),
    "native ep, groups": ("mixture", "native", {"ep": 2}, {"grouped": True}),
    "native tp and ep, with states": ("hybrid", "native", {"tp": 2, "ep": 2, "etp": 1}, {}),
    "native cp, with states": ("hybrid", "native", {"cp": 2}, {}),
    "bridge dp": ("dense", "bridge", {}, {}),
    "bridge pp": ("dense", "bridge", {"pp": 2}, {}),
    "bridge ep": ("mixture", "bridge", {"ep": 2}, {}),
}


class Run(NamedTuple):
    """Attributes:
    losses, norms: of each step.
    log_probs: row of the whole batch -> before the first step; on source ranks.
    is_source: whether this is one.
    group: global ranks of its data-parallel group.
    """

    losses: list[float]
    norms: list[float]
    log_probs: dict[int, Tensor]
    is_source: bool
    group: list[int]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    folder = tmp_path_factory.mktemp("verl")
    return {
        "dense": write_tiny("qwen3", folder / "dense", num_hidden_layers=4),
        "mixture": write_moe("qwen3_moe", folder / "mixture", num_hidden_layers=2),
        "hybrid": write_qwen3_5(folder / "hybrid", moe=True, released=True),
    }


def train_step(engine: Any, seed: int) -> tuple[float, float]:
    """Loss over all ranks and gradient norm of one of verl's SFT steps on this rank's share of the sequences."""
    from verl.workers.utils.losses import sft_loss

    mine = rows(seed)[engine.get_data_parallel_rank() :: engine.get_data_parallel_size()]
    with engine.train_mode(), engine.train_mode(disable_auto_offload=True):
        output = engine.train_batch(make_batch(mine, "full", **BY_TOKENS), partial(sft_loss, config=None))
    norm = torch.tensor(output["metrics"]["grad_norm"] if output else 0.0, dtype=torch.float64)
    dist.all_reduce(norm, dist.ReduceOp.MAX)
    engine.lr_scheduler_step()
    return mean_loss(engine, output), norm.item()


def train_job(model: str, backend: str, layout: dict[str, int], options: dict[str, Any]) -> Run:
    with open_engine(model, backend=backend, layout=layout, **options) as engine:
        mine = list(range(8))[engine.get_data_parallel_rank() :: engine.get_data_parallel_size()]
        with engine.eval_mode():
            output = engine.infer_batch(make_batch([rows()[index] for index in mine], "response", **BY_TOKENS))
        steps = [train_step(engine, seed) for seed in range(2)]
        group = dist.get_process_group_ranks(engine.get_data_parallel_group())
        is_source = engine.is_mp_src_rank_with_outputs()
        log_probs = dict(zip(mine, output["model_output"]["log_probs"].unbind(), strict=True)) if output else {}
    return Run([loss for loss, _ in steps], [norm for _, norm in steps], log_probs, is_source, group)


@pytest.fixture(scope="module")
def on_one_rank(ranks: RankPool, models: Mapping[str, Path]) -> Mapping[str, Run]:
    return {
        name: ranks.run(train_job, str(path), "native", {}, {}, world_size=1, timeout=IMPORT_SECONDS)[0]
        for name, path in models.items()
    }


@pytest.mark.shows("verl: SFT loss and gradient norm on 2 ranks (dp, tp, cp, pp or ep) match one rank's to 1e-5")
@pytest.mark.parametrize("case", sampled(LAYOUTS, *(case for case in LAYOUTS if "groups" not in case)))
def test_sft_steps_in_every_layout_are_those_of_one_rank(
    ranks: RankPool, models: Mapping[str, Path], on_one_rank: Mapping[str, Run], case: str
) -> None:
    model, backend, layout, options = LAYOUTS[case]
    expected = on_one_rank[model]
    runs = ranks.run(train_job, str(models[model]), backend, layout, options, timeout=IMPORT_SECONDS)
    for run in runs:
        torch.testing.assert_close(run.losses, expected.losses, rtol=1e-5, atol=0)
        torch.testing.assert_close(run.norms, expected.norms, rtol=1e-5, atol=0)
    found = {index: row for run in runs for index, row in run.log_probs.items()}
    assert found.keys() == expected.log_probs.keys()
    for index, row in found.items():
        torch.testing.assert_close(row, expected.log_probs[index], rtol=0, atol=1e-5)
    sources = [rank for rank, run in enumerate(runs) if run.is_source]
    assert all(run.group == sources for run in runs if run.is_source)
    assert "V" not in case or sources == [0]


def resume_job(
    model: str, backend: str, folder: str, offload: bool, then: str, grouped: bool = False
) -> tuple[list[Any], list[Any]]:
    """Steps 3 and 4 with the learning rates after them, of a run that went on and of one that resumed on ``then``."""

    def go_on(engine: Any) -> list[Any]:
        return [(train_step(engine, seed), engine.lr_scheduler_step()) for seed in (2, 3)]

    options: dict[str, Any] = {"param_offload": offload, "optimizer_offload": offload, "grouped": grouped}
    with open_engine(model, backend=backend, **options) as engine:
        for seed in range(2):
            train_step(engine, seed)
        # The second save replaces the first.
        for _ in range(2):
            engine.save_checkpoint(folder, None, 2, 1)
        straight = go_on(engine)
    with open_engine(model, backend=then, **options) as engine:
        train_step(engine, 7)
        engine.load_checkpoint(folder)
        return straight, go_on(engine)


@pytest.mark.shows("verl: a saved and resumed engine trains on as if not stopped, learning rate included, to the last bit")
@pytest.mark.parametrize(
    ("backend", "offload", "grouped"),
    sampled(
        [("native", True, False), ("native", True, True), ("bridge", True, False), ("native", False, False)],
        ("native", True, True),
        ("bridge", True, False),
    ),
)
def test_a_resumed_engine_trains_on_as_one_that_was_not_stopped(
    ranks: RankPool, models: Mapping[str, Path], tmp_path: Path, backend: str, offload: bool, grouped: bool
) -> None:
    arguments = (str(models["dense"]), backend, str(tmp_path / "saved"), offload, backend, grouped)
    for straight, resumed in ranks.run(resume_job, *arguments, timeout=IMPORT_SECONDS):
        assert resumed == straight
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["huggingface", "training_state"]
    assert (tmp_path / "saved" / "huggingface" / "config.json").is_file()


@pytest.mark.shows("verl: an engine of one backend resumes what the other saved, to 1e-5")
@pytest.mark.parametrize(("backend", "then"), sampled([("native", "bridge"), ("bridge", "native")], ("bridge", "native")))
def test_an_engine_of_the_other_backend_trains_on(
    ranks: RankPool, models: Mapping[str, Path], tmp_path: Path, backend: str, then: str
) -> None:
    arguments = (str(models["dense"]), backend, str(tmp_path / "saved"), False, then)
    for straight, resumed in ranks.run(resume_job, *arguments, timeout=IMPORT_SECONDS):
        for (step, rate), (expected, expected_rate) in zip(resumed, straight, strict=True):
            assert (*step, rate) == pytest.approx((*expected, expected_rate), rel=1e-5)


def weights_only_job(model: str, folder: str, contents: tuple[str, ...]) -> tuple[list[str], float, float]:
    """What is kept of three saves of weights, and the loss of step 2 with the weights and with those loaded."""
    with open_engine(model, contents=contents) as engine:
        write = engine._runtime.save_checkpoint

        def save(*arguments: Any, **options: Any) -> None:
            there = len(list(Path(folder).glob("*/actor/huggingface/config.json")))
            assert there < 2, "the oldest goes first: a disk need not have room for more than were asked for"
            write(*arguments, **options)

        for step in range(3):
            with patch.object(engine._runtime, "save_checkpoint", save):
                engine.save_checkpoint(f"{folder}/global_step_{step}/actor", global_step=step, max_ckpt_to_keep=2)
            if step < 2:
                train_step(engine, step)
        kept = sorted(str(path.relative_to(folder)) for path in Path(folder).glob("*/actor/huggingface/config.json"))
        expected = train_step(engine, 2)[0]
        engine.load_checkpoint(f"{folder}/global_step_2/actor")
        return kept, expected, train_step(engine, 2)[0]


@pytest.mark.parametrize("contents", [("hf_model",), ("model",)], ids=lambda contents: contents[0])
def test_weights_alone_are_kept_as_many_times_as_asked_and_loaded(
    ranks: RankPool, models: Mapping[str, Path], tmp_path: Path, contents: tuple[str, ...]
) -> None:
    arguments = (str(models["dense"]), str(tmp_path), contents)
    ((kept, expected, found),) = ranks.run(weights_only_job, *arguments, world_size=1, timeout=IMPORT_SECONDS)
    assert not list(tmp_path.glob("*/actor/training_state"))
    assert kept == [f"global_step_{step}/actor/huggingface/config.json" for step in (1, 2)]
    assert found == expected


def sharded_job(model: str, first_weights: str, folder: str) -> tuple[list[str], bool]:
    """What a save has, and whether the engine started from ``first_weights``."""
    options: dict[str, Any] = {"use_dist_checkpointing": True, "dist_checkpointing_path": first_weights}
    with open_engine(first_weights) as engine:
        expected = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}
    with open_engine(model, **options) as engine:
        same = all(torch.equal(tensor, expected[name]) for name, tensor in engine.get_per_tensor_param()[0])
        engine.save_checkpoint(folder)
    return sorted(path.name for path in Path(folder).iterdir()), same


def test_with_a_distributed_checkpoint_first_weights_come_from_it_and_saves_have_no_hugging_face_directory(
    ranks: RankPool, models: Mapping[str, Path], tmp_path: Path
) -> None:
    other = Path(shutil.copytree(models["dense"], tmp_path / "other"))
    for file in other.glob("*.safetensors"):
        save_file({name: tensor + 0.5 for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    arguments = (str(models["dense"]), str(other), str(tmp_path / "saved"))
    assert ranks.run(sharded_job, *arguments, world_size=1, timeout=IMPORT_SECONDS) == [(["training_state"], True)]


def not_finite_job(model: str, backend: str) -> tuple[float, bool, float]:
    def infinite(model_output: Any, data: Any, dp_group: Any) -> tuple[Tensor, dict[str, Any]]:
        factor = float("inf") if dist.get_rank() == 1 else 1.0
        return model_output["log_probs"].values().sum() * factor, {}

    with open_engine(model, backend=backend) as engine:
        before = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}
        with engine.train_mode():
            output = engine.train_batch(make_batch(rows(), "full", **BY_TOKENS), infinite)
        after = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}
        unchanged = all(torch.equal(after[name], tensor) for name, tensor in before.items())
        return output["metrics"]["grad_norm"], unchanged, train_step(engine, 0)[1]


@pytest.mark.parametrize("backend", ["native", "bridge"])
def test_a_step_with_gradients_that_are_not_finite_changes_nothing_and_says_so(
    ranks: RankPool, models: Mapping[str, Path], on_one_rank: Mapping[str, Run], backend: str
) -> None:
    for norm, unchanged, next_norm in ranks.run(not_finite_job, str(models["dense"]), backend, timeout=IMPORT_SECONDS):
        assert not torch.tensor(norm).isfinite()
        assert unchanged
        assert next_norm == pytest.approx(on_one_rank["dense"].norms[0], rel=1e-5)


def delta_job(model: str, backend: str, layout: dict[str, int]) -> tuple[int, int]:
    """Applies two deltas to what was sent before; returns how many elements the second changed, and how many there are."""
    with open_engine(model, backend=backend, layout=layout) as engine:
        sent = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}
        engine.prime_delta_snapshots()
        for seed in range(2):
            train_step(engine, seed)
            entries = [entry[:-1] for entry in engine.get_per_tensor_param_delta_shard()[0]]
            of_ranks: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(of_ranks, entries)
            assert [entry[0] for entry in of_ranks[0]] == [entry[0] for entry in of_ranks[1]]
            changed = 0
            for entries in of_ranks:
                for ((name, shape),), dtype, counts, places, values in entries:
                    assert (shape, dtype, int(counts)) == (tuple(sent[name].shape), "float32", len(values))
                    assert places.dtype == torch.int32
                    sent[name].view(-1)[places.to(torch.int64)] = values
                    changed += len(values)
            for name, tensor in engine.get_per_tensor_param()[0]:
                assert torch.equal(tensor, sent[name]), name
        return changed, sum(tensor.numel() for tensor in sent.values())


@pytest.mark.parametrize(
    ("model", "backend", "layout"),
    [("mixture", "native", {"ep": 2}), ("dense", "native", {"pp": 2}), ("dense", "bridge", {"tp": 2})],
    ids=["native ep", "native pp", "bridge tp"],
)
def test_what_changed_in_every_ranks_shares_makes_the_new_weights_of_the_old(
    ranks: RankPool, models: Mapping[str, Path], model: str, backend: str, layout: dict[str, int]
) -> None:
    for changed, total in ranks.run(delta_job, str(models[model]), backend, layout, timeout=IMPORT_SECONDS):
        # No element is sent twice; rows of the embedding that no token had do not change.
        assert 0.5 * total < changed <= total
