"""Pushes of a frozen base and of one LoRA tenant over it, into one running vLLM engine."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from actors import HandleRef, RolloutGroup, TrainGroup
from actors.rollout.config import RolloutConfig, SamplingConfig
from actors.sync.push import WeightSync
from benchmarks import weight_sync
from benchmarks.lora_curves import LOSS, MODEL, config_of, create_tenants, draw_sequences, write_model
from benchmarks.report import medians
from rl_backend.contracts import TokenSequence

RANK = 16
RUNS = 15
PUSHES_OF_A_RUN = 3
MODELS = {"250M": weight_sync.MODEL, "small": MODEL}
INCLUDES = {
    "base": "WeightSync.push() of the frozen base through shared memory, with all its checks; adapters are loaded again",
    "adapter": "WeightSync.push() of the tenant: export, digests, checks, load in the engine, comparison of what was loaded",
    "adapter_after_base": "the first push of the tenant after one of the base, with its canary",
}


def measure_pushes(folder: Path) -> dict[str, Any]:
    """The ratio of the larger model, and milliseconds of both."""
    found = {name: _measure(write_model(folder / name, settings)) for name, settings in MODELS.items()}
    return {
        "base_push_over_adapter_push": found["250M"]["ratio"],
        "push_ms_median": {name: figures["ms"]["adapter"] for name, figures in found.items()},
        "pushes": {**found, "includes": INCLUDES, "rank": RANK, "runs": RUNS, "models": MODELS},
    }


def _measure(model: Path) -> dict[str, Any]:
    rollout_config = RolloutConfig(
        model_path=str(model),
        device="cpu",
        dtype="float32",
        max_model_len=256,
        kv_cache_gib=0.25,
        max_adapters=2,
        max_adapter_rank=RANK,
    )
    with TrainGroup(config_of(model), num_ranks=1) as train, RolloutGroup(rollout_config) as rollout:
        base = train.build_model(trainable=False)
        ((name, tenant),) = create_tenants(train, base, [RANK], 1).handles.items()
        seconds: dict[str, list[float]] = {"base": [], "adapter_after_base": [], "adapter": []}
        phases: dict[str, list[float]] = {}
        with WeightSync(train, rollout, base) as of_base, WeightSync(train, rollout, tenant) as of_tenant:
            for run in range(RUNS + 1):
                counted = seconds if run else {key: [] for key in seconds}
                counted["base"].append(_push(of_base)[0])
                for push in range(1 + PUSHES_OF_A_RUN):
                    _step(train, tenant)
                    took, of_phases = _push(of_tenant)
                    counted["adapter" if push else "adapter_after_base"].append(took)
                    for phase, value in of_phases.items() if run and push else ():
                        phases.setdefault(phase, []).append(value)
            nbytes = {"base": of_base.push().nbytes, "adapter": of_tenant.push().nbytes}
            gap = _gap(train, rollout, tenant, name)
    if not gap <= weight_sync.LARGEST_GAP:
        raise RuntimeError(f"after a push the log-probs differ by {gap:.2e}; limit {weight_sync.LARGEST_GAP}")
    middle = {key: 1e3 * value for key, value in medians(seconds).items()}
    print(f"push, {model.name}: base {middle['base']:.1f} ms, adapter {middle['adapter']:.1f} ms", flush=True)
    return {
        "ratio": middle["base"] / middle["adapter"],
        "ms": middle,
        "ms_of_adapter_phases": {phase: 1e3 * value for phase, value in medians(phases).items()},
        "seconds": seconds,
        "bytes": nbytes,
        "largest_log_prob_gap": gap,
    }


def _push(sync: WeightSync) -> tuple[float, Mapping[str, float]]:
    """Seconds, and those of each phase."""
    started = time.perf_counter()
    report = sync.push()
    return time.perf_counter() - started, report.seconds


def _step(train: TrainGroup, tenant: HandleRef) -> None:
    train.zero_grad(tenant)
    train.forward_backward(tenant, draw_sequences(tenant.lora_id, 16), LOSS)
    if not train.optimizer_step(tenant).ok:
        raise RuntimeError("an optimizer step was skipped")


def _gap(train: TrainGroup, rollout: RolloutGroup, tenant: HandleRef, name: str) -> float:
    """Largest difference between the engine's log-probs through the adapter and the tenant's."""
    (sample,) = rollout.generate([list(range(3, 40))], SamplingConfig(max_new_tokens=8), adapter=name)
    row = TokenSequence.from_prompt_and_response(sample.prompt_ids, sample.response_ids)
    (log_probs,) = train.forward(tenant, [row]).output("log_probs")
    mine = log_probs[len(sample.prompt_ids) - 1 : -1]
    return float((mine - torch.tensor(sample.log_probs)).abs().max())
