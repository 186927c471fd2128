"""Pushes of four training ranks: each sends the rectangles that it holds, or the source rank sends what all gather.

Both are :class:`~actors.sync.push.WeightSync` with all checks, over shared memory and over gloo, to running vLLM engines, in
turn in one run; figures are medians. ``largest_share`` is the largest number of bytes that one rank sends over those that
the source rank sends otherwise. After the timing, what the ranks wrote to shared memory is compared with a gathered export,
tensor by tensor. ``python -m benchmarks.sharded_sync`` writes ``results/sharded_sync.json``.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from actors import HandleRef, RankContext, RolloutConfig, RolloutGroup, TrainGroup, WeightSync
from actors.cluster.session import init_local_ray
from actors.sync.report import PushReport
from actors.sync.staged_transports import PushPlan, describe_export
from benchmarks.report import interleave, machine, medians, require_sleeping_threads, write_result
from rl_backend.contracts import NativeConfig, ParallelConfig, RuntimeConfig
from rl_backend.weights.staging import plan_layout, read_tensor

RANKS = 4
SIZES = {
    "vocab_size": 16_000,
    "hidden_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
MODELS = {
    "dense": Qwen3Config(**SIZES, intermediate_size=2304),
    "mixture": Qwen3MoeConfig(
        **SIZES, intermediate_size=2304, moe_intermediate_size=512, num_experts=8, num_experts_per_tok=2
    ),
}
LAYOUTS = {
    "tp2 x dp2": ("dense", ParallelConfig(tp=2)),
    "ep2 x dp2": ("mixture", ParallelConfig(ep=2)),
    "pp2 x tp2": ("dense", ParallelConfig(pp=2, tp=2)),
}


class OneSource:
    """Ranks that gather whole tensors, which the source rank sends."""

    def __init__(self, train: TrainGroup) -> None:
        self._train = train

    def run_on_ranks(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        results = self._train.run_on_ranks(function, *args, **kwargs)
        if function is describe_export:
            return [(device, host, plan and replace(plan, parts=())) for device, host, plan in results]
        return results


def differing(context: RankContext, plan: PushPlan) -> list[str]:
    """On the source rank, names of tensors in the segment of a push that are not those of a gathered export."""
    layout = {info.name: info for info in plan_layout(plan.infos)[0]}
    model, dtype = context.handle(plan.handle), getattr(torch, plan.dtype)
    wrong = []
    for name, tensor in context.runtime.export_weights(model, dtype=dtype):
        if context.rank == 0 and not torch.equal(read_tensor(context.state[plan.key].buffer, layout[name]), tensor):
            wrong.append(name)
    return wrong


def measure(train: TrainGroup, policy: HandleRef, rollout: RolloutGroup, transport: Any, runs: int) -> dict[str, Any]:
    """Figures of one transport; raises where a tensor is not the one that the ranks have."""
    ways: dict[str, Any] = {"rectangles": train, "one_source": OneSource(train)}
    syncs = {name: WeightSync(ranks, rollout, policy, transport=transport) for name, ranks in ways.items()}
    reports: dict[str, list[PushReport]] = {name: [] for name in ways}

    def push(name: str) -> float:
        reports[name].append(syncs[name].push())
        return reports[name][-1].seconds["total"]

    try:
        # Segments, connections and mappings are made once.
        for name in ways:
            push(name)
            reports[name].clear()
        seconds = interleave(runs, {name: partial(push, name) for name in ways})
        if transport == "shared_memory":
            plan = syncs["rectangles"]._plan()
            if wrong := train.run_on_ranks(differing, plan)[0]:
                raise RuntimeError(f"{len(wrong)} tensors were not what the ranks have: {', '.join(wrong[:8])}")
    finally:
        for sync in syncs.values():
            sync.close()
    sent = {name: reports[name][-1].sent for name in ways}
    stage = {name: [report.seconds["stage"] for report in of_way] for name, of_way in reports.items()}
    middle, of_stage = medians(seconds), medians(stage)
    return {
        "bytes": reports["rectangles"][-1].nbytes,
        "sent_by_rank": sent,
        "largest_share": max(sent["rectangles"]) / max(sent["one_source"]),
        "sent_in_all": sum(sent["rectangles"]) / reports["rectangles"][-1].nbytes,
        "seconds": seconds,
        "medians": middle,
        "stage_medians": of_stage,
        "one_source_over_rectangles": middle["one_source"] / middle["rectangles"],
        "stage_one_source_over_rectangles": of_stage["one_source"] / of_stage["rectangles"],
    }


def measure_layout(name: str, directory: Path, runs: int, engines: int) -> dict[str, Any]:
    model, parallel = LAYOUTS[name]
    path = directory / model
    if not path.exists():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(MODELS[model]).save_pretrained(path)
    config = RuntimeConfig(hf_path=str(path), backend_cfg=NativeConfig(device="cpu", parallel=parallel))
    rollout_config = RolloutConfig(
        model_path=str(path), num_engines=engines, device="cpu", dtype="float32", max_model_len=256, kv_cache_gib=0.1
    )
    with TrainGroup(config, num_ranks=RANKS) as train, RolloutGroup(rollout_config) as rollout:
        policy = train.build_model(forward_only=True)
        result = {way: measure(train, policy, rollout, way, runs) for way in ("shared_memory", "gloo")}
    for way, found in result.items():
        print(
            f"{name}, {way}: largest share {found['largest_share']:.3f}, sent in all {found['sent_in_all']:.3f}; push "
            f"{found['medians']['rectangles']:.3f} s against {found['medians']['one_source']:.3f} s, stage "
            f"{found['stage_medians']['rectangles']:.3f} s against {found['stage_medians']['one_source']:.3f} s",
            flush=True,
        )
    return result


def main() -> None:
    """Measures, prints and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    arguments = parser.parse_args()
    require_sleeping_threads("benchmarks.sharded_sync")
    facts = machine()
    init_local_ray(num_cpus=16, include_dashboard=False, log_to_driver=False, object_store_memory=200 * 2**20)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            layouts = {
                name: measure_layout(name, Path(scratch), arguments.runs, arguments.engines) for name in arguments.layouts
            }
    finally:
        ray.shutdown()
    path = write_result(
        "sharded_sync",
        {
            "ranks": RANKS,
            "engines": arguments.engines,
            "runs": arguments.runs,
            "models": {name: {**SIZES, "type": config.model_type} for name, config in MODELS.items()},
            "layouts": layouts,
            "machine": facts,
        },
    )
    print(f"written to {path}")


if __name__ == "__main__":
    main()
