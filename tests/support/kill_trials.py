"""Saves of two ranks that are killed, and what is found afterwards.

``python -m tests.support.kill_trials MODEL FOLDER`` prints a JSON object. Each trial loads the checkpoint before, trains a
step and saves, in the background beside another step where that is asked for; all ranks end by SIGKILL at one event of the
file system, or at a random moment of the save. Ranks are forks of a process that has imported everything and computed
nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from actors.run.manifest import read_run_checkpoint
from actors.run.store import RunCheckpoints
from rl_backend import NativeConfig, OptimizerConfig, RuntimeConfig, create_runtime
from rl_backend.algorithm import sft_loss
from rl_backend.contracts import CheckpointError
from rl_backend.runtime.bridge.config import BridgeConfig
from rl_backend.weights.inspection import tensor_digest
from tests.support.kills import kill_at
from tests.support.sft_batches import random_token_sequences, sft_micro_batches

RANKS = 2
TRIAL_SECONDS = 300.0


class Failpoint(NamedTuple):
    """The rank that is killed first, in place of its ``event``-th change of the file system."""

    rank: int
    event: int


class Way(NamedTuple):
    """How is saved.

    Attributes:
        backend: native or bridge.
        asynchronous: files are written while another step is trained.
    """

    backend: str = "native"
    asynchronous: bool = False


class Trainer:
    """A rank with a model that has taken steps, and the checkpoints under ``root``."""

    def __init__(self, model: Path, root: Path, way: Way) -> None:
        options = {"native": NativeConfig, "bridge": BridgeConfig}[way.backend]
        self.runtime: Any = create_runtime(
            RuntimeConfig(
                hf_path=str(model),
                backend=way.backend,
                backend_cfg=options(device="cpu", optimizer=OptimizerConfig(lr=1e-3)),
            )
        )
        self.asynchronous = way.asynchronous
        self.handle = self.runtime.build_model()
        self.store = RunCheckpoints(root, keep_last=2)

    def load(self, step: int) -> None:
        """Loads a checkpoint of the store and compares the weights with those that were saved."""
        checkpoint = read_run_checkpoint(self.store.root / f"step-{step:08d}")
        self.runtime.load_checkpoint(self.handle, checkpoint.model("policy"))
        assert self.weights() == checkpoint.state["weights"], f"step {step} was loaded with other weights"

    def weights(self) -> dict[str, str]:
        return {name: tensor_digest(tensor.contiguous()) for name, tensor in self.runtime.export_weights(self.handle)}

    def step(self) -> None:
        sequences = random_token_sequences([6, 9], 128)
        batches = sft_micro_batches(sequences, 1, dp_rank=self.handle.data_parallel_rank, dp_size=RANKS)
        self.runtime.zero_grad(self.handle)
        self.runtime.forward_backward(self.handle, batches, sft_loss)
        assert self.runtime.optimizer_step(self.handle).ok

    def save(self, step: int, weights: dict[str, str]) -> None:
        self.runtime.save_checkpoint(self.handle, self.store.draft(step) / "policy", asynchronous=self.asynchronous)
        if self.asynchronous:
            self.step()
            self.runtime.wait_for_checkpoint(self.handle)
        if dist.get_rank() == 0:
            self.store.commit(step, {"weights": weights})

    def refuses(self, directory: Path) -> bool:
        try:
            self.runtime.load_checkpoint(self.handle, directory)
        except CheckpointError:
            return True
        return False


def save_and_die(rank: int, model: Path, folder: Path, way: Way, failpoint: Failpoint | None) -> None:
    """A rank's part of a trial; it says in ``folder`` when the save begins, and what it took when it comes to its end."""
    trainer = Trainer(model, folder / "root", way)
    last = max(trainer.store.steps(), default=0)
    if last:
        trainer.load(last)
    trainer.step()
    weights = trainer.weights()
    dist.barrier()
    mine = failpoint is not None and failpoint.rank == rank
    events = kill_at(failpoint.event if failpoint and mine else -1, str(folder / "root"))
    (folder / f"saving-{rank}").touch()
    started = time.perf_counter()
    trainer.save(last + 1, weights)
    found = {"events": events(), "seconds": time.perf_counter() - started}
    (folder / f"saved-{rank}.json").write_text(json.dumps(found))


def look(model: Path, folder: Path, way: Way, trials: Sequence[Path], whole: Path) -> None:
    """What a run that starts after each trial finds, on one rank; ``whole`` is a trial that was not killed."""
    trainer = Trainer(model, folder, way)
    weights = read_run_checkpoint(whole / "root" / "latest").state["weights"]
    found = {"previous_loaded": 0, "newest_loaded": 0, "partial": 0, "refused": 0}
    for trial in trials:
        trainer.store = RunCheckpoints(trial / "root", keep_last=2)
        newest = trainer.store.latest()
        assert newest is not None and newest.step in (1, 2)
        trainer.load(newest.step)
        found["newest_loaded"] += 1
        trainer.load(1)
        found["previous_loaded"] += 1
        draft = trainer.store.root / ".step-00000002.incomplete"
        if draft.exists():
            assert newest.step == 1
            found["partial"] += 1
            found["refused"] += _is_refused_or_whole(trainer, draft, weights)
        trainer.store.clean_up()
        assert sorted(entry.name for entry in trainer.store.root.glob(".*")) == []
    (folder / "found.json").write_text(json.dumps(found))


def _is_refused_or_whole(trainer: Trainer, draft: Path, weights: dict[str, str]) -> bool:
    """What a kill just before a rename leaves lacks its name alone: what of it can be loaded must be ``weights``."""
    try:
        if read_run_checkpoint(draft).state["weights"] != weights:
            return False
    except CheckpointError:
        pass
    parts = [part for part in draft.iterdir() if part.is_dir()]
    return all(trainer.refuses(part) or trainer.weights() == weights for part in parts)


def fork_ranks(count: int, store: Path, work: Callable[[int], None]) -> list[int]:
    """Process ids of ``count`` ranks over gloo that do ``work``."""
    children = []
    for rank in range(count):
        child = os.fork()
        if child == 0:
            _run(rank, count, store, work)
        children.append(child)
    return children


def _run(rank: int, count: int, store: Path, work: Callable[[int], None]) -> NoReturn:
    status = 1
    try:
        dist.init_process_group("gloo", store=dist.FileStore(str(store), count), rank=rank, world_size=count)
        work(rank)
        status = 0
    except BaseException:  # noqa: BLE001 - told by the status
        traceback.print_exc()
    finally:
        os._exit(status)


def wait_for(ranks: Sequence[int]) -> bool:
    """True when all came to their end, False when one was killed, whose peers then are killed too."""
    left, killed, failed = set(ranks), False, False
    deadline = time.monotonic() + TRIAL_SECONDS
    while left:
        for rank in tuple(left):
            ended, status = os.waitpid(rank, os.WNOHANG)
            if ended:
                left.discard(rank)
                killed = killed or status == signal.SIGKILL
                failed = failed or status != 0
        if failed or time.monotonic() > deadline:
            for rank in left:
                # The peer of a rank that was killed may fail before that one is found.
                ended, status = os.waitpid(rank, os.WNOHANG)
                killed = killed or (bool(ended) and status == signal.SIGKILL)
                if not ended:
                    os.kill(rank, signal.SIGKILL)
                    os.waitpid(rank, 0)
            assert killed, "the ranks of a trial hang, or one failed with the traceback above"
            return False
        time.sleep(0.002)
    return True


def run_trials(model: Path, folder: Path, way: Way, every: int, num_random: int, seed: int) -> dict[str, int]:
    """Kills at each ``every``-th failpoint and at ``num_random`` moments."""

    def ranks_of(trial: Path, failpoint: Failpoint | None = None) -> list[int]:
        return fork_ranks(RANKS, trial / "store", lambda rank: save_and_die(rank, model, trial, way, failpoint))

    def trial_of(name: str) -> Path:
        shutil.copytree(start / "root", folder / name / "root", symlinks=True, copy_function=os.link)
        return folder / name

    start = folder / "start"
    (start / "root").mkdir(parents=True)
    assert wait_for(ranks_of(start)), "the first save was killed"
    whole = trial_of("whole")
    assert wait_for(ranks_of(whole)), "a save without a failpoint was killed"
    facts = [json.loads((whole / f"saved-{rank}.json").read_text()) for rank in range(RANKS)]
    failpoints = [Failpoint(rank, event) for rank in range(RANKS) for event in range(facts[rank]["events"])][::every]
    trials = []
    for failpoint in failpoints:
        trials.append(trial_of(f"rank-{failpoint.rank}-event-{failpoint.event}"))
        assert not wait_for(ranks_of(trials[-1], failpoint)), f"{failpoint} was not reached"
    generator = random.Random(seed)
    for number in range(num_random):
        trials.append(trial_of(f"random-{number}"))
        ranks = ranks_of(trials[-1])
        while not all((trials[-1] / f"saving-{rank}").exists() for rank in range(RANKS)):
            time.sleep(0.001)
        time.sleep(generator.uniform(0, facts[0]["seconds"]))
        for rank in ranks:
            os.kill(rank, signal.SIGKILL)
        for rank in ranks:
            os.waitpid(rank, 0)
    assert wait_for(fork_ranks(1, folder / "store", lambda rank: look(model, folder, way, trials, whole)))
    found: dict[str, int] = json.loads((folder / "found.json").read_text())
    return {"failpoints": len(failpoints), "random": num_random, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--backend", choices=("native", "bridge"), default="native")
    parser.add_argument("--asynchronous", action="store_true")
    parser.add_argument("--every", type=int, default=1, help="of the failpoints, each so many-th")
    parser.add_argument("--random", type=int, default=20, help="kills at random moments")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    way = Way(arguments.backend, arguments.asynchronous)
    found = run_trials(arguments.model, arguments.folder, way, arguments.every, arguments.random, arguments.seed)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
