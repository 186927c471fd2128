"""What ``recover=memory`` and ``recover=checkpoint`` cost a step in which nothing is lost.

A group of one rank for each way of recovery, each with the model of ``checkpoint`` (63M parameters), takes steps in turns of
three. The first of a turn is not timed: what the step before has left to copy would fall into another group's turn.
Pairs are added to ``results/recovery.json``, with the medians of all so far.

    make bench NAME=recovery_overhead ARGS="--pairs 6"
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from actors.cluster.placement import usable_cores
from actors.cluster.session import ray_session
from actors.train.context import HandleRef
from actors.train.group import TrainGroup
from actors.train.loss import Loss
from actors.train.pulse import Recover
from benchmarks.checkpoint import MODEL
from benchmarks.report import machine, read_result, update_result
from rl_backend.contracts import NativeConfig, RuntimeConfig, TokenSequence

# Steps of more than two seconds on two cores.
SEQUENCES, LENGTH, TIMED = 4, 256, 2
SETTLE_SECONDS = 1.0
WAYS: tuple[Recover, ...] = ("off", "checkpoint", "memory")


def sequences() -> list[TokenSequence]:
    rows = torch.randint(0, MODEL["vocab_size"], (SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    return [TokenSequence(row[:-1], {"target_ids": row[1:], "loss_mask": torch.ones(LENGTH)}) for row in rows]


def turn(group: TrainGroup, model: HandleRef, data: Sequence[TokenSequence]) -> float:
    """Mean seconds of a step; waits until what the last one has left is done."""
    loss, began = Loss("rl_backend.algorithm:sft_loss"), 0.0
    for number in range(TIMED + 1):
        began = time.perf_counter() if number == 1 else began
        group.zero_grad(model)
        group.forward_backward(model, data, loss)
        group.optimizer_step(model)
    seconds = (time.perf_counter() - began) / TIMED
    time.sleep(SETTLE_SECONDS)
    return seconds


def measure(pairs: int, folder: Path) -> list[dict[str, float]]:
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**MODEL)).save_pretrained(folder)
    config, cores, data = (
        RuntimeConfig(hf_path=str(folder), backend_cfg=NativeConfig(device="cpu")),
        usable_cores(),
        sequences(),
    )
    # Groups reserve all cores each, and take turns.
    with ray_session(len(WAYS) * cores), ExitStack() as stack:
        groups = {way: stack.enter_context(TrainGroup(config, 1, cores, recover=way)) for way in WAYS}
        models = {way: group.build_model() for way, group in groups.items()}
        for way, group in groups.items():
            turn(group, models[way], data)
        # Each way is first, second and last as often: a machine that gets slower or faster favours none.
        orders = [(*WAYS[first:], *WAYS[:first]) for first in range(len(WAYS))]
        return [{way: turn(groups[way], models[way], data) for way in orders[pair % len(WAYS)]} for pair in range(pairs)]


def figures(pairs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """By how much a step takes longer, as a share of one without recovery: the median over pairs."""
    return {
        f"{way}_overhead_of_step": round(statistics.median(pair[way] / pair["off"] for pair in pairs) - 1, 4)
        for way in WAYS
        if way != "off"
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=6, help="more pairs")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(arguments.pairs, Path(folder))
    pairs = [*read_result("recovery").get("overhead_pairs", []), *found]
    update_result("recovery", {**figures(pairs), "overhead_pairs": pairs, "machine": machine()})
    print(figures(pairs))


if __name__ == "__main__":
    main()
