"""Training speed of the native runtime's mixtures of experts against transformers', in tokens per second.

The workloads and the steps are those of :mod:`benchmarks.train_speed`. The model is a Qwen3-MoE whose head takes about a
sixth of the arithmetic: experts are what is measured. transformers computes its experts with the implementation that it
chooses by default, which the result names. OpenMP threads that wait sleep, as in an actor; the result's ``machine`` says so.
``python -m benchmarks.moe_speed`` writes ``results/moe_speed.json``.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

from benchmarks.report import machine, require_sleeping_threads, write_result
from benchmarks.train_speed import measure_workload, runtime_step, transformers_step, workloads

MODEL = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "moe_intermediate_size": 384,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


def make_model(directory: Path) -> Path:
    """A random model of the benchmark's size."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**MODEL)).save_pretrained(directory)
    return directory


def experts_implementation(model_dir: Path) -> str:
    """The experts implementation that transformers takes by default."""
    from transformers import AutoModelForCausalLM

    return str(AutoModelForCausalLM.from_pretrained(model_dir).config._experts_implementation)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="timed steps of each implementation and workload")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    require_sleeping_threads("benchmarks.moe_speed")
    torch.set_num_threads(arguments.threads)
    facts = machine()
    with tempfile.TemporaryDirectory() as directory:
        model_dir = make_model(Path(directory))
        experts = experts_implementation(model_dir)
        steps = {"native": runtime_step(model_dir, "native"), "transformers": transformers_step(model_dir)}
        results = {
            name: measure_workload(name, lengths, steps, arguments.runs, MODEL["vocab_size"])
            for name, lengths in workloads(seed=0).items()
        }
    path = write_result(
        "moe_speed",
        {
            "native_over_transformers": {name: result.pop("ratios")["transformers"] for name, result in results.items()},
            "transformers_experts_implementation": experts,
            "workloads": results,
            "model": MODEL,
            "machine": facts,
        },
    )
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
