"""This checkout against another one, such as the commit before: the same losses, and how fast.

``python -m benchmarks.against OTHER`` writes ``results/against.json``, or the record that ``--record`` names. Each checkout
gets a process with its own code. The processes take turns, so that a machine that slows down slows both alike; the order is
reversed in every second round. Parts:

- ``losses``: steps of both runtimes on the models of :mod:`benchmarks.train_speed` and :mod:`benchmarks.moe_speed`.
  Losses must be equal bit for bit.
- ``train_speed`` and ``moe_speed``: tokens per second of the native runtime, this checkout over the other.
- ``weight_sync``: seconds of a push into a running vLLM engine, the other checkout over this one.
- ``checkpoint``: the other saves after some steps; this one loads that and continues with the same losses.
- ``demo``: the demo with a few steps on both runtimes. Losses, rewards and held-out accuracies must be equal bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from benchmarks.report import machine, require_sleeping_threads, write_result
from rl_backend.child_process import open_lifeline, tie

ROOT = Path(__file__).parents[1]
WORKER = Path(__file__).with_name("against_worker.py")
RESULTS = ROOT / "benchmarks" / "results"
SPEED_PARTS = ("train_speed", "moe_speed")
PARTS = ("losses", "checkpoint", "demo", *SPEED_PARTS, "weight_sync")
STEPS = 4
"""Steps whose losses are compared, and of each half of the checkpoint part."""
DEMO_STEPS = 16
DEMO_FIGURES = ("accuracy_before", "accuracy_after", "max_log_prob_gap")


class Checkout:
    """A process that runs the code of one checkout, and answers one request at a time."""

    def __init__(self, root: Path, part: str, folder: Path, *options: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(root)}
        self._root = root
        with open_lifeline() as line:
            self._process = subprocess.Popen(
                [sys.executable, str(WORKER), part, str(folder), *options],
                cwd=root,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                pass_fds=[line.fileno()],
            )
            tie(self._process.pid, line)
        self.ask("ready")

    def ask(self, request: str) -> Any:
        """Sends one line and waits for the answer, a line of JSON."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(request, file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith("ANSWER "):
                return json.loads(line.removeprefix("ANSWER "))
        raise RuntimeError(f"the process of {self._root} ended with status {self._process.wait()}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def commit(root: Path) -> dict[str, Any]:
    """Commit of a checkout, and whether files in it differ from the commit."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(root), *arguments], check=True, capture_output=True, text=True).stdout

    return {"commit": git("rev-parse", "HEAD").strip(), "changed_files": bool(git("status", "--porcelain", "-uno").strip())}


def in_turns(ours: Checkout, other: Checkout, requests: Sequence[str]) -> dict[str, dict[str, list[Any]]]:
    """Answers of both to every request, by request and side."""
    answers: dict[str, dict[str, list[Any]]] = {}
    for round_index, request in enumerate(requests):
        sides = [("ours", ours), ("other", other)]
        for side, checkout in sides if round_index % 2 == 0 else reversed(sides):
            answers.setdefault(request, {"ours": [], "other": []})[side].append(checkout.ask(request))
    return answers


def compare_losses(root: Path, folder: Path) -> dict[str, Any]:
    """Losses of ``STEPS`` steps of both runtimes. Raises where a bit differs."""
    series: dict[str, Any] = {}
    for backend in ("native", "bridge"):
        for model in SPEED_PARTS:
            with Checkout(ROOT, model, folder, backend) as ours, Checkout(root, model, folder, backend) as other:
                answers = in_turns(ours, other, ["mixed_lengths"] * STEPS)["mixed_lengths"]
            losses = {side: [loss for _, loss in values] for side, values in answers.items()}
            if losses["ours"] != losses["other"]:
                raise RuntimeError(f"{backend}, {model}: losses differ: {losses}")
            series[f"{backend}_{model.removesuffix('_speed')}"] = losses["ours"]
            print(f"losses, {backend}, {model}: {STEPS} equal bit for bit", flush=True)
    return {"equal_bit_for_bit": True, "steps": STEPS, "losses": series}


def compare_speed(root: Path, part: str, folder: Path, rounds: int) -> dict[str, Any]:
    """Tokens per second of both checkouts, interleaved; ``ratio`` is this one over the other."""
    with Checkout(ROOT, part, folder, "native") as ours, Checkout(root, part, folder, "native") as other:
        in_turns(ours, other, ["equal_lengths", "mixed_lengths"])
        result = {}
        for workload in ("equal_lengths", "mixed_lengths"):
            answers = in_turns(ours, other, [workload] * rounds)[workload]
            speeds = {side: [speed for speed, _ in values] for side, values in answers.items()}
            result[workload] = compared(speeds["ours"], speeds["other"], "tokens_per_second")
            print(f"{part}, {workload}: {result[workload]['ratio']:.3f} of the other's speed", flush=True)
    return result


def compare_weight_sync(root: Path, folder: Path, rounds: int) -> dict[str, Any]:
    """Seconds of a push; ``ratio`` is the other's time over this one's, so that larger is faster here too."""
    with Checkout(ROOT, "weight_sync", folder / "ours") as ours, Checkout(root, "weight_sync", folder / "other") as other:
        in_turns(ours, other, ["push"] * 2)
        seconds = in_turns(ours, other, ["push"] * rounds)["push"]
    speeds = {side: [1.0 / value for value in values] for side, values in seconds.items()}
    result = compared(speeds["ours"], speeds["other"], "pushes_per_second")
    print(f"weight_sync: {result['ratio']:.3f} of the other's speed", flush=True)
    return result


def compare_checkpoints(root: Path, folder: Path) -> dict[str, Any]:
    """This checkout continues from the other's checkpoint. Raises where a loss is another than without stopping."""
    result: dict[str, Any] = {}
    for backend in ("native", "bridge"):
        saved = folder / f"checkpoint_{backend}"
        with Checkout(root, "moe_speed", folder, backend) as other:
            for _ in range(STEPS):
                other.ask("mixed_lengths")
            other.ask(f"save {saved}")
            expected = [other.ask("mixed_lengths")[1] for _ in range(STEPS)]
        with Checkout(ROOT, "moe_speed", folder, backend) as ours:
            for _ in range(STEPS):
                ours.ask("data mixed_lengths")
            ours.ask(f"load {saved}")
            continued = [ours.ask("mixed_lengths")[1] for _ in range(STEPS)]
        if continued != expected:
            raise RuntimeError(f"{backend}: losses after loading {continued}, without stopping {expected}")
        result[backend] = {"losses": continued, "equal_bit_for_bit": True}
        print(f"checkpoint, {backend}: the other's loads and continues bit for bit", flush=True)
    return result


def compare_demos(root: Path, folder: Path) -> dict[str, Any]:
    """Runs of the demo with one seed, one after the other. Raises where a figure or a step's loss or reward differs."""
    result: dict[str, Any] = {}
    for backend in ("native", "bridge"):
        found = {}
        for side, checkout in (("ours", ROOT), ("other", root)):
            run = folder / f"demo_{backend}_{side}"
            command = ["-m", "examples.demo", "--backend", backend, "--steps", str(DEMO_STEPS), "--run-dir", str(run)]
            environment = {**os.environ, "PYTHONPATH": str(checkout)}
            subprocess.run([sys.executable, *command], cwd=checkout, env=environment, check=True, stdout=subprocess.DEVNULL)
            summary = json.loads((run / "summary.json").read_text())
            lines = (run / "grpo" / "metrics.jsonl").read_text().splitlines()
            steps = [
                {name: value for name, value in json.loads(line).items() if name == "reward" or name.endswith("loss")}
                for line in lines
                if json.loads(line)["step"]  # step 0 is from before training
            ]
            found[side] = {"steps": steps, **{name: summary[name] for name in DEMO_FIGURES}}
        if found["ours"] != found["other"] or not any(found["ours"]["steps"]):
            raise RuntimeError(f"{backend}: the demos differ: {found}")
        result[backend] = {name: found["ours"][name] for name in DEMO_FIGURES} | {"equal_bit_for_bit": True}
        print(f"demo, {backend}: {DEMO_STEPS} steps equal bit for bit", flush=True)
    return {"steps": DEMO_STEPS, **result}


def compared(ours: Sequence[float], other: Sequence[float], unit: str) -> dict[str, Any]:
    return {"ratio": statistics.median(ours) / statistics.median(other), unit: {"ours": list(ours), "other": list(other)}}


def main() -> None:
    """Compares, prints and writes the result."""
    parser = argparse.ArgumentParser(description="This checkout against another one: the same losses, and how fast.")
    parser.add_argument("other", type=Path, help="folder of the other checkout")
    parser.add_argument("--rounds", type=int, default=15, help="timed steps or pushes of each checkout")
    parser.add_argument("--record", default="against", help="name of the result: another one for another pair of commits")
    parser.add_argument("--only", action="append", choices=PARTS, help="one part; may be given more than once")
    arguments = parser.parse_args()
    require_sleeping_threads("benchmarks.against")
    other = arguments.other.resolve()
    if not (other / "benchmarks" / "train_speed.py").is_file():
        parser.error(f"other: {other} is not a checkout of rl_backend")
    result: dict[str, Any] = {"ours": commit(ROOT), "other": commit(other), "rounds": arguments.rounds}
    record = RESULTS / f"{arguments.record}.json"
    if record.is_file():
        # Parts that were run before, of the same two commits and in as many rounds.
        earlier = json.loads(record.read_text())
        same_commits = all(earlier[side]["commit"] == result[side]["commit"] for side in ("ours", "other"))
        if same_commits and earlier["rounds"] == result["rounds"]:
            result |= {part: earlier[part] for part in PARTS if part in earlier}
    wanted = arguments.only or PARTS
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if "losses" in wanted:
            result["losses"] = compare_losses(other, folder)
        if "checkpoint" in wanted:
            result["checkpoint"] = compare_checkpoints(other, folder)
        if "demo" in wanted:
            result["demo"] = compare_demos(other, folder)
        for part in SPEED_PARTS:
            if part in wanted:
                result[part] = compare_speed(other, part, folder, arguments.rounds)
        if "weight_sync" in wanted:
            result["weight_sync"] = compare_weight_sync(other, folder, arguments.rounds)
    print(f"wrote {write_result(arguments.record, {**result, 'machine': machine()})}")


if __name__ == "__main__":
    main()
