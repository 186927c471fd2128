"""Checkpoints: what an asynchronous save costs training, how far other layouts part, and what a kill in a save leaves.

``async_stall_over_sync`` is the time for which ``save_checkpoint(asynchronous=True)`` holds training up, over the time of a
synchronous save of the same state, medians of ``--runs`` of each in turn; ``async_cost_over_sync`` adds what the steps take
longer while files are written. ``layouts`` has, for each pair of layouts, the largest relative difference of the losses of
five steps after the checkpoint to those without a break. ``kill_trials`` counts saves killed at every event of the file
system and at random moments, after which the checkpoint before was loaded and the partial one refused. With ``--only`` one
part is measured anew and the others are kept.
``python -m benchmarks.checkpoint`` writes ``results/checkpoint.json``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.report import RESULTS, interleave, machine, medians, write_result
from rl_backend import NativeConfig, RuntimeConfig, TokenSequence, create_runtime
from rl_backend.algorithm import sft_loss
from rl_backend.data import pack
from tests.support.bridge_state import write_tiny_mixture
from tests.support.checkpoint_layouts import DENSE, MIXTURE, continue_in
from tests.support.models import write_tiny_qwen3
from tests.support.rank_pool import RankPool

MODEL: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
SEQUENCES, LENGTH = 4, 128


def async_save(folder: Path, runs: int) -> dict[str, Any]:
    """One rank of the native runtime on a model of some 60 million parameters in float32."""
    model = folder / "model"
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**MODEL)).save_pretrained(model)
    runtime: Any = create_runtime(
        RuntimeConfig(backend="native", hf_path=str(model), backend_cfg=NativeConfig(device="cpu"))
    )
    handle = runtime.build_model()
    batch = pack([_sequence(seed) for seed in range(SEQUENCES)], {"batch_num_tokens": SEQUENCES * LENGTH, "dp_size": 1})

    def step() -> None:
        runtime.zero_grad(handle)
        runtime.forward_backward(handle, [batch], sft_loss)
        runtime.optimizer_step(handle)

    saves = iter(folder / f"save-{index}" for index in range(10 * runs + 10))
    step_seconds: list[float] = []
    overhead: list[float] = []

    def synchronous() -> float:
        return _seconds(lambda: runtime.save_checkpoint(handle, next(saves)))

    def asynchronous() -> float:
        """Seconds of the call; what the steps after it take longer than usual goes to ``overhead``."""
        usual = _seconds(step)
        path = next(saves)
        stall = _seconds(lambda: runtime.save_checkpoint(handle, path, asynchronous=True))
        slower = 0.0
        while runtime.checkpoint_is_pending(handle):
            slower += _seconds(step) - usual
        step_seconds.append(usual)
        overhead.append(slower)
        return stall

    step()
    first = asynchronous()
    step_seconds.clear()
    overhead.clear()
    found = interleave(runs, {"synchronous": synchronous, "asynchronous": asynchronous})
    middle = medians({**found, "step": step_seconds, "slower": overhead})
    files = [file for file in (folder / "save-0").iterdir() if file.suffix == ".distcp"]
    runtime.close()
    return {
        "async_stall_over_sync": middle["asynchronous"] / middle["synchronous"],
        "async_cost_over_sync": (middle["asynchronous"] + middle["slower"]) / middle["synchronous"],
        "first_stall_over_sync": first / middle["synchronous"],
        "seconds": middle,
        "bytes": sum(file.stat().st_size for file in files),
        "runs": runs,
    }


def layouts(folder: Path, runs: int) -> dict[str, Any]:
    """Every pair of the tests; the state after loading is compared bit by bit on the way."""
    models = {
        "dense": (write_tiny_qwen3(folder / "dense", num_hidden_layers=4), DENSE),
        "mixture": (write_tiny_mixture(folder / "mixture"), MIXTURE),
    }
    table: list[dict[str, Any]] = []
    with closing(RankPool(4)) as ranks:
        for kind, (model, pairs) in models.items():
            for saver, loaders in pairs.items():
                saves = folder / f"{kind} {saver}"
                saves.mkdir()
                for loader, difference in continue_in(ranks, model, saves, saver, loaders, steps=5).items():
                    row = {"model": kind, "saved_by": str(saver), "loaded_by": str(loader), **difference}
                    table.append(row)
                    print(json.dumps(row), flush=True)
    return {"layouts": table, "layouts_largest_loss_difference": max(row["loss"] for row in table)}


def kill_trials(folder: Path, runs: int) -> dict[str, Any]:
    """Every failpoint and 20 random moments; see :mod:`tests.support.kill_trials`."""
    model = write_tiny_qwen3(folder / "model")
    command = [sys.executable, "-m", "tests.support.kill_trials", str(model), str(folder / "trials")]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the trials failed:\n{done.stderr}")
    return {"kill_trials": json.loads(done.stdout)}


PARTS: dict[str, Callable[[Path, int], dict[str, Any]]] = {
    "async_save": async_save,
    "layouts": layouts,
    "kill_trials": kill_trials,
}
"""Each gives entries of the result."""


def _seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def _sequence(seed: int) -> TokenSequence:
    ids = torch.randint(0, MODEL["vocab_size"], (LENGTH,), generator=torch.Generator().manual_seed(seed)).tolist()
    return TokenSequence.from_prompt_and_response(ids[:1], ids[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=PARTS, action="append", help="this part (may be given several times)")
    parser.add_argument("--runs", type=int, default=7, help="saves of each kind")
    arguments = parser.parse_args()
    path = RESULTS / "checkpoint.json"
    for part in arguments.only or PARTS:
        with tempfile.TemporaryDirectory() as folder:
            found = PARTS[part](Path(folder), arguments.runs)
        result: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        machines = {**result.get("machines", {}), part: machine()}
        write_result("checkpoint", {**result, **found, "machines": machines})
        print(f"{part}: {json.dumps({name: value for name, value in found.items() if name != 'layouts'})}", flush=True)


if __name__ == "__main__":
    main()
