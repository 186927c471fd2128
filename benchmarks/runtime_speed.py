"""Training speed of the native runtime against the bridge runtime and transformers, in tokens per second.

The workloads, model and rules of ``benchmarks.train_speed``, with all three in one process and interleaved, on the GPU in
bfloat16 where there is one. ``native_over_bridge`` and ``native_over_transformers`` are for sequences of equal length; where
lengths differ, transformers, and the bridge without Transformer Engine, pad what the native runtime packs.
``python -m benchmarks.runtime_speed`` writes ``results/runtime_speed.json``.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

from benchmarks.report import machine, write_result
from benchmarks.train_speed import MODEL, make_model, measure_workload, runtime_step, transformers_step, workloads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="timed steps of each implementation and workload")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    on = (arguments.device, "bfloat16" if arguments.device == "cuda" else "float32")
    torch.set_num_threads(arguments.threads)
    facts = machine()
    with tempfile.TemporaryDirectory() as directory:
        model_dir = make_model(Path(directory))
        steps = {name: runtime_step(model_dir, name, *on) for name in ("native", "bridge")}
        steps["transformers"] = transformers_step(model_dir, *on)
        results = {
            name: measure_workload(name, lengths, steps, arguments.runs) for name, lengths in workloads(seed=0).items()
        }
    ratios = {name: result.pop("ratios") for name, result in results.items()}
    path = write_result(
        "runtime_speed",
        {
            **{f"native_over_{other}": ratio for other, ratio in ratios["equal_lengths"].items()},
            **{f"native_over_{other}_mixed_lengths": ratio for other, ratio in ratios["mixed_lengths"].items()},
            "device": on[0],
            "dtype": on[1],
            "workloads": results,
            "model": MODEL,
            "machine": facts,
        },
    )
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
