"""Pushes of the rectangles that ranks hold, and of what changed in them since the push before.

**layouts**: of four training ranks each sends the rectangles that it holds, or the source rank sends what all gather. Both
are :class:`~actors.sync.push.WeightSync` with all checks, over shared memory and over gloo, to running vLLM engines, in turn
in one run; figures are medians. ``largest_share`` is the largest number of bytes that one rank sends over those that the
source rank sends otherwise. Engines have two workers, each of which is sent what its loaders read: ``received_over_held`` is
that over the bytes of its parameters. After the timing, what the ranks wrote to shared memory is compared with a gathered
export, element by element.

**changed**: GRPO of SmolLM2-135M in bfloat16 on two ranks, on sums, at several learning rates. After each step a push sends
what changed, and another one all, over gloo on the loopback interface, where bytes cost little. Medians leave out the first
step: 8 % of the weights, which come from a quantised file, lie just between two bfloat16 numbers, and any step moves them.
``rates`` has what one thread copies with a digest in a second, and of what it finds a patch, by share of changed elements.

**computed**: bytes and seconds of pushes of Qwen3-235B-A22B and DeepSeek-V3 from 64 to 512 ranks to engines of eight
workers, by the plans of both sides, for links of 400 Gbit/s. Nothing is sent: the model of a worker is built on the meta
device, where its loaders say what they read. Layers that are alike are counted once and multiplied.

``python -m benchmarks.sharded_sync [layouts] [changed] [computed]`` writes ``results/sharded_sync.json``.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
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
from actors.rollout.vllm.capabilities import has_latent_attention
from actors.sync.report import PushReport
from actors.sync.staged_transports import PushPlan, describe_export
from benchmarks.report import interleave, machine, medians, read_result, require_sleeping_threads, update_result
from rl_backend.algorithm import rloo_advantages
from rl_backend.checkpoint.hf_reader import read_hf_config
from rl_backend.contracts import (
    NativeConfig,
    OptimizerConfig,
    ParallelConfig,
    RuntimeConfig,
    TensorInfo,
    TensorTile,
    TokenSequence,
)
from rl_backend.data import encode_messages, load_tokenizer
from rl_backend.lab.plan.memory import Workload
from rl_backend.lab.plan.native import native_memory
from rl_backend.runtime.bridge.config import BridgeConfig
from rl_backend.weights.changes import make_patch
from rl_backend.weights.inspection import copy_with_digest
from rl_backend.weights.staging import read_tensor
from rl_backend.weights.tiles import plan_tiles
from tests.support.libraries import smollm2
from tests.support.released_deepseek import DEEPSEEK_V3

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
WORKERS = 2
"""Of an engine."""
LAYOUTS: dict[str, tuple[str, NativeConfig | BridgeConfig]] = {
    "tp2 x dp2": ("dense", NativeConfig(device="cpu", parallel=ParallelConfig(tp=2))),
    "ep2 x dp2": ("mixture", NativeConfig(device="cpu", parallel=ParallelConfig(ep=2))),
    "pp2 x tp2": ("dense", NativeConfig(device="cpu", parallel=ParallelConfig(pp=2, tp=2))),
    "bridge, tp2 x dp2": ("dense", BridgeConfig(device="cpu", param_dtype="float32", parallel=ParallelConfig(tp=2))),
}
ENGINE_ARGS: dict[str, dict[str, Any]] = {"dense": {}, "mixture": {"enable_expert_parallel": True}}
LEARNING_RATES = {"lr_1e_6": 1e-6, "lr_1e_5": 1e-5, "lr_1e_4": 1e-4}
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
    """On the source rank, what in the segment of a push is not what a gathered export has."""
    model, dtype = context.handle(plan.handle), getattr(torch, plan.dtype)
    tiles: dict[str, list[TensorTile]] = {}
    for tile in plan.staged().tiles:
        tiles.setdefault(tile.tensor, []).append(tile)
    wrong = []
    for name, tensor in context.runtime.export_weights(model, dtype=dtype):
        for tile in tiles.get(name, ()) if context.rank == 0 else ():
            region = tuple(slice(*edges) for edges in tile.box)
            if not torch.equal(read_tensor(context.state[plan.key].buffer, tile), tensor[region]):
                wrong.append(str(tile))
    return wrong


def measure(
    train: TrainGroup, policy: HandleRef, rollout: RolloutGroup, transport: Any, runs: int, held: list[int]
) -> dict[str, Any]:
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
            plan = replace(plan, tiles=syncs["rectangles"]._tiles(plan, rollout.engine_set))
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
        "received_by_worker": reports["rectangles"][-1].received,
        "received_over_held": [got / own for got, own in zip(reports["rectangles"][-1].received, held, strict=True)],
        "sent_in_all": sum(sent["rectangles"]) / reports["rectangles"][-1].nbytes,
        "seconds": seconds,
        "medians": middle,
        "stage_medians": of_stage,
        "one_source_over_rectangles": middle["one_source"] / middle["rectangles"],
        "stage_one_source_over_rectangles": of_stage["one_source"] / of_stage["rectangles"],
    }


def held_by_workers(path: Path, engine_args: dict[str, Any]) -> list[int]:
    """Bytes of the parameters of each worker of an engine."""
    from tests.support.worker_models import worker_model

    found = []
    for worker in range(WORKERS):
        with worker_model(path, worker, WORKERS, **engine_args) as (model, _):
            found.append(sum(parameter.nbytes for parameter in model.parameters()))
    return found


def write_models(directory: Path) -> dict[str, list[int]]:
    """Writes the models, and returns what each worker of an engine of them holds."""
    for name, config in MODELS.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(directory / name)
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:  # vLLM takes memory that its process keeps
        return {name: pool.submit(held_by_workers, directory / name, ENGINE_ARGS[name]).result() for name in MODELS}


def measure_layout(name: str, directory: Path, runs: int, engines: int, held: dict[str, list[int]]) -> dict[str, Any]:
    model, options = LAYOUTS[name]
    path = directory / model
    backend = "bridge" if isinstance(options, BridgeConfig) else "native"
    config = RuntimeConfig(backend=backend, hf_path=str(path), backend_cfg=options)
    rollout_config = RolloutConfig(
        model_path=str(path),
        num_engines=engines,
        tensor_parallel=WORKERS,
        cores=(tuple(range(WORKERS)),) * engines,
        device="cpu",
        dtype="float32",
        max_model_len=256,
        kv_cache_gib=0.1,
        engine_args=ENGINE_ARGS[model],
    )
    with TrainGroup(config, num_ranks=RANKS) as train, RolloutGroup(rollout_config) as rollout:
        policy = train.build_model(forward_only=True)
        ways = ("shared_memory", "gloo")
        result = {way: measure(train, policy, rollout, way, runs, held[model]) for way in ways}
    for way, found in result.items():
        print(
            f"{name}, {way}: largest share {found['largest_share']:.3f}, sent in all {found['sent_in_all']:.3f}, "
            f"received over held {max(found['received_over_held']):.3f}; push {found['medians']['rectangles']:.3f} s "
            f"against {found['medians']['one_source']:.3f} s, stage {found['stage_medians']['rectangles']:.3f} s against "
            f"{found['stage_medians']['one_source']:.3f} s",
            flush=True,
        )
    return result


def measure_layouts(names: list[str], runs: int, engines: int) -> None:
    """Measures layouts, and writes each as soon as it is done; the file keeps its others."""
    facts = {"runs": runs, "engines": engines, "machine": machine()}
    with tempfile.TemporaryDirectory() as scratch:
        held = write_models(Path(scratch))
        for name in names:
            found = {**facts, **measure_layout(name, Path(scratch), runs, engines, held)}
            about = {
                "ranks": RANKS,
                "workers": WORKERS,
                "models": {key: {**SIZES, "type": each.model_type} for key, each in MODELS.items()},
            }
            update_result(
                "sharded_sync", {**about, "layouts": {**read_result("sharded_sync").get("layouts", {}), name: found}}
            )


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
        rates = {name: measure_changed(model, rollout, lr, steps) for name, lr in LEARNING_RATES.items()}
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


QWEN3_235B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "head_dim": 128,
    "num_key_value_heads": 4,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "hidden_act": "silu",
}
COMPUTED = {"Qwen3-235B-A22B": QWEN3_235B, "DeepSeek-V3": DEEPSEEK_V3}
COMPUTED_RANKS = (64, 128, 256, 512)
COMPUTED_LAYOUT = ParallelConfig(tp=4, ep=64)
COMPUTED_WORKERS = 8
COMPUTED_MORE = 4
"""Layers of a second model, from which those of the whole one are counted."""
PARTS = ("layouts", "changed", "computed")
LINK_GIB = 46.6
"""400 Gbit/s; each rank and each worker has one."""


def read_by_a_worker(path: Path, infos: Sequence[TensorInfo]) -> int:
    """Bytes that the first worker of an engine is sent; each worker has a part of every expert."""
    from actors.rollout.vllm.reads import record_reads
    from tests.support.worker_models import worker_model

    engine_args: dict[str, Any] = {"dtype": "bfloat16"}
    if has_latent_attention(read_hf_config(path)):
        engine_args["attention_backend"] = "CPU_MLA"
    with worker_model(path, 0, COMPUTED_WORKERS, device="meta", **engine_args) as (model, _):
        reads = record_reads(model, infos)
    return sum(tile.nbytes for tile in plan_tiles(infos, [reads]))


def count_bytes(fields: dict[str, Any], directory: Path) -> dict[str, int]:
    """Of a model: all bytes, what the first worker of an engine is sent, and what a rank sends at most, by ranks."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(fields))
    native = NativeConfig(parallel=COMPUTED_LAYOUT, param_dtype="bfloat16", activation_checkpointing="full", device="cpu")
    config = RuntimeConfig(hf_path=str(directory), backend_cfg=native)
    found: dict[str, int] = {}
    infos: Sequence[TensorInfo] = ()
    for ranks in COMPUTED_RANKS:
        _, infos, sent = native_memory(config, ranks, Workload())
        found[str(ranks)] = max(sent())
    (directory / "config.json").write_text(
        json.dumps({name: value for name, value in fields.items() if name != "quantization_config"})
    )
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        received = pool.submit(read_by_a_worker, directory, infos).result()
    return {"bytes": sum(info.nbytes for info in infos), "received": received, **found}


def compute_model(name: str, directory: Path) -> dict[str, Any]:
    """What pushes of a model take by the plans of its ranks and of an engine.

    Models of few layers and of some more say what each of the others adds, which are all alike: with hundreds of experts in
    each of a hundred layers the plans take an hour.
    """
    directory.mkdir()
    fields = COMPUTED[name]
    layers, few = fields["num_hidden_layers"], fields.get("first_k_dense_replace", 0) + 2
    counted = [
        count_bytes({**fields, "num_hidden_layers": number}, directory / str(number))
        for number in (few, few + COMPUTED_MORE)
    ]
    fewer, more = counted
    whole = {key: value + (more[key] - value) * (layers - few) // COMPUTED_MORE for key, value in fewer.items()}
    seconds = {key: value / GIB / LINK_GIB for key, value in whole.items()}
    for key, value in whole.items():
        print(f"{name}, {key}: {value / GIB:.2f} GiB, {seconds[key]:.3f} s", flush=True)
    return {
        "bytes": whole["bytes"],
        "counted_layers": [few, few + COMPUTED_MORE],
        "one_source_seconds": seconds["bytes"],
        "received_by_worker": whole["received"],
        "receive_seconds": seconds["received"],
        "ranks": {
            str(ranks): {"largest_sent": whole[str(ranks)], "send_seconds": seconds[str(ranks)]} for ranks in COMPUTED_RANKS
        },
    }


def measure_computed() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        models = {name: compute_model(name, Path(scratch) / name) for name in COMPUTED}
    layout = COMPUTED_LAYOUT.model_dump(exclude_defaults=True)
    return {"link_gib": LINK_GIB, "layout": layout, "workers": COMPUTED_WORKERS, "models": models}


def main() -> None:
    """Measures, prints and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("parts", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--runs", type=int, default=5, help="rounds of pushes; of changed, steps of GRPO")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    arguments = parser.parse_args()
    if "computed" in arguments.parts:
        update_result("sharded_sync", {"computed": measure_computed()})
    if set(arguments.parts) == {"computed"}:
        return
    require_sleeping_threads("benchmarks.sharded_sync")
    init_local_ray(num_cpus=16, include_dashboard=False, log_to_driver=False, object_store_memory=200 * 2**20)
    try:
        if "changed" in arguments.parts:
            update_result("sharded_sync", {"changed": measure_all_changed(arguments.runs)})
        if "layouts" in arguments.parts:
            measure_layouts(arguments.layouts, arguments.runs, arguments.engines)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
