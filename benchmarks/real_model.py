"""GRPO on a real pretrained model, SmolLM2-135M-Instruct, by ``rl-backend grpo`` and by TRL's GRPOTrainer in turn.

Both train the same model on the same questions with the same reward, batch and learning rate, on CPUs. TRL generates by
transformers: its vLLM mode wants GPUs. It runs at the fastest of ``PER_DEVICE``, without gradient checkpointing. The first
step of each run warms up and is not counted. ``make libraries`` installs what this needs.

    make bench NAME=real_model ARGS="--rounds 3 --dtype float32"
    make bench NAME=real_model ARGS="--learn 0 1 2"         held-out accuracy before and after 15 steps, for these seeds
    make bench NAME=real_model ARGS="--row lora_16 --lr 1e-4 --lora.rank 16"

The last runs ours alone, with options of ``rl-backend grpo``, which ``--learn`` takes as well.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.process_use import Use, watch
from benchmarks.report import machine, medians, read_result, update_result
from tests.support.libraries import FOLDER, smollm2

TASK = "gym:chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=2"
TRAIN, HELD_OUT = f"{TASK}&size=400&seed=1", f"{TASK}&size=256&seed=2"
SETTINGS = {
    "dataset": TRAIN,
    "prompts_per_step": 8,
    "samples_per_prompt": 8,
    "max_response_tokens": 48,
    "lr": 1e-5,
    "dtype": "float32",
    "steps": 4,
    "seed": 0,
}
PER_DEVICE = (8, 16, 64)
LEARNING_STEPS = 15
MODEL = "SmolLM2-135M-Instruct, dequantised from Q4_1"
GIB = 2**30
PHASES = ("sample", "reward", "old_log_probs", "train", "sync")


def command(settings: Mapping[str, Any], run: Path, *options: str) -> list[str]:
    """What a user of rl_backend types."""
    model, dataset = str(settings["model"]), str(settings["dataset"])
    sizes = ("prompts_per_step", "samples_per_prompt", "max_response_tokens", "lr", "dtype", "steps", "seed")
    return [
        *(sys.executable, "-m", "rl_backend.cli", "grpo", "--model", model, "--dataset", dataset),
        *("--reward", "rl_backend.data.gym:score_last_number", "--max-prompt-tokens", "96"),
        *(text for name in sizes for text in (f"--{name.replace('_', '-')}", str(settings[name]))),
        *("--run-dir", str(run), *options),
    ]


def run_ours(settings: Mapping[str, Any], folder: Path, *options: str) -> dict[str, Any]:
    run = folder / "run"
    asked = command(settings, run, *options)
    use = watch(asked, lines_of=run / "metrics.jsonl", log=folder / "log.txt", environment=_environment())
    lines = [line for line in _lines(run / "metrics.jsonl") if line["step"]]
    first = len(use.lines) - len(lines)  # a held-out set has a line of step 0
    phases = {phase: statistics.median(line.get(f"seconds/{phase}", 0.0) for line in lines[1:]) for phase in PHASES}
    return {**_figures(use, first, lines), "phases": phases}


def run_trl(settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    given = ("--run", str(folder), "--settings", json.dumps(dict(settings)))
    asked = (sys.executable, "-m", "benchmarks.real_model_trl", *given)
    log = folder / "metrics.jsonl"
    use = watch(asked, lines_of=log, log=folder / "log.txt", environment=_environment())
    lines = _lines(log)
    sample = statistics.median(line["seconds/sample"] for line in lines[1:])
    step = statistics.median(line["seconds/step"] for line in lines[1:])
    return {**_figures(use, 0, lines), "phases": {"sample": sample, "train": step - sample}}


def compare(settings: Mapping[str, Any], rounds: int) -> dict[str, Any]:
    """Both in turn, TRL at its fastest, with the ratios of the medians."""
    tried = {}
    for per_device in PER_DEVICE:
        with tempfile.TemporaryDirectory() as folder:
            tried[per_device] = run_trl({**settings, "per_device": per_device, "steps": 2}, Path(folder))
    fastest = min(tried, key=lambda each: tried[each]["step_seconds"])
    runs: dict[str, list[dict[str, Any]]] = {"rl_backend": [], "trl": []}
    for index in range(rounds):
        for name in list(runs)[:: 1 if index % 2 == 0 else -1]:
            load = os.getloadavg()[0]
            with tempfile.TemporaryDirectory() as folder:
                given = {**settings, "per_device": fastest}
                figures = (run_trl if name == "trl" else run_ours)(given, Path(folder))
            runs[name].append(figures | {"load_before": load})
    compared = ("step_seconds", "cpu_seconds", "rank_and_engine_gib", "all_gib", "start_seconds")
    ours, trl = (medians({name: [run[name] for run in runs[side]] for name in compared}) for side in runs)
    return {
        "settings": {name: value for name, value in settings.items() if name != "model"},
        "trl_per_device": {str(each): run["step_seconds"] for each, run in tried.items()},
        "step_seconds_over_trl": ours["step_seconds"] / trl["step_seconds"],
        "cpu_seconds_over_trl": ours["cpu_seconds"] / trl["cpu_seconds"],
        "rank_and_engine_memory_over_trl": ours["rank_and_engine_gib"] / trl["all_gib"],
        "memory_over_trl": ours["all_gib"] / trl["all_gib"],
        "medians": {"rl_backend": ours, "trl": trl},
        "runs": runs,
        "lines_a_user_writes": {"rl_backend": 1, "trl": _lines_of_a_user()},
        "machine": machine(),
    }


def alone(settings: Mapping[str, Any], options: Sequence[str]) -> dict[str, Any]:
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        figures = run_ours(settings, Path(folder), *options)
    shown = {name: value for name, value in settings.items() if name != "model"}
    return {"settings": shown, "options": " ".join(options), **figures, "load_before": load, "machine": machine()}


def learn(settings: Mapping[str, Any], seed: int, *options: str) -> dict[str, Any]:
    """Held-out accuracy before and after, greedy, and the same run with shuffled rewards."""
    given = {**settings, "seed": seed, "steps": LEARNING_STEPS}
    found: dict[str, Any] = {}
    for name, more in {"": (), "_shuffled": ("--shuffle-rewards",)}.items():
        with tempfile.TemporaryDirectory() as text:
            folder = Path(text)
            held_out = ("--eval-dataset", HELD_OUT, *options, *more)
            figures = run_ours(given, folder, *held_out)
            lines = _lines(folder / "run" / "metrics.jsonl")
            before, after = (line["held_out_reward"] for line in lines if "held_out_reward" in line)
            found |= {f"held_out_before{name}": before, f"held_out_after{name}": after}
            found |= {
                f"step_seconds{name}": figures["step_seconds"],
                f"rewards{name}": [line.get("reward") for line in lines],
            }
    return {"seed": seed, **found}


def save(rows: Mapping[str, Any]) -> None:
    """Adds to ``results/real_model.json``."""
    update_result("real_model", {"model": MODEL, **rows})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--learn", type=int, nargs="*", metavar="SEED", help="learning curves in place of the comparison")
    parser.add_argument("--row", default="", help="name of what is measured with other options, without TRL")
    parser.add_argument("--lr", type=float, default=SETTINGS["lr"])
    parser.add_argument("--steps", type=int, default=SETTINGS["steps"])
    arguments, options = parser.parse_known_args()
    if options and not arguments.row:
        parser.error(f"{' '.join(options)}: other options get a --row of their own")
    given = {name: getattr(arguments, name) for name in ("dtype", "lr", "steps")}
    settings = {**SETTINGS, "model": str(smollm2()), **given}
    name = "_".join(filter(None, (arguments.row, arguments.dtype)))
    if arguments.learn is not None:
        for seed in arguments.learn:
            # Each is kept at once: one takes half an hour.
            others = [each for each in read_result("real_model").get(f"learning_{name}", []) if each["seed"] != seed]
            save({f"learning_{name}": [*others, learn(settings, seed, *options)]})
    elif arguments.row:
        save({name: alone(settings, options)})
    else:
        save({name: compare(settings, arguments.rounds)})


def _figures(use: Use, first: int, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A step lasts from the line before to its own, whatever is done between."""
    ends = use.lines[first:]
    steps = list(itertools.pairwise(ends))
    return {
        "step_seconds": statistics.median(end - start for start, end in steps),
        "cpu_seconds": statistics.median(use.cpu_at(end) - use.cpu_at(start) for start, end in steps),
        "start_seconds": ends[0] - use.at[0],
        "rank_and_engine_gib": use.peak("rank", "engine") / GIB,
        "all_gib": use.peak() / GIB,
        "rewards": [line["reward"] for line in lines],
    }


def _environment() -> dict[str, str]:
    paths = (Path(__file__).parents[1], FOLDER / "gym", os.environ.get("PYTHONPATH", ""))
    return {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_WAIT_POLICY": "PASSIVE"}


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _lines_of_a_user() -> int:
    text = (Path(__file__).parent / "real_model_trl.py").read_text().splitlines()
    start, end = (next(i for i, line in enumerate(text) if mark in line) for mark in ("from here", "# to here"))
    return sum(bool(line.strip()) for line in text[start + 1 : end])


if __name__ == "__main__":
    main()
