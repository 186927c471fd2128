"""Memory of ranks and engines that take turns on the same cores, by phase, beside what a plan says.

GRPO of SmolLM2-135M on sums, with a real vLLM engine, in the order of one GPU: the engine samples and sleeps, the rank takes
its state from host memory, trains and gives it back; the engine's weights wake and are pushed, keys and values wake last.
``phases`` has the most that the processes held at one time in each (Pss, in GiB, of all steps). On a CPU a sleeping engine
gives back its keys and values, and keeps its weights; what the rank gives back is host memory as well. So ``emulated`` says
what a GPU would free beside. ``expected`` is what the rank takes by the plan of its tensors: with what its process held
before it had any, the staged weights, and copies of what is offloaded.

``python -m benchmarks.colocate`` writes ``results/colocate.json``.
"""

from __future__ import annotations

import argparse
import os
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
import torch

from actors import RankContext, RolloutConfig, RolloutGroup, TrainGroup, WeightSync, sample_seeds
from actors.cluster.session import init_local_ray
from benchmarks.process_use import pss
from benchmarks.report import machine, require_sleeping_threads, write_result
from benchmarks.sharded_sync import GIB, PROMPTS, SAMPLING, grpo_step
from rl_backend.contracts import NativeConfig, OptimizerConfig, RuntimeConfig, TokenSequence
from rl_backend.data import encode_messages, load_tokenizer
from rl_backend.lab.plan.make import make_plan
from rl_backend.lab.plan.memory import Workload
from tests.support.libraries import smollm2

KV_CACHE_GIB = 1.5
MICRO_BATCH = 1024


class Watch:
    """The most that processes held while a phase lasted."""

    def __init__(self, **pids: Sequence[int]) -> None:
        self._pids = pids
        self.phases: dict[str, dict[str, float]] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        ended, most = threading.Event(), self.phases.setdefault(name, {})

        def look() -> None:
            now = {who: sum(map(pss, pids)) / GIB for who, pids in self._pids.items()}
            for who, value in (now | {"both": sum(now.values())}).items():
                most[who] = max(most.get(who, 0.0), value)

        def watch() -> None:
            while not ended.wait(0.1):
                look()

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            look()


def own_pid(context: RankContext) -> int:
    return os.getpid()


def measure(steps: int) -> dict[str, Any]:
    model = smollm2()
    tokenizer, numbers = load_tokenizer(str(model)), random.Random(0)
    native = NativeConfig(device="cpu", optimizer=OptimizerConfig(lr=1e-5), activation_checkpointing="selective")
    config = RuntimeConfig(hf_path=str(model), max_tokens_per_micro_batch=MICRO_BATCH, backend_cfg=native)
    rollout_config = RolloutConfig(
        model_path=str(model),
        device="cpu",
        dtype="float32",
        max_model_len=256,
        kv_cache_gib=KV_CACHE_GIB,
        sleep_mode=True,
    )
    rewards, gaps = [], []
    with TrainGroup(config, num_ranks=1) as train, RolloutGroup(rollout_config) as rollout:
        ranks = train.run_on_ranks(own_pid)
        before = sum(map(pss, ranks)) / GIB
        policy = train.build_model()
        engines = [process.pid for _, process in rollout.engine_set.call("locate").values()]
        watch = Watch(ranks=ranks, engines=engines)
        with WeightSync(train, rollout, policy, transport="shared_memory") as sync:
            version = sync.push().version
            for step in range(steps):
                pairs = [(numbers.randrange(1, 20), numbers.randrange(1, 20)) for _ in range(PROMPTS)]
                asked = [encode_messages([{"role": "user", "content": f"What is {a} + {b}?"}], tokenizer) for a, b in pairs]
                with watch.phase("sampling"):
                    samples = rollout.generate(asked, SAMPLING, seeds=sample_seeds(0, step, PROMPTS, SAMPLING.n))
                    if {span.version for sample in samples for span in sample.version_spans} != {version}:
                        raise RuntimeError("samples are not of the weights that were pushed last")
                rollout.sleep(level=2)
                with watch.phase("training"):
                    train.to(policy, "device")
                    gaps.append(log_prob_gap(train, policy, samples))
                    rewards.append(grpo_step(train, policy, samples, [a + b for a, b in pairs], tokenizer.decode))
                    train.to(policy, "cpu", model=False)
                rollout.wake_up("weights")
                with watch.phase("push"):
                    version = sync.push().version
                train.to(policy, "cpu")
                rollout.wake_up("kv_cache")
                print(f"step {step}: reward {rewards[-1]:.3f}, gap {gaps[-1]:.2e}, {watch.phases}", flush=True)
    if max(gaps) > 1e-3:
        raise RuntimeError(f"trainer and engine differ by {max(gaps)} nats")
    phases, plan = watch.phases, planned(config)
    # What has left the device is a copy of the same size here, and what is on its way is there twice: the moments, while the
    # allocator still has what passes took. Half of the staged weights counts as the engine's.
    tensors = {
        "sampling": plan["rank_rollout"],
        "training": plan["rank_training"] + plan["rank_moments"],
        "push": plan["rank_weight_sync"],
    }
    expected = {phase: before + plan["engine_weights"] / 2 + value for phase, value in tensors.items()}
    most = {who: max(phase[who] for phase in phases.values()) for who in ("ranks", "engines")}
    return {
        "model": "SmolLM2-135M-Instruct, float32",
        "steps": steps,
        "kv_cache_gib": KV_CACHE_GIB,
        "phases": phases,
        "sum_of_both": sum(most.values()),
        "training_over_sum": phases["training"]["both"] / sum(most.values()),
        "emulated": {
            "freed": ["keys and values of engines"],
            "kept, which a GPU frees": ["weights of engines while ranks train", "what ranks hold while engines sample"],
        },
        "plan": plan,
        "ranks_before_models": before,
        "expected": expected,
        "rewards": rewards,
        "log_prob_gaps": gaps,
        "machine": machine(),
    }


def log_prob_gap(train: TrainGroup, policy: Any, samples: Sequence[Any]) -> float:
    """Mean difference between what engine and trainer say of the sampled tokens, in nats."""
    sequences = [TokenSequence.from_prompt_and_response(each.prompt_ids, each.response_ids) for each in samples]
    found = train.forward_backward(policy, sequences, None, forward_only=True).outputs["log_probs"]
    differences = [
        log_probs[len(each.prompt_ids) - 1 :][: len(each.response_ids)] - torch.as_tensor(each.log_probs)
        for log_probs, each in zip(found, samples, strict=True)
    ]
    return float(torch.cat(differences).abs().mean())


def planned(config: RuntimeConfig) -> dict[str, float]:
    """GiB of tensors; a process has its libraries beside them."""
    plan = make_plan(config, 1, Workload(sequence_length=256, micro_batch_tokens=MICRO_BATCH, sync_dtype="float32"))
    (rank,) = plan.ranks
    return {
        **{f"rank_{phase}": rank.total(phase, ()) / GIB for phase in ("training", "weight_sync", "rollout")},
        "rank_moments": rank.optimizer / GIB,
        "engine_weights": plan.sync_bytes / GIB,
        "engine_kv_cache": KV_CACHE_GIB,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()
    require_sleeping_threads("benchmarks.colocate")
    init_local_ray(num_cpus=16, include_dashboard=False, log_to_driver=False, object_store_memory=200 * 2**20)
    try:
        result = measure(arguments.steps)
    finally:
        ray.shutdown()
    path = write_result("colocate", result)
    print(f"training takes {result['training_over_sum']:.2f} of what both hold awake; wrote {path}")


if __name__ == "__main__":
    main()
