"""Peak memory of a rank that trains SmolLM2-135M-Instruct on this machine's CPUs, over what ``rl-backend plan`` says.

Each case is a process of its own, without Ray, in the environment of a rank: steps of one micro-batch of 4,900 tokens. Of
full training it also says how fast it is over products of matrices, before and after, which needs an idle machine. ``make
libraries`` installs the model.

    make bench NAME=real_memory                                     all cases, into results/real_model.json
    make bench NAME=real_memory ARGS="--only native_full_float32"
    make bench NAME=real_memory ARGS="--case native_full_float32"   one, in this process, in whatever environment it has
    make bench NAME=real_memory ARGS="--largest"                    three steps of the largest micro-batch that check accepts
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from actors.cluster.placement import memory_environment, thread_environment
from benchmarks.process_use import watch
from benchmarks.real_model import save
from benchmarks.report import machine, read_result
from benchmarks.train_speed import next_token_loss
from rl_backend.contracts import OptimizerConfig, PackedBatch, RuntimeConfig
from rl_backend.contracts.lora import LoRAConfig
from rl_backend.lab.plan.make import GIB, Plan, make_plan
from rl_backend.lab.plan.memory import Workload
from rl_backend.runtime import create_runtime
from tests.support.libraries import smollm2

CASES = {
    f"{backend}_{kind}_{dtype}": (backend, kind == "lora", dtype)
    for backend in ("native", "bridge")
    for kind in ("full", "lora")
    for dtype in ("float32", "bfloat16")
}
TOKENS, LENGTH, RANK = 4900, 98, 16
PRODUCTS, SIDE = 20, 2048
SMALLEST, LONGEST, STEPS = 1024, 512, 3
"""Of :func:`largest`: the first micro-batch that is tried, tokens of a row, steps."""


def measure(case: str, *, tokens: int, steps: int, threads: bool) -> dict[str, Any]:
    """Steps of one micro-batch in this process, and its resident memory.

    Args:
        threads: each step runs in another thread, as an actor's may.
    """
    backend, has_lora, dtype = CASES[case]
    options = {"optimizer": OptimizerConfig(lr=1e-5), "device": "cpu", "param_dtype": dtype}
    config = RuntimeConfig(backend=backend, hf_path=str(smollm2()), backend_cfg=options, max_tokens_per_micro_batch=tokens)
    plan = planned(config, has_lora=has_lora, dtype=dtype)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    rates = [product_rate(dtype)]
    runtime = create_runtime(config)
    before = resident("VmRSS")
    handle = runtime.build_model(trainable=not has_lora)
    if has_lora:
        handle = runtime.create_lora_adapter(handle, LoRAConfig(rank=RANK), OptimizerConfig(lr=1e-5))
    after: list[int] = []
    seconds: list[float] = []
    cpu_seconds: list[float] = []

    def step(number: int, size: int) -> None:
        ids = torch.randint(1, 49_000, (size,), generator=torch.Generator().manual_seed(number))
        lengths = torch.tensor([LENGTH] * (size // LENGTH))
        data = [PackedBatch(ids, lengths, meta={"batch_num_tokens": size - len(lengths)})]
        started, used = time.perf_counter(), time.process_time()
        runtime.zero_grad(handle)
        with runtime.train_mode(handle):
            runtime.forward_backward(handle, data, next_token_loss)
        runtime.optimizer_step(handle)
        seconds.append(time.perf_counter() - started)
        cpu_seconds.append(time.process_time() - used)
        after.append(resident("VmRSS"))

    # A step of one sequence makes the moments, which the others hold.
    for number, size in enumerate((LENGTH, *[tokens] * steps)):
        if threads:
            thread = threading.Thread(target=step, args=(number, size))
            thread.start()
            thread.join()
        else:
            step(number, size)
    peak, expected = resident("VmHWM"), max(plan.peak(phase) for phase in ("training", "optimizer_step"))
    rates.append(product_rate(dtype))
    speed: dict[str, float] = {}
    if not has_lora:
        # The first step takes its memory from the kernel.
        rate = 6 * plan.num_parameters * tokens / statistics.median(seconds[2:] or seconds[1:])
        speed = {"training_over_products": rate / max(rates)}
    return {
        **speed,
        "products_per_second": rates,
        "plan_gib": expected / GIB,
        "peak_gib": peak / GIB,
        "plan_over_measured": expected / peak,
        "before_model_gib": before / GIB,
        "after_steps_gib": [each / GIB for each in after],
        "tokens_per_second": [tokens / each for each in seconds[1:]],
        "tokens_per_cpu_second": [tokens / each for each in cpu_seconds[1:]],
        "load": os.getloadavg()[0],
    }


def planned(config: RuntimeConfig, *, has_lora: bool, dtype: str) -> Plan:
    lora: dict[str, Any] = {"tenants": 1, "lora": LoRAConfig(rank=RANK)} if has_lora else {}
    tokens = config.max_tokens_per_micro_batch
    work = Workload(sequence_length=LENGTH, micro_batch_tokens=tokens, num_micro_batches=1, sync_dtype=dtype, **lora)
    return make_plan(config, 1, work)


def product_rate(dtype: str) -> float:
    """Floating-point operations a second of the best of some products of square matrices."""
    factor = torch.ones(SIDE, SIDE, dtype=getattr(torch, dtype))
    times = []
    for _ in range(PRODUCTS):
        start = time.perf_counter()
        torch.mm(factor, factor)
        times.append(time.perf_counter() - start)
    return 2.0 * SIDE**3 / min(times)


def largest() -> dict[str, Any]:
    """SFT of rows that fill the largest micro-batch, a power of two, that ``rl-backend check`` accepts in what is free now;
    and what it says of the next.
    """
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        # Of one token each word, and a few beside them.
        row = json.dumps({"prompt": "the", "answer": " the" * (LONGEST - 12)})

        def command(name: str, tokens: int) -> list[str]:
            data = folder / f"{tokens}.jsonl"
            data.write_text(f"{row}\n" * (tokens // LONGEST))
            sizes = {"max-tokens-per-micro-batch": tokens, "batch-size": tokens // LONGEST, "steps": STEPS}
            options = {"model": smollm2(), "dataset": data, "max-prompt-tokens": 8, "run-dir": folder / "run", **sizes}
            words = [word for option, value in options.items() for word in (f"--{option}", str(value))]
            return [sys.executable, "-m", "rl_backend.cli", *name.split(), *words]

        tokens = SMALLEST
        while True:
            check = subprocess.run(command("check sft", 2 * tokens), capture_output=True, text=True, check=False)
            if check.returncode:
                break
            tokens *= 2
        refusal = next(line for line in (check.stdout + check.stderr).splitlines() if "max-tokens-per-micro-batch" in line)
        run, metrics = command("sft", tokens), folder / "run" / "metrics.jsonl"
        use = watch(run, lines_of=metrics, log=folder / "log.txt", environment={"OMP_WAIT_POLICY": "PASSIVE"})
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return {
        "tokens": tokens,
        "refused": {"tokens": 2 * tokens, "status": check.returncode, "said": refusal.strip()},
        "steps": len(lines),
        "tokens_computed": [line["tokens_computed"] for line in lines],
        "rank_gib": use.peak("rank") / GIB,
        "all_gib": use.peak() / GIB,
        "machine": machine(),
    }


def resident(name: str) -> int:
    """Bytes of this process: ``VmRSS`` now, ``VmHWM`` at most so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def in_a_process(case: str) -> dict[str, Any]:
    """A case in the environment of a rank."""
    command = (sys.executable, "-m", "benchmarks.real_memory", "--case", case)
    environment = {**os.environ, **thread_environment(), **memory_environment()}
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(output.stdout.splitlines()[-1])
    print(case, json.dumps(found), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--largest", action="store_true", help="the largest micro-batch that check accepts")
    parser.add_argument("--threads", action="store_true", help="each step in another thread")
    arguments = parser.parse_args()
    if arguments.case is not None:
        print(json.dumps(measure(arguments.case, tokens=arguments.tokens, steps=arguments.steps, threads=arguments.threads)))
        return
    if arguments.largest:
        save({"largest_micro_batch": largest()})
        return
    for case in arguments.only:
        # Each is kept at once: together they take longer than some will wait.
        known = read_result("real_model").get("memory", {}).get("cases", {})
        found = known | {case: in_a_process(case)}
        shares = {name: each["plan_over_measured"] for name, each in found.items()}
        memory = {"tokens": TOKENS, "cases": found, "machine": machine()}
        save({"memory": memory, "plan_over_measured": shares})


if __name__ == "__main__":
    main()
