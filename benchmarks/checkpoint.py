"""What an asynchronous save costs training.

``async_stall_over_sync`` is the time for which ``save_checkpoint(asynchronous=True)`` holds training up, over the time of a
synchronous save of the same state, medians of ``--runs`` of each in turn; ``async_cost_over_sync`` adds what the steps take
longer while files are written. ``python -m benchmarks.checkpoint`` writes these into ``results/checkpoint.json``; its other
parts are records.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.report import interleave, machine, medians, read_result, update_result
from rl_backend import NativeConfig, RuntimeConfig, TokenSequence, create_runtime
from rl_backend.algorithm import sft_loss
from rl_backend.data import pack

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


def _seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def _sequence(seed: int) -> TokenSequence:
    ids = torch.randint(0, MODEL["vocab_size"], (LENGTH,), generator=torch.Generator().manual_seed(seed)).tolist()
    return TokenSequence.from_prompt_and_response(ids[:1], ids[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7, help="saves of each kind")
    with tempfile.TemporaryDirectory() as folder:
        found = async_save(Path(folder), parser.parse_args().runs)
    machines = read_result("checkpoint").get("machines", {}) | {"async_save": machine()}
    print(json.dumps(found), update_result("checkpoint", {**found, "machines": machines}), flush=True)


if __name__ == "__main__":
    main()
