"""Steps on sequences that begin alike, with these tokens computed once and for every sequence. Prompts are not trained.

``dense`` is the model of ``train_speed``, ``deltanet`` one of its size of which three layers in four have gated DeltaNet.
``512x512x16`` are 16 answers of 512 tokens to a prompt of 512; ``tree`` are episodes that branch twice. As in a run, both
sides have one ``max_tokens_per_micro_batch`` and plan their micro-batches by it: 2,560 computed tokens, or those of a group
where these are more (``budget``). A step has as many ``groups`` as one micro-batch then takes computed. Both sides thus work
on products of about equal sizes. Beside each ratio stands the one that is possible: floating-point operations without over
with, as ``rl-backend plan`` counts them: layers by rows, scores by pairs of tokens, the head by the log-probs that are
wanted. ``nothing`` is the time that is spent looking for beginnings in sequences that have none in common; ``shortest`` says
from which length on sharing gains. ``routes`` samples groups from a mixture of experts by vLLM and compares what it sent the
tokens of a prompt to in each of its answers: only where that is equal does a replay of these routes (R3) share.
Each row is a process of its own, in the environment of a rank, and kept at once: about half an hour together.

    python -m benchmarks.shared_prefixes                          all rows, into results/shared_prefixes.json
    python -m benchmarks.shared_prefixes --only "dense tree"      some, beside those that the file has
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from actors.cluster.placement import memory_environment, thread_environment
from benchmarks.report import machine, read_result, update_result
from benchmarks.train_speed import LEARNING_RATE, MODEL, make_model, next_token_loss
from rl_backend.contracts import TARGET_IDS, NativeConfig, OptimizerConfig, PackedBatch, RuntimeConfig, TokenSequence
from rl_backend.contracts.replay import ROUTES
from rl_backend.data import pack, plan_micro_batches, plan_shared, prefixes
from rl_backend.lab.plan.native import measure_stage
from rl_backend.parallel.groups import fake_rank
from rl_backend.runtime import create_runtime
from rl_backend.runtime.native.build import build_module
from rl_backend.runtime.native.layout import describe_model
from tests.support.libraries import smollm2
from tests.support.memory import peak_memory, reset_peak_memory

GROUPS = ("256x64x8", "512x512x16", "1024x128x16", "2048x256x8")
ROWS = (
    *(f"dense {work}" for work in (*GROUPS, "tree")),
    *(f"deltanet {work}" for work in (*GROUPS, "tree")),
    "smollm2 256x64x8",
    "dense nothing",
    "dense shortest",
    "mixture routes",
)
TREE = (256, 3, 128, 3, 128)
"""Tokens of the beginning; branches, and tokens of each; those of each of these, and their tokens."""
BUDGET = 2560
"""Computed tokens of a micro-batch."""
SHORTEST = (16, 32, 64)
MIXTURE: Mapping[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "initializer_range": 0.06,
}
ROUTED = (8, 8, 500, 64)
"""Prompts, answers to each, and tokens of a prompt and of an answer."""
MOST_ROUNDS = 5
SHARED_BY = (2, 8)
SHORT_ROUNDS = 11
RESULT = "shared_prefixes"


def make_deltanet(directory: Path, **changes: Any) -> Path:
    fields: dict[str, Any] = {f"linear_{name}": 8 for name in ("num_key_heads", "num_value_heads")}
    fields |= {f"linear_{name}": 64 for name in ("key_head_dim", "value_head_dim")}
    rotary = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    fields |= {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": None}
    return _write(directory, "qwen3_5_text", {**MODEL, **fields, "rope_parameters": rotary, **changes})


def make_mixture(directory: Path, **changes: Any) -> Path:
    return _write(directory, "qwen3_moe", {**MIXTURE, "bos_token_id": None, "eos_token_id": 1, **changes})


def _write(directory: Path, model_type: str, fields: Mapping[str, Any]) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **fields)
    AutoModelForCausalLM.from_config(config).to(torch.float32).save_pretrained(directory)
    return directory


MODELS: Mapping[str, Callable[..., Path]] = {
    "dense": make_model,
    "mixture": make_mixture,
    "deltanet": make_deltanet,
    "smollm2": lambda directory, **_: smollm2(),
}


def drawn(generator: torch.Generator, length: int) -> Tensor:
    return torch.randint(1, MODEL["vocab_size"], (length,), generator=generator)


def sequences_of(work: str, divisor: int, seed: int = 0) -> tuple[list[Tensor], int]:
    """The sequences of a group, and how many tokens of each are its prompt."""
    generator = torch.Generator().manual_seed(seed)
    if work == "nothing":
        return [drawn(generator, 512 // divisor) for _ in range(8)], 1
    if work == "tree":
        prompt, branches, middle, leaves, end = TREE
        root, found = drawn(generator, prompt // divisor), []
        for _ in range(branches):
            past = torch.cat((root, drawn(generator, middle // divisor)))
            found += [torch.cat((past, drawn(generator, end // divisor))) for _ in range(leaves)]
        return found, len(root)
    prompt, answer, answers = map(int, work.split("x"))
    root = drawn(generator, prompt // divisor)
    return [torch.cat((root, drawn(generator, answer // divisor))) for _ in range(answers)], len(root)


def micro_batches_of(sequences: Sequence[Tensor], prompt: int, budget: int, *, shares: bool) -> list[PackedBatch]:
    """A step, planned as a training group plans it for one rank."""
    plan = plan_shared(sequences, 1, budget) if shares else None
    plan = plan or plan_micro_batches([*map(len, sequences)], 1, budget)
    total = sum(len(ids) - prompt for ids in sequences)
    return [batch_of([sequences[index] for index in each], prompt, total) for each in plan.micro_batches[0]]


def batch_of(sequences: Sequence[Tensor], prompt: int, total: int = 0) -> PackedBatch:
    """Targets as :mod:`rl_backend.algorithm.sequences` asks for them. ``total``: of the step, 0 for one of this batch."""
    targets = [torch.cat((ids.new_full((prompt - 1,), -100), ids[prompt:], ids.new_tensor([-100]))) for ids in sequences]
    meta = {"batch_num_tokens": total or sum(len(ids) - prompt for ids in sequences)}
    lengths = torch.tensor([*map(len, sequences)])
    return PackedBatch(torch.cat(list(sequences)), lengths, {TARGET_IDS: torch.cat(targets)}, meta=meta)


def operations(model_dir: Path, batches: Sequence[PackedBatch], *, shares: bool) -> int:
    """Of forward and backward passes."""
    native = NativeConfig(device="cpu")
    model = describe_model(model_dir, native, "log_probs")
    with fake_rank(native.parallel, 0, 1) as groups:
        module = build_module(model.family, model.architecture, model.settings, groups, native, forward_only=False)
        return sum(
            measure_stage(module, batch, groups, None, splits_backward=False, shares_prefixes=shares).flops
            for batch in batches
        )


type Step = Callable[[Sequence[PackedBatch]], tuple[float, float, float]]


def step_of(model_dir: Path, share: str) -> Step:
    """Seconds of forward and backward passes, seconds of the whole step, and its loss."""
    options = {"device": "cpu", "share_prefixes": share, "optimizer": OptimizerConfig(lr=LEARNING_RATE)}
    runtime = create_runtime(RuntimeConfig(hf_path=str(model_dir), backend_cfg=options, max_tokens_per_micro_batch=2**16))
    handle = runtime.build_model()

    def step(batches: Sequence[PackedBatch]) -> tuple[float, float, float]:
        start = time.perf_counter()
        runtime.zero_grad(handle)
        with runtime.train_mode(handle):
            loss = runtime.forward_backward(handle, batches, next_token_loss).loss
        passed = time.perf_counter()
        runtime.optimizer_step(handle)
        return passed - start, time.perf_counter() - start, loss

    step([batch_of(sequences_of("32x32x2", 1)[0], 32)])
    return step


def measure(row: str, *, seconds: float, divisor: int) -> dict[str, Any]:
    """A row in this process: as many rounds as ``seconds`` allow, one at least; lengths are divided by ``divisor``."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    kind, work = row.split()
    with tempfile.TemporaryDirectory() as directory:
        model_dir = MODELS[kind](Path(directory), max_position_embeddings=4096)
        if work == "shortest":
            prefixes.SHORTEST_RUN = 1
            return _gains_of_lengths(model_dir, divisor)
        if work == "routes":
            return _equal_routes(model_dir, divisor)
        sequences, prompt = sequences_of(work, divisor)
        if work == "nothing":
            return _search(model_dir, sequences)
        rows = prefixes.grow(sequences).num_rows
        budget = max(BUDGET // divisor, rows)
        groups = budget // rows
        of_step = [ids for seed in range(groups) for ids in sequences_of(work, divisor, seed)[0]]
        batches = {share: micro_batches_of(of_step, prompt, budget, shares=share == "auto") for share in ("auto", "off")}
        wanted = {share: operations(model_dir, batches[share], shares=share == "auto") for share in batches}
        steps = {share: step_of(model_dir, share) for share in batches}
        return {
            "groups": groups,
            "budget": budget,
            "micro_batches": {share: len(each) for share, each in batches.items()},
            **_compare(steps, batches, seconds),
            "possible": wanted["off"] / wanted["auto"],
            "computed": groups * rows,
        }


def _compare(steps: Mapping[str, Step], batches: Mapping[str, Sequence[PackedBatch]], seconds: float) -> dict[str, Any]:
    passes: dict[str, list[float]] = {share: [] for share in steps}
    whole: dict[str, list[float]] = {share: [] for share in steps}
    peaks, before, losses = dict[str, float](), reset_peak_memory(), list[float]()
    while len(passes["off"]) < MOST_ROUNDS and (not losses or sum(map(sum, whole.values())) < seconds):
        # What shares takes less memory, and the process keeps what it has taken: it comes first.
        for share, step in steps.items():
            of_passes, of_step, loss = step(batches[share])
            passes[share].append(of_passes)
            whole[share].append(of_step)
            losses.append(loss)
            peaks.setdefault(share, (peak_memory() - before) / 2**30)
        if abs(losses[-1] - losses[-2]) > 1e-3 * abs(losses[-1]):
            raise RuntimeError(f"losses differ: {losses}")
    return {
        "tokens": sum(batch.num_tokens for batch in batches["off"]),
        "seconds": passes,
        "step_seconds": whole,
        "peak_gib": peaks,
        "off_over_auto": _ratio(passes),
        "step_off_over_auto": _ratio(whole),
        "memory_off_over_auto": peaks["off"] / peaks["auto"],
    }


def _ratio(seconds: Mapping[str, Sequence[float]]) -> float:
    """The median over rounds: a machine that other work slows down does so to both of a round."""
    return median(off / auto for off, auto in zip(seconds["off"], seconds["auto"], strict=True))


def _search(model_dir: Path, sequences: Sequence[Tensor]) -> dict[str, Any]:
    """Looking for shared beginnings: in all sequences for the plan, then in a micro-batch for each of two passes."""
    batch, found = batch_of(sequences, 1), list[float]()
    for _ in range(20):
        start = time.perf_counter()
        assert plan_shared(sequences, 1, 2**16) is None
        for _ in range(2):
            assert prefixes.shared_prefixes(batch, replays=False) is None
        found.append(time.perf_counter() - start)
    _, step, _ = step_of(model_dir, "auto")([batch])
    return {"tokens": batch.num_tokens, "search_seconds": median(found), "step_seconds": step, "share": median(found) / step}


def _gains_of_lengths(model_dir: Path, divisor: int) -> dict[str, Any]:
    """Sixteen sequences of which two, or eight, share so many tokens; each has 64 of its own."""
    steps = {share: step_of(model_dir, share) for share in ("auto", "off")}
    gains: dict[str, Any] = {}
    for together in SHARED_BY:
        for length in SHORTEST:
            generator = torch.Generator().manual_seed(length)
            roots = [drawn(generator, length) for _ in range(16 // together)]
            sequences = [torch.cat((root, drawn(generator, 64))) for root in roots for _ in range(together)]
            batch = batch_of(sequences, length)
            rounds = [{share: step([batch])[0] for share, step in steps.items()} for _ in range(SHORT_ROUNDS // divisor)]
            gains.setdefault(str(together), {})[str(length)] = median(each["off"] / each["auto"] for each in rounds)
    return {"off_over_auto_by_sharers_and_length": gains}


def _equal_routes(model_dir: Path, divisor: int) -> dict[str, Any]:
    """Of both of vLLM's dtypes, with its prefix cache on and off: see :func:`_compare_routes`."""
    from actors import RolloutConfig, RolloutGroup, SamplingConfig, init_local_ray
    from actors.rollout.messages import sample_seeds

    groups, answers, prompt, answer = ROUTED[0], ROUTED[1], ROUTED[2] // divisor, ROUTED[3] // divisor
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(2, MIXTURE["vocab_size"], (prompt,), generator=generator).tolist() for _ in range(groups)]
    sampling = SamplingConfig(n=answers, max_new_tokens=answer)
    found: dict[str, Any] = {"groups": groups, "answers": answers, "prompt_tokens": prompt, "answer_tokens": answer}
    init_local_ray(include_dashboard=False, log_to_driver=False)
    for dtype in ("bfloat16", "float32"):
        for caches in (True, False):
            config = RolloutConfig(
                model_path=str(model_dir),
                device="cpu",
                dtype=dtype,
                max_model_len=1024,
                prefix_caching=caches,
                return_routed_experts=True,
            )
            with RolloutGroup(config) as rollout:
                samples = rollout.generate(prompts, sampling, seeds=sample_seeds(0, 0, groups, answers))
            made = [
                sample.with_routes(TokenSequence.from_prompt_and_response(sample.prompt_ids, sample.response_ids))
                for sample in samples
            ]
            found[f"{dtype}_cache_{'on' if caches else 'off'}"] = _compare_routes(made, answers, prompt)
    return found


def _compare_routes(sequences: Sequence[TokenSequence], answers: int, prompt: int) -> dict[str, float]:
    """Fractions: of prompt tokens, those with equal experts in all answers of a group; of all tokens, those computed where
    routes are replayed, and where they are not.
    """
    equal = 0
    for start in range(0, len(sequences), answers):
        routes = torch.stack([each.token_fields[ROUTES][:prompt] for each in sequences[start : start + answers]])
        equal += int((routes == routes[0]).flatten(2).all(-1).all(0).sum())
    batch = pack(sequences)
    computed = {}
    for replays in (True, False):
        tree = prefixes.shared_prefixes(batch, replays=replays)
        computed[replays] = (batch.num_tokens if tree is None else tree.num_rows) / batch.num_tokens
    return {
        "equal_prompt_tokens": equal / (prompt * len(sequences) // answers),
        "computed": computed[True],
        "computed_without_replay": computed[False],
    }


def in_a_process(row: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """A row in the environment of a rank."""
    options = ("--seconds", str(arguments.seconds), "--divisor", str(arguments.divisor))
    command = (sys.executable, "-m", "benchmarks.shared_prefixes", "--row", row, *options)
    environment = {**os.environ, **thread_environment(), **memory_environment()}
    output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(output.stdout.splitlines()[-1])
    if "possible" in found:
        found["reached"] = found["off_over_auto"] / found["possible"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=ROWS, default=ROWS, metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--go-on", action="store_true", help="leave out what the file has")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="for the rounds of a row, of which there is one at least"
    )
    parser.add_argument("--divisor", type=int, default=1, help="of all lengths, to try the script; writes nothing")
    parser.add_argument("--row", choices=ROWS, help="one row, in this process, whatever environment it has")
    arguments = parser.parse_args()
    if arguments.row is not None:
        print(json.dumps(measure(arguments.row, seconds=arguments.seconds, divisor=arguments.divisor)))
        return
    known = read_result(RESULT).get("rows", {}) if arguments.go_on else {}
    keys = {row: row.replace(" ", "_") for row in arguments.only}
    for row in (row for row in arguments.only if keys[row] not in known):
        started = time.perf_counter()
        found = {**in_a_process(row, arguments), "load": os.getloadavg()[0]}
        print(f"{row} ({time.perf_counter() - started:.0f} s): {json.dumps(found)}", flush=True)
        if arguments.divisor == 1:
            rows = {**read_result(RESULT).get("rows", {}), keys[row]: found}
            update_result(RESULT, {"rows": rows, "model": MODEL, "tree": TREE, "machine": machine()})


if __name__ == "__main__":
    main()
