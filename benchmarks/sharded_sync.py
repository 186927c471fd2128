"""Pushes of the rectangles that ranks hold, and of what changed in them since the push before.

**layouts**: of four training ranks each sends the rectangles that it holds, or the source rank sends what all gather. Both
are :class:`~actors.sync.push.WeightSync` with all checks, over shared memory and over gloo, to running vLLM engines, in turn
in one run; figures are medians. ``largest_share`` is the largest number of bytes that one rank sends over those that the
source rank sends otherwise. After the timing, what the ranks wrote to shared memory is compared with a gathered export,
tensor by tensor.

**changed**: GRPO of SmolLM2-135M in bfloat16 on two ranks, on sums, at several learning rates. After each step a push sends
what changed, and another one all, over gloo on the loopback interface, where bytes cost little. Medians leave out the first
step: 8 % of the weights, which come from a quantised file, lie just between two bfloat16 numbers, and any step moves them.
``rates`` has what one thread copies with a digest in a second, and of what it finds a patch, by share of changed elements.

``python -m benchmarks.sharded_sync [layouts] [changed]`` writes ``results/sharded_sync.json``.
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from actors import (
    HandleRef,
    Loss,
    RankContext,
    RolloutConfig,
    RolloutGroup,
    Sample,
    SamplingConfig,
    TrainGroup,
    WeightSync,
    sample_seeds,
)
from actors.cluster.session import init_local_ray
from actors.sync.report import PushReport
from actors.sync.staged_transports import PushPlan, describe_export
from benchmarks.report import interleave, machine, medians, require_sleeping_threads, update_result
from rl_backend.algorithm import rloo_advantages
from rl_backend.contracts import NativeConfig, OptimizerConfig, ParallelConfig, RuntimeConfig, TokenSequence
from rl_backend.data import encode_messages, load_tokenizer
from rl_backend.weights.changes import make_patch
from rl_backend.weights.inspection import copy_with_digest
from rl_backend.weights.staging import plan_layout, read_tensor
from tests.support.libraries import smollm2

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
LEARNING_RATES = (1e-6, 1e-5, 1e-4)
SAMPLING = SamplingConfig(n=8, temperature=1.0, max_new_tokens=24)
PROMPTS = 4
GIB = 2**30


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


def measure_layouts(names: list[str], runs: int, engines: int) -> dict[str, Any]:
    facts = machine()
    with tempfile.TemporaryDirectory() as scratch:
        layouts = {name: measure_layout(name, Path(scratch), runs, engines) for name in names}
    return {
        "ranks": RANKS,
        "engines": engines,
        "runs": runs,
        "models": {name: {**SIZES, "type": config.model_type} for name, config in MODELS.items()},
        "layouts": layouts,
        "machine": facts,
    }


def grpo_step(
    train: TrainGroup, policy: HandleRef, samples: list[Sample], sums: list[int], text: Callable[..., str]
) -> float:
    """One update; the mean reward, 1 for an answer whose last number is the sum."""
    numbers = [re.findall(r"\d+", text(each.response_ids)) for each in samples]
    right = [float(bool(found) and int(found[-1]) == sums[index // SAMPLING.n]) for index, found in enumerate(numbers)]
    advantages = rloo_advantages(torch.tensor(right), group_size=SAMPLING.n)
    sequences = [
        TokenSequence.from_prompt_and_response(
            each.prompt_ids,
            each.response_ids,
            response_fields={"rollout_log_probs": each.log_probs, "old_log_probs": each.log_probs},
            sequence_fields={"advantages": advantage},
        )
        for each, advantage in zip(samples, advantages, strict=True)
    ]
    train.zero_grad(policy)
    train.forward_backward(policy, sequences, Loss("rl_backend.algorithm:grpo_loss"))
    if not train.optimizer_step(policy).ok:
        raise RuntimeError("a gradient was not finite")
    return statistics.fmean(right)


def measure_changed(model: Path, rollout: RolloutGroup, lr: float, steps: int) -> dict[str, Any]:
    """Figures of one learning rate, by step."""
    tokenizer, numbers = load_tokenizer(str(model)), random.Random(0)
    native = NativeConfig(device="cpu", param_dtype="bfloat16", optimizer=OptimizerConfig(lr=lr))
    config = RuntimeConfig(hf_path=str(model), max_tokens_per_micro_batch=2048, backend_cfg=native)
    rows: dict[str, list[float]] = {}
    with TrainGroup(config, num_ranks=2) as train:
        policy = train.build_model()
        with (
            WeightSync(train, rollout, policy, transport="gloo", changed_only=True) as changed,
            WeightSync(train, rollout, policy, transport="gloo") as whole,
        ):
            rollout.forget_weights()
            whole.push()  # connects
            for step in range(steps):
                # What the whole push has put into the engine's segment is not what the other sync sent.
                if changed.push().changed is not None:
                    raise RuntimeError("a patch was sent over another sync's weights")
                pairs = [(numbers.randrange(1, 20), numbers.randrange(1, 20)) for _ in range(PROMPTS)]
                asked = [encode_messages([{"role": "user", "content": f"What is {a} + {b}?"}], tokenizer) for a, b in pairs]
                samples = rollout.generate(asked, SAMPLING, seeds=sample_seeds(0, step, PROMPTS, SAMPLING.n))
                reward = grpo_step(train, policy, samples, [a + b for a, b in pairs], tokenizer.decode)
                patch, all_of_it = changed.push(), whole.push()
                if patch.changed is None:
                    raise RuntimeError("all weights were sent, not what changed")
                row = {
                    "reward": reward,
                    "changed_share": patch.changed / (patch.nbytes / 2),
                    "bytes_over_whole": sum(patch.sent) / sum(all_of_it.sent),
                    "push_seconds": patch.seconds["total"],
                    "push_seconds_whole": all_of_it.seconds["total"],
                    "stage_seconds": patch.seconds["stage"],
                    "stage_seconds_whole": all_of_it.seconds["stage"],
                }
                for name, value in row.items():
                    rows.setdefault(name, []).append(value)
                print(f"lr {lr:g}, step {step}: {row}", flush=True)
    middle = medians({name: values[1:] for name, values in rows.items()})
    return {
        "bytes": all_of_it.nbytes,
        "steps": rows,
        "medians": middle,
        "push_seconds_over_whole": middle["push_seconds"] / middle["push_seconds_whole"],
        "stage_seconds_over_whole": middle["stage_seconds"] / middle["stage_seconds_whole"],
    }


def measure_rates(runs: int) -> dict[str, Any]:
    """GiB a second of one thread, in bfloat16: copying with a digest, and finding a patch."""
    torch.manual_seed(0)
    before = torch.randn(2**26).to(torch.bfloat16)
    place = torch.empty_like(before)

    def seconds_of(work: Callable[[], Any]) -> float:
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    found: dict[str, Any] = {}
    for share in (0.001, 0.01, 0.1):
        now = before.clone()
        now[torch.rand(now.numel()) < share] *= 1.5
        seconds: dict[str, list[float]] = {"copy": [], "patch": []}
        for _ in range(runs):
            seconds["copy"].append(seconds_of(partial(copy_with_digest, place, now)))
            place.copy_(before)
            seconds["patch"].append(seconds_of(partial(make_patch, place, now)))
        rates = {name: before.nbytes / GIB / statistics.median(each) for name, each in seconds.items()}
        found[str(share)] = rates | {"copy_over_patch": rates["copy"] / rates["patch"]}
    return found


def measure_all_changed(steps: int) -> dict[str, Any]:
    model = smollm2()
    config = RolloutConfig(model_path=str(model), device="cpu", dtype="bfloat16", max_model_len=256, kv_cache_gib=0.5)
    with RolloutGroup(config) as rollout:
        rates = {f"{lr:g}": measure_changed(model, rollout, lr, steps) for lr in LEARNING_RATES}
    return {
        "model": "SmolLM2-135M-Instruct",
        "ranks": 2,
        "steps": steps,
        "prompts": PROMPTS,
        "samples": SAMPLING.n,
        "by_learning_rate": rates,
        "rates": measure_rates(steps),
        "machine": machine(),
    }


def main() -> None:
    """Measures, prints and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("parts", nargs="*", choices=("layouts", "changed"), default=["layouts", "changed"])
    parser.add_argument("--runs", type=int, default=5, help="rounds of pushes; of changed, steps of GRPO")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    arguments = parser.parse_args()
    require_sleeping_threads("benchmarks.sharded_sync")
    init_local_ray(num_cpus=16, include_dashboard=False, log_to_driver=False, object_store_memory=200 * 2**20)
    try:
        if "changed" in arguments.parts:
            path = update_result("sharded_sync", {"changed": measure_all_changed(arguments.runs)})
        if "layouts" in arguments.parts:
            path = update_result("sharded_sync", measure_layouts(arguments.layouts, arguments.runs, arguments.engines))
    finally:
        ray.shutdown()
    print(f"written to {path}")


if __name__ == "__main__":
    main()
