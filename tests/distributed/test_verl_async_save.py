"""verl's ``async_save``: what is recorded, kept and raised, and when."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from rl_backend.contracts import CheckpointError
from tests.distributed.test_verl_engine_training import IMPORT_SECONDS, train_step
from tests.support.matrix import sampled
from tests.support.models import write_tiny
from tests.support.rank_pool import RankPool
from tests.support.verl_engine import open_engine

RECORD = "latest_checkpointed_iteration.txt"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("qwen3", tmp_path_factory.mktemp("verl") / "dense", num_hidden_layers=2)


@contextmanager
def held_back() -> Iterator[threading.Event]:
    """Background writes begin when the event is set: a slow disk."""
    from rl_backend.runtime import checkpoints

    write, go = checkpoints.write_training_state, threading.Event()

    def slow(*arguments: Any, **options: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            go.wait(60)
        write(*arguments, **options)

    checkpoints.write_training_state = slow
    try:
        yield go
    finally:
        go.set()
        checkpoints.write_training_state = write


def recorded(folder: Path) -> str | None:
    dist.barrier()
    return (folder / RECORD).read_text() if (folder / RECORD).exists() else None


def save_job(model: str, backend: str, folder: str) -> Mapping[str, Any]:
    """Records and directories as an actor saves thrice, of which a critic is slow to follow the second time."""
    found: dict[str, Any] = {}
    root = Path(folder)

    def kept() -> list[str]:
        dist.barrier()
        return sorted(path.name for path in root.glob("global_step_*") if (path / "actor").exists())

    with held_back() as go, open_engine(model, backend=backend, async_save=True) as engine:
        train_step(engine, 0)
        engine.save_checkpoint(f"{folder}/global_step_1/actor", None, 1, 1)
        straight = [train_step(engine, seed) for seed in (1, 2)]
        found["while it is written"] = recorded(root), (root / "global_step_1" / "actor" / "training_state").exists()
        go.set()
        engine._runtime.wait_for_checkpoint(engine.handle)
        found["written, not heard of"] = recorded(root)
        train_step(engine, 3)
        found["heard of"] = recorded(root), (root / "global_step_1" / "actor" / "training_state").exists()
        go.clear()
        critic = root / "global_step_2" / ".critic.saving"
        if dist.get_rank() == 0:
            critic.parent.mkdir()
            critic.touch()
        engine.save_checkpoint(f"{folder}/global_step_2/actor", None, 2, 1)
        found["kept before the commit"] = kept()
        go.set()
        engine._runtime.wait_for_checkpoint(engine.handle)
        train_step(engine, 4)
        found["kept after it"], found["without the critic"] = kept(), recorded(root)
        critic.unlink(missing_ok=True)
        go.clear()
        engine.save_checkpoint(f"{folder}/global_step_2/actor", None, 2, 2)
        go.set()
        # A second save under the same name waits for the first and takes its place.
        engine.save_checkpoint(f"{folder}/global_step_10/actor", None, 10, 2)
        found["after the last step, which waits"] = recorded(root)
    found["left"] = sorted(path.name for path in (root / "global_step_10" / "actor").iterdir())
    return {**found, "straight": straight}


def resume_job(model: str, backend: str, folder: str) -> list[Any]:
    with open_engine(model, backend=backend, async_save=True) as engine:
        train_step(engine, 7)
        engine.load_checkpoint(folder)
        return [train_step(engine, seed) for seed in (1, 2)]


def failed_job(model: str, folder: str) -> tuple[str, str | None, bool]:
    """What is said of a save that fails on rank 1 alone, the record, and whether a save after it works."""
    from rl_backend.runtime import checkpoints

    write = checkpoints.write_training_state

    def broken(temporary: Path, path: Path, tensors: Any, manifest: Any, group: Any) -> None:
        from rl_backend.checkpoint.training_state import raise_on_every_rank

        raise_on_every_rank("no space left" if dist.get_rank() == 1 else None, group)

    root = Path(folder)
    with open_engine(model, async_save=True) as engine:
        train_step(engine, 0)
        checkpoints.write_training_state = broken
        engine.save_checkpoint(f"{folder}/global_step_1/actor", None, 1, 1)
        checkpoints.write_training_state = write
        try:
            for seed in range(1, 200):
                train_step(engine, seed)
        except CheckpointError as error:
            said = str(error)
        else:
            said = "nothing"
        before = recorded(root)
        engine.save_checkpoint(f"{folder}/global_step_2/actor", None, 2, 1)
        engine.close()
        return said, before, recorded_without_ranks(root) == "2"


def recorded_without_ranks(folder: Path) -> str | None:
    return (folder / RECORD).read_text() if (folder / RECORD).exists() else None


@pytest.mark.shows(
    "verl: with async_save verl's record names a step once all its files are committed; a resumed run is the same"
)
@pytest.mark.parametrize("backend", sampled(["native", "bridge"], "native"))
def test_a_step_is_recorded_and_old_ones_go_only_when_its_files_are_committed(
    ranks: RankPool, model: Path, tmp_path: Path, backend: str
) -> None:
    results = ranks.run(save_job, str(model), backend, str(tmp_path), timeout=IMPORT_SECONDS)
    for found in results:
        assert found["while it is written"] == (None, False)
        assert found["written, not heard of"] is None
        assert found["heard of"] == ("1", True)
        assert found["kept before the commit"] == ["global_step_1", "global_step_2"]
        assert found["kept after it"] == ["global_step_2"]
        assert found["without the critic"] == "1"
        assert found["after the last step, which waits"] == "10"
        assert found["left"] == ["huggingface", "training_state"]


@pytest.mark.parametrize("backend", sampled(["native", "bridge"], "bridge"))
def test_a_run_resumed_from_a_save_in_the_background_equals(
    ranks: RankPool, model: Path, tmp_path: Path, backend: str
) -> None:
    straight = ranks.run(straight_job, str(model), backend, str(tmp_path), timeout=IMPORT_SECONDS)
    folder = str(tmp_path / "global_step_1" / "actor")
    assert ranks.run(resume_job, str(model), backend, folder, timeout=IMPORT_SECONDS) == straight


def straight_job(model: str, backend: str, folder: str) -> list[Any]:
    with held_back() as go, open_engine(model, backend=backend, async_save=True) as engine:
        train_step(engine, 0)
        engine.save_checkpoint(f"{folder}/global_step_1/actor", None, 1, 1)
        steps = [train_step(engine, seed) for seed in (1, 2)]
        go.set()
        # As verl's trainer does when training ends.
        engine.load_checkpoint(None)
        assert recorded(Path(folder)) == "1"
        return steps


def test_a_save_that_fails_in_the_background_is_raised_by_the_next_call_on_every_rank(
    ranks: RankPool, model: Path, tmp_path: Path
) -> None:
    for said, before, after in ranks.run(failed_job, str(model), str(tmp_path), timeout=IMPORT_SECONDS):
        assert "async_save of step 1 to" in said and "no space left" in said
        assert before is None and after


def sft_job(model: str, folder: str) -> bool:
    with open_engine(model, async_save=True) as engine:
        engine.save_checkpoint(f"{folder}/global_step_1", global_step=1)
        return (Path(folder) / "global_step_1" / "training_state").is_dir()


def test_a_save_waits_where_verls_trainer_records_it_at_once(ranks: RankPool, model: Path, tmp_path: Path) -> None:
    assert ranks.run(sft_job, str(model), str(tmp_path), timeout=IMPORT_SECONDS) == [True, True]
    assert [path.name for path in tmp_path.iterdir()] == ["global_step_1"]
