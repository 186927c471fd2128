"""A run whose model is one number on a group without Ray, to be stopped between its steps.

python -m tests.support.stopped_run FOLDER MODEL SAVE_EVERY      begins a step of some seconds, and says so
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from actors import Run, Session
from actors.run import StopRequest, run_command
from examples.sft import SFTConfig

STEPS = 6


class Weight:
    """A training group of one model, whose weight changes with every step by the step's datum."""

    num_ranks, wanted_ranks, peak_memory, wants_boundary, has_room = 1, 1, 0, False, False
    recoveries: tuple[Any, ...] = ()
    reshapes: tuple[Any, ...] = ()
    ranks = (SimpleNamespace(rank=0, node_ip="127.0.0.1", node_id="here"),)

    def __init__(self, config: SFTConfig) -> None:
        self.config = config.runtime_config()
        self.value = 1.0

    def update(self, datum: int) -> float:
        self.value = 0.9 * self.value + 0.01 * datum
        return self.value

    def say_recoveries(self, say: Callable[[str], None]) -> None:
        self.say = say

    def steady(self) -> AbstractContextManager[None]:
        return nullcontext()

    def bound(self, handle: Any, saved: Path, committed: Path) -> None:
        assert not saved.exists() and committed.is_dir()

    def run_on_ranks(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        return [(True, True)]

    def build_model(self, **_: Any) -> Any:
        return SimpleNamespace(name="weight")

    def save_checkpoint(self, handle: Any, path: Path, *, asynchronous: bool = False, hf: bool = False) -> None:
        path.mkdir(parents=True)
        (path / "manifest.json").write_text(json.dumps(self.value))

    def load_checkpoint(self, handle: Any, path: Path) -> None:
        self.value = json.loads((path / "manifest.json").read_text())

    def checkpoint_is_pending(self, handle: Any) -> bool:
        return False

    @property
    def wait_for_checkpoint(self) -> Any:
        return SimpleNamespace(submit=lambda handle: SimpleNamespace(result=lambda timeout: None))


def config_of(folder: Path, model: Path | str, **changes: Any) -> SFTConfig:
    (folder / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    options = {"model": str(model), "dataset": str(folder / "train.jsonl"), "run_dir": str(folder / "run"), "steps": STEPS}
    return SFTConfig(
        **{**options, "dtype": "float32", "metrics_to": None, "max_prompt_tokens": 8, "resume": "auto", **changes}
    )


def train(
    config: SFTConfig,
    during: Callable[[int], None] = lambda step: None,
    stop: StopRequest | None = None,
    *,
    grad_norm: float = 1.0,
) -> float:
    """Takes the run's steps; ``during`` is called in the middle of each. Returns the last weight."""
    group: Any = Weight(config)
    with Run(config, Session([group]), stop=stop) as run:
        model = run.build_model("weight")
        run.begin("Test", {"weight": model})
        for step in run.steps():
            during(step)
            run.end_step({"weight": group.update(step), "step_ok": 1.0, "grad_norm": grad_norm})
        return float(group.value)


def main() -> None:
    folder, model, save_every = sys.argv[1:]

    def work(step: int) -> None:
        if step == 2:
            sys.stdout.write("works\n")
            sys.stdout.flush()
            time.sleep(2)

    train(config_of(Path(folder), model, save_every=int(save_every)), work)


if __name__ == "__main__":
    run_command(main)
