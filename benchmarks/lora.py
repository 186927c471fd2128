"""LoRA tenants: one pass for several against one after the other, pushes and memory.

``python -m benchmarks.lora`` writes ``results/lora.json``; ``--only PART`` runs some parts and keeps the others,
``--tenants N`` some points of curves. Parts:

- ``passes``: forward and backward passes of several tenants in one batch against one tenant after the other, each by its own
  handle, in processor time of one thread (``batched_over_swapped.passes``).
- ``actors``: whole steps through a ``TrainGroup``, in wall time (``batched_over_swapped.actors``). ``small`` is 8 tenants of
  16 tokens and rank 16. ``swapped_ahead`` submits every operation before it waits for one.
- ``push``: time of a push of the base over that of one tenant's adapter of rank 16, into one vLLM engine.
- ``memory``: numbers held for a tenant over its parameters, after a step. Ranks below 16 are padded.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
import torch

from actors.cluster.session import init_local_ray
from benchmarks import lora_curves as curves
from benchmarks.lora_push import measure_pushes
from benchmarks.report import machine, read_result, require_sleeping_threads, update_result
from rl_backend.contracts import OptimizerConfig
from rl_backend.contracts.lora import LoRAConfig
from rl_backend.data import pack_plan, plan_micro_batches
from rl_backend.runtime import create_runtime

PARTS = ("passes", "actors", "push", "memory")
RANKS_OF_MEMORY = (4, 8, 16, 64)


def memory_per_tenant(model: Path) -> dict[str, float]:
    """Rank -> float32 numbers in memory for a tenant that has taken a step, over its parameters."""
    runtime = create_runtime(curves.config_of(model))
    base = runtime.build_model(trainable=False)
    found = {}
    for rank in RANKS_OF_MEMORY:
        before = held_bytes()
        tenant = runtime.create_lora_adapter(base, LoRAConfig(rank=rank), OptimizerConfig(lr=1e-4))
        rows = curves.draw_sequences(tenant.lora_id, 64)
        runtime.forward_backward(tenant, pack_plan(rows, plan_micro_batches([64], 1, curves.MAX_TOKENS))[0], curves.LOSS)
        runtime.optimizer_step(tenant)
        del rows
        parameters = sum(tensor.numel() for _, tensor in runtime.export_lora_adapter(tenant))
        found[str(rank)] = (held_bytes() - before) / torch.float32.itemsize / parameters
        print(f"memory of rank {rank}: {found[str(rank)]:.2f} numbers for each parameter", flush=True)
        runtime.remove_lora_adapter(tenant)
    runtime.close()
    return found


def held_bytes() -> int:
    """Bytes of all memory that tensors of this process refer to."""
    gc.collect()
    storages = {}
    for found in gc.get_objects():
        if type(found) in (torch.Tensor, torch.nn.Parameter) and found.layout is torch.strided:
            storage = found.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def with_ray(measure: Any, *arguments: Any) -> Any:
    """Runs it in a cluster of this machine, with actors at the priority of this process."""
    init_local_ray(include_dashboard=False, log_to_driver=False, object_store_memory=400 * 2**20)
    try:
        return measure(*arguments)
    finally:
        ray.shutdown()


def settings() -> dict[str, Any]:
    return {
        "model": curves.MODEL,
        "sequences_of_tokens": {str(tokens): list(pair) for tokens, pair in curves.SEQUENCES.items()},
        "ranks": {name: list(ranks) for name, ranks in curves.RANKS.items()},
        "targets": list(LoRAConfig().targets),
        "max_tokens_per_micro_batch": curves.MAX_TOKENS,
        "training_ranks": 1,
        "dtype": "float32",
    }


def run_part(part: str, folder: Path, counts: Sequence[int], result: dict[str, Any]) -> None:
    """Measures and puts figures under their names in ``result``; of curves those of ``counts`` tenants."""
    if part in ("passes", "actors"):
        ratios = result.setdefault("batched_over_swapped", {})
        model = curves.write_model(folder)
        found = (
            curves.curves_of_passes(model, counts)
            if part == "passes"
            else with_ray(curves.curves_through_actors, model, counts)
        )
        held = ratios.setdefault(part, {})
        for kind, of_counts in found.items():
            held[kind] = {**held.get(kind, {}), **of_counts}
        ranks, tenants, tokens = curves.SMALL
        if part == "actors" and tenants in counts:
            small = found[ranks][str(tenants)][str(tokens)]
            ratios |= {"small": small["ratio"], "small_ahead": small["swapped_ahead_over_batched"]}
    elif part == "push":
        result |= with_ray(measure_pushes, folder)
    else:
        result["memory_per_tenant_over_parameters"] = memory_per_tenant(curves.write_model(folder))


def main() -> None:
    """Measures, prints and writes the result after each part."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", action="append", choices=PARTS, help="one part; may be given more than once")
    parser.add_argument("--tenants", action="append", type=int, choices=curves.TENANTS, help="points of curves; repeatable")
    arguments = parser.parse_args()
    require_sleeping_threads("benchmarks.lora")
    result = {key: value for key, value in read_result("lora").items() if key not in ("benchmark", "machine")}
    machines = result.setdefault("machines", {})
    result["settings"] = settings()
    for part in arguments.only or PARTS:
        with tempfile.TemporaryDirectory(prefix="rl-backend-lora-") as folder:
            # Of the time before the part, which makes load itself.
            machines[part] = machine()
            run_part(part, Path(folder), arguments.tenants or curves.TENANTS, result)
        print(f"{part}: wrote {update_result('lora', result)}", flush=True)


if __name__ == "__main__":
    main()
