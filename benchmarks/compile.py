"""Training speed of the native runtime with ``compile=True`` over that without, in tokens per second.

Both train the same random model of each family on the same sequences, in turn: the first step of each compiles, the others
are timed in pairs, and figures are medians. ``compile_seconds`` is what the first steps took beyond the others, with empty
caches; after ``break_even_steps`` of a workload that much has been saved. ``python -m benchmarks.compile`` writes
``results/compile.json``; with ``--only FAMILY`` one is measured anew and the others are kept.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import machine, medians, read_result, require_sleeping_threads, write_result
from benchmarks.train_speed import MODEL, Lengths, runtime_step, timed

VOCAB_SIZE = 8192
SIZES = {**MODEL, "vocab_size": VOCAB_SIZE, "num_hidden_layers": 4, "attention_dropout": 0.0}
_EXPERTS = {"num_experts_per_tok": 4, "moe_intermediate_size": 384}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma": {},
    "qwen3_moe": {**_EXPERTS, "num_experts": 8, "norm_topk_prob": True},
    "deepseek_v3": {
        **_EXPERTS,
        "head_dim": None,
        "num_key_value_heads": 8,
        "kv_lora_rank": 128,
        "q_lora_rank": 192,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 32,
        "v_head_dim": 64,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 2,
    },
}
WORKLOADS: Mapping[str, Lengths] = {
    "equal_lengths": [[256] * 4],
    "mixed_lengths": [[224, 32, 160, 96], [64, 256, 128, 192]],
}


def make_model(family: str, directory: Path) -> Path:
    """A random model of the benchmark's size."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    settings = {name: value for name, value in {**SIZES, **FAMILIES[family]}.items() if value is not None}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings)).save_pretrained(directory)
    return directory


def measure_family(family: str, runs: int) -> dict[str, Any]:
    """Both workloads of one family, checked to have computed the same losses."""
    from torch._dynamo.utils import counters

    counters.clear()
    with tempfile.TemporaryDirectory() as directory:
        model_dir = make_model(family, Path(directory))
        steps = {name: runtime_step(model_dir, "native", compile=name == "compiled") for name in ("eager", "compiled")}
        results = {name: _measure(lengths, steps, runs) for name, lengths in WORKLOADS.items()}
    seconds = sum(result["compile_seconds"] for result in results.values())
    for name, result in results.items():
        saved = result["eager_step_seconds"] - result["compiled_step_seconds"]
        result["break_even_steps"] = round(seconds / saved) if saved > 0 else None
        print(f"{family}, {name}: {result['compiled_over_eager']:.3f}, break even after {result['break_even_steps']} steps")
    return {
        "compiled_over_eager": {name: result["compiled_over_eager"] for name, result in results.items()},
        "compile_seconds": seconds,
        "graphs": counters["stats"]["unique_graphs"],
        "graph_breaks": sum(counters["graph_break"].values()),
        "workloads": results,
    }


def _measure(lengths: Lengths, steps: Mapping[str, Any], runs: int) -> dict[str, Any]:
    tokens = sum(map(sum, lengths))
    losses: dict[str, list[float]] = {name: [] for name in steps}
    measure = {name: timed(step, lengths, losses[name], VOCAB_SIZE) for name, step in steps.items()}
    first = {name: tokens / each() for name, each in measure.items()}
    values: dict[str, list[float]] = {name: [] for name in steps}
    for index in range(runs):
        for name in sorted(measure, reverse=bool(index % 2)):
            values[name].append(measure[name]())
    for eager, compiled in zip(losses["eager"], losses["compiled"], strict=True):
        if abs(eager - compiled) > 1e-4 * abs(eager):
            raise RuntimeError(f"losses differ: eager {eager}, compiled {compiled}")
    ratios = [compiled / eager for compiled, eager in zip(values["compiled"], values["eager"], strict=True)]
    seconds = {name: tokens / value for name, value in medians(values).items()}
    # The eager step warms up too, but has nothing to compile.
    return {
        "compiled_over_eager": statistics.median(ratios),
        "compile_seconds": max(0.0, first["compiled"] - seconds["compiled"]),
        "eager_step_seconds": seconds["eager"],
        "compiled_step_seconds": seconds["compiled"],
        "tokens_per_step": tokens,
        "tokens_per_second": values,
        "ratios": ratios,
        "first_losses": {name: series[0] for name, series in losses.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=9, help="timed pairs of steps of each family and workload")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=FAMILIES, action="append", help="this family (may be given several times)")
    arguments = parser.parse_args()
    require_sleeping_threads("benchmarks.compile")
    torch.set_num_threads(arguments.threads)
    for family in arguments.only or FAMILIES:
        facts = machine()
        with tempfile.TemporaryDirectory() as cache:
            # Code that was compiled before would cost nothing.
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
            measured = {**measure_family(family, arguments.runs), "machine": facts}
        known = {**read_result("compile").get("families", {}), family: measured}
        families = {name: known[name] for name in FAMILIES if name in known}
        ratios = {name: result["compiled_over_eager"] for name, result in families.items()}
        # After each, so that an interrupted run has measured something.
        path = write_result("compile", {"compiled_over_eager": ratios, "families": families, "model": SIZES})
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
