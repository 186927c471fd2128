"""verl's SFT trainer, unedited: the same numbers on any number of ranks, and a resumed run goes on as if never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from examples.verl import sft
from examples.verl.options import write_verl_task
from tests.support.verl_runs import Metrics, files_of, run_trainer

pytestmark = pytest.mark.skipif(
    torch.accelerator.is_available(), reason="for verl's CPU platform; this machine has an accelerator"
)

STEPS = 4
NUMBERS = ("train/loss", "train/grad_norm", "train/lr")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verl_task")
    write_verl_task(folder)
    return folder


def run(task: Path, run_dir: Path, **options: Any) -> Metrics:
    options = {"steps": STEPS, "batch_size": 32, "lr_warmup_steps": 2, "max_tokens_per_rank": 64, **options}
    files = files_of(task, "demonstrations", "validation")
    return run_trainer(sft.train, sft.SFTOptions(**files, run_dir=str(run_dir), **options))


@pytest.fixture(scope="module")
def on_one_rank(task: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Metrics]:
    """The run's folder, with a checkpoint of its half, and its metrics."""
    run_dir = tmp_path_factory.mktemp("one_rank")
    return run_dir, run(task, run_dir, save_every=STEPS // 2)


@pytest.mark.long
@pytest.mark.shows("verl: sft_trainer on 2 ranks of the bridge gives one native rank's loss and gradient norm to 1e-5")
def test_two_ranks_of_the_bridge_train_as_a_native_one(
    task: Path, on_one_rank: tuple[Path, Metrics], tmp_path: Path
) -> None:
    assert_same_on_two_ranks("bridge", task, on_one_rank[1], tmp_path)


@pytest.mark.long
@pytest.mark.shows("verl: sft_trainer on 2 native ranks gives one native rank's loss and gradient norm to 1e-5")
def test_two_native_ranks_train_as_one(task: Path, on_one_rank: tuple[Path, Metrics], tmp_path: Path) -> None:
    assert_same_on_two_ranks("native", task, on_one_rank[1], tmp_path)


def assert_same_on_two_ranks(backend: str, task: Path, expected: Metrics, tmp_path: Path) -> None:
    found = run(task, tmp_path, ranks=2, backend=backend, overrides="data.val_files=null")
    for name in NUMBERS:
        assert found[1][name] == pytest.approx(expected[1][name], rel=1e-5)
    assert found[STEPS]["train/loss"] < found[1]["train/loss"]


@pytest.mark.long
@pytest.mark.shows("verl: a resumed sft_trainer has the losses and learning rates of one that was not stopped")
def test_a_resumed_run_goes_on_as_if_never_stopped(task: Path, on_one_rank: tuple[Path, Metrics], tmp_path: Path) -> None:
    run_dir, expected = on_one_rank
    half = run_dir / "checkpoints" / f"global_step_{STEPS // 2}"
    found = run(task, tmp_path, overrides=f"trainer.resume_mode=resume_path trainer.resume_from_path={half}")
    assert min(found) == STEPS // 2 + 1
    for step in range(STEPS // 2 + 1, STEPS + 1):
        for name in NUMBERS:
            assert found[step][name] == pytest.approx(expected[step][name], rel=1e-6, abs=1e-12)
    assert found[STEPS]["val/loss"] == pytest.approx(expected[STEPS]["val/loss"], rel=1e-6)
    assert sft.trained_model(sft.SFTOptions(run_dir=str(tmp_path), steps=STEPS)).is_dir()
