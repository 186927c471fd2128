"""Worker process of one checkout for :mod:`benchmarks.against`: a step, a push, a save or a load per request.

Run by its path, with ``PYTHONPATH`` naming the checkout, whose own benchmarks it imports: only what every version has.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.pop(0)  # this folder; the checkout's root is what counts


def serve(answer: Callable[[str], Any]) -> None:
    """Answers each line of standard input with a line of JSON."""
    for line in sys.stdin:
        request = line.strip()
        print("ANSWER " + json.dumps("ready" if request == "ready" else answer(request)), flush=True)


def training(part: str, folder: Path, backend: str) -> None:
    """Steps on fresh sequences: tokens per second and loss. Also ``save DIR``, ``load DIR``, ``data WORKLOAD`` (no step)."""
    import torch

    train_speed: Any = importlib.import_module("benchmarks.train_speed")
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    module = importlib.import_module(f"benchmarks.{part}")
    model_dir = folder / part
    if not model_dir.exists():
        module.make_model(model_dir)
    made: list[Any] = []
    create = train_speed.create_runtime

    def remember(*arguments: Any, **options: Any) -> Any:
        runtime: Any = create(*arguments, **options)
        build = runtime.build_model

        def build_and_remember(*a: Any, **k: Any) -> Any:
            made.append((runtime, build(*a, **k)))
            return made[-1][1]

        runtime.build_model = build_and_remember
        return runtime

    train_speed.create_runtime = remember
    step = train_speed.runtime_step(model_dir, backend)
    runtime, handle = made[0]
    losses: list[float] = []
    skipping = False

    def step_or_skip(sequences: Any) -> float:
        return 0.0 if skipping else step(sequences)

    vocabulary = module.MODEL["vocab_size"]
    measures = {
        name: train_speed.timed(step_or_skip, lengths, losses, vocabulary)
        for name, lengths in train_speed.workloads(seed=0).items()
    }

    def answer(request: str) -> Any:
        nonlocal skipping
        verb, _, argument = request.partition(" ")
        if verb == "save":
            runtime.save_checkpoint(handle, argument)
            return None
        if verb == "load":
            runtime.load_checkpoint(handle, argument)
            return None
        skipping = verb == "data"
        return measures[argument or verb](), losses[-1]

    serve(answer)


def pushing(folder: Path) -> None:
    """``push``: seconds of one push of :mod:`benchmarks.weight_sync`."""
    import ray

    weight_sync: Any = importlib.import_module("benchmarks.weight_sync")
    folder.mkdir(parents=True, exist_ok=True)
    weight_sync.init_local_ray(include_dashboard=False, log_to_driver=False, object_store_memory=200 * 2**20)
    try:
        model = weight_sync.make_model(folder / "model")
        config = weight_sync.RolloutConfig(
            model_path=str(folder / "model"), device="cpu", dtype="float32", max_model_len=256, kv_cache_gib=0.25
        )
        with weight_sync.BenchmarkGroup(config) as rollout, tempfile.TemporaryDirectory(dir=folder) as scratch:
            trainer = weight_sync.Trainer(model, rollout, Path(scratch))
            serve(lambda _: trainer.through_memory())
    finally:
        ray.shutdown()


if __name__ == "__main__":
    part, folder, *rest = sys.argv[1:]
    if part == "weight_sync":
        pushing(Path(folder))
    else:
        training(part, Path(folder), *rest)
