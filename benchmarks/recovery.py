"""Runs whose processes are killed or stopped at random moments, compared with the same runs left alone.

Each trial is a command that a user would type. From outside, training ranks, engines, workers of an engine or holders of
states are ended by SIGKILL or stopped by SIGSTOP; one that was stopped gets SIGCONT when another serves in its place.
Metrics (times apart), samples and weights must be those of the undisturbed run, beside which other programs keep all cores
busy, and in which nothing may be replaced.

What ends a run in any case, or may (signals to its process, the loss of Ray, a full disk, ...: :data:`ENDING`), is struck
from the start on. The run must leave nothing behind; the same command with ``--resume auto`` goes on, is struck again, and
must end as the undisturbed run.

    make bench NAME=recovery ARGS="--only sft_native --trials 6 --seconds 330 --folder /tmp/recovery"

A trial is written to ``results/recovery.json`` when it ends; the next call takes those that follow it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from actors.cluster.processes import Process
from actors.wire.segment import shared_files
from benchmarks import checkpoint, environment_tasks
from benchmarks.process_use import MARK, kind_of, processes
from benchmarks.report import machine, read_result, update_result
from examples.demo.task import character_tokenizer, layers_for, write_task
from tests.support.clusters import TwoNodes
from tests.support.runs import differences, outcome

type Kind = Literal["kill", "stop", "terminate", "interrupt", "fill", "few", "cut"]

ROOT = Path(__file__).parents[1]
SIGNALS: Mapping[Kind, signal.Signals] = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "terminate": signal.SIGTERM,
    "interrupt": signal.SIGINT,
}
REPLACED: tuple[Kind, ...] = ("kill", "stop", "terminate")
ENDING: Mapping[str, tuple[Kind, ...]] = {
    "driver": ("kill", "terminate", "interrupt", "stop"),
    "terminal": ("interrupt",),
    "gcs": ("kill",),
    "raylet": ("kill",),
    "driver and raylet": ("kill",),
    "disk": ("fill",),
    "shared memory": ("fill",),
    "driver files": ("few",),
    "rank files": ("few",),
    "engine files": ("few",),
    "starting rank": ("kill",),
    "starting engine": ("kill",),
}
"""Places that are no processes which a run replaces, and what is done to each."""
NODES: Mapping[str, tuple[Kind, ...]] = {"node": ("kill",), "relay": ("cut",)}
"""A node of several, and the network between it and the others; another node takes its place at once."""

FAULTS = 5
RUN_SECONDS, END_SECONDS, START_SECONDS, LOOK_SECONDS = 1200.0, 30.0, 30.0, 2.0
# Of a driver that is stopped: longer than anybody waits who takes a stopped process for dead.
PAUSE_SECONDS = 12.0
DISK, SHARED_MEMORY = "160m", "2g"

REWARD = """def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(map(ord, solution_str)) % 7 / 6  # also a model that knows nothing gives some better answers than others
"""
ALL = {"ranks": 2, "dtype": "float32", "metrics_to": "none"}
SUMS = {**ALL, "model": "TASKS/sums/model", "dataset": "TASKS/sums/train.jsonl"}
SFT = {**SUMS, "steps": 40, "save_every": 5, "batch_size": 8, "lr": 1e-3}
MEMORY = {**SFT, "save_every": 0, "recover": "memory"}
# An engine may be struck more often in a minute than a run allows in an hour.
ROLLOUT = {"max_restarts": 8}
SAMPLED = {"save_every": 2, "engines": 2, "samples_per_prompt": 4, "lr": 3e-4, "rollout": ROLLOUT}
LENGTHS = {"max_prompt_tokens": 8, "max_response_tokens": 8, "prompts_per_step": 8}
GRPO = {**SUMS, **SAMPLED, **LENGTHS, "steps": 10, "reward": "TASKS/reward.py:compute_score"}
TURNS = {"max_response_tokens": 12, "max_episode_tokens": 64, "max_turns": 3, "prompts_per_step": 4}
CALCULATOR = {"model": "TASKS/calculator/model", "dataset": "TASKS/calculator/train.jsonl"}
ENVIRONMENT = f"{ROOT / 'examples' / 'episodes.py'}:Calculator"
EPISODES = {**ALL, **SAMPLED, **TURNS, **CALCULATOR, "steps": 8, "environment": ENVIRONMENT}
SETTINGS: dict[str, tuple[str, Mapping[str, Any], tuple[str, ...]]] = {
    "sft_native": ("sft", SFT, ("rank",)),
    "sft_bridge": ("sft", {**SFT, "backend": "bridge"}, ("rank",)),
    "sft_pp2": ("sft", {**SFT, "pp": 2}, ("rank",)),
    "sft_memory": ("sft", MEMORY, ("rank", "holder")),
    # 63M parameters, and steps of two seconds and more on two cores.
    "sft_memory_large": ("sft", {**MEMORY, "model": "TASKS/large", "steps": 15, "batch_size": 96}, ("rank",)),
    "sft_ends": ("sft", SFT, tuple(place for place in ENDING if "engine" not in place)),
    "sft_nodes": ("sft", {**SFT, "placement": "spread"}, tuple(NODES)),
    "grpo_ends": ("grpo", GRPO, ("driver", "gcs", "raylet", "shared memory", "engine files", "starting engine")),
    "grpo": ("grpo", GRPO, ("rank", "engine")),
    "grpo_ahead": ("grpo", {**GRPO, "max_staleness": 1}, ("rank", "engine")),
    "ppo": ("ppo", GRPO, ("rank", "engine")),
    "grpo_bridge": ("grpo", {**GRPO, "backend": "bridge"}, ("rank", "engine")),
    "grpo_workers": ("grpo", {**GRPO, "engines": 1, "rollout": {**ROLLOUT, "tensor_parallel": 2}}, ("engine", "worker")),
    "tenants": (
        "tenants",
        {**GRPO, "lora": {"rank": 4}, "users": {"ann": {}, "bob": {"lora.rank": 8, "lr": 1e-3}}},
        ("rank", "engine"),
    ),
    "episodes": ("episodes", EPISODES, ("rank", "engine")),
}
"""Command, options (``TASKS`` is a folder) and the kinds of processes that are struck."""

UNDISTURBED = {**dict.fromkeys(("sft_memory", "sft_ends", "sft_nodes"), "sft_native"), "grpo_ends": "grpo"}
"""Settings that must come to what another one comes to, left alone."""

RANKS_REPLACED = re.compile(
    r"warning: training group .*?(?: operation \d+ \((?P<during>\w+)\).*)?"
    r"all ranks were replaced in (?:(?P<minutes>\d+) min )?(?P<seconds>[\d.]+) s "
)
ENGINE_LOST = re.compile(r"warning: (engine \d+)\b.*it is started again")
HOLDER_LOST = re.compile(r"keeps the state of training ranks in memory was lost")
BEGUN = re.compile(r" model +loading")
STARTED = re.compile(r" (?:ranks +starting|model +loading) .*: (?:(\d+) min )?([\d.]+) s$")
NOT_STRUCK = Process(0, "")


@dataclass
class Fault:
    """A process that is struck.

    Attributes:
        moment: steps after the beginning; 2.5 is in the middle of the third step, below 0 is in the start of the command.
        chosen: which of the processes of this place, from 0 to 1.
        at: when it was struck, by ``time.monotonic``, as the two below.
        seen, back: when the run saw it, and when another process served in its place, as far as it said so.
        during: what the run said that the process did.
        delay: of a rank, by how many seconds its step took longer than in the undisturbed run.
        woke: it was there still when another had taken its place, and got SIGCONT.
    """

    kind: Kind
    place: str
    moment: float
    chosen: float
    process: Process = NOT_STRUCK
    at: float = math.inf
    seen: float | None = None
    back: float | None = None
    during: str = ""
    delay: float | None = None
    woke: bool = False

    def wakes(self) -> bool:
        """Whether one that was stopped is to be continued now: another has its place, or it is the driver."""
        if self.kind != "stop" or self.woke or math.isinf(self.at) or self.process.has_ended:
            return False
        return time.monotonic() > self.at + PAUSE_SECONDS if self.place == "driver" else self.back is not None

    def told(self) -> dict[str, Any]:
        seconds = {
            "seen_seconds": None if self.seen is None else round(self.seen - self.at, 2),
            "lost_seconds": None if self.back is None else round(self.back - self.at, 2),
        }
        if self.delay is not None:
            seconds["delay_seconds"] = round(self.delay, 2)
        told = {"kind": self.kind, "place": self.place, "step": round(self.moment, 2), "during": self.during}
        return {**told, **seconds, "woke": self.woke}


def draw(name: str, number: int, steps: int, places: Sequence[str]) -> list[Fault]:
    """The faults of a trial, in order, always the same of one number; in several trials every kind has its turn."""
    generator = random.Random(f"{name} {number}")
    kinds = [(place, kind) for place in places for kind in {**ENDING, **NODES}.get(place, REPLACED)]
    found = [kinds[(number * FAULTS + each) % len(kinds)] for each in range(FAULTS)]
    generator.shuffle(found)
    # What is struck in the start of a command comes first in it.
    found.sort(key=lambda each: not each[0].startswith("starting"))
    # Each has its part of the run: faults at the same moment would be one.
    moments = [(part + generator.random()) * (steps + 0.2) / FAULTS for part in range(FAULTS)]
    for index, (place, _) in enumerate(found):
        if place.startswith("starting") or (place in ENDING and not index and generator.random() < 0.5):
            moments[index] = -generator.random()
    return [Fault(kind, place, moment, generator.random()) for (place, kind), moment in zip(found, moments, strict=True)]


class Left(NamedTuple):
    """What outlives a run by more than :data:`END_SECONDS`: processes (and so who may hold ports, sockets or groups), and
    files of shared memory.
    """

    processes: list[str]
    segments: list[str]


@dataclass
class Command:
    """A run in a process of its own, on a ``cluster`` of its own or the Ray that it starts; ``lines`` are what it has said,
    each with when it came. ``segments`` are files of shared memory that its processes have had.

    With "disk" among ``places`` its folder is a small file system; "shared memory" as the first gives it a small
    ``/dev/shm`` of its own.
    """

    process: subprocess.Popen[str]
    folder: Path
    mark: str
    log: str
    began: float = field(default_factory=time.monotonic)
    lines: list[tuple[float, str]] = field(default_factory=list)
    hangs: bool = False
    ended: float = math.inf
    cluster: TwoNodes | None = None
    segments: set[Path] = field(default_factory=set)

    @classmethod
    def start(
        cls,
        name: str,
        folder: Path,
        tasks: Path,
        places: Sequence[str] = (),
        *,
        again: int = 0,
        cluster: TwoNodes | None = None,
    ) -> Command:
        example, options, _ = SETTINGS[name]
        (folder / "run").mkdir(parents=True, exist_ok=bool(again))
        if "disk" in places and not again:
            subprocess.run(("mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", folder / "run"), check=True)
        (folder / "options.json").write_text(json.dumps(options).replace("TASKS", str(tasks)))
        files = ("--config", str(folder / "options.json"), "--run-dir", str(folder / "run"))
        mark, mount = uuid.uuid4().hex, f'mount -t tmpfs -o size={SHARED_MEMORY} tmpfs /dev/shm && exec "$@"'
        confined = ("unshare", "--mount", "sh", "-c", mount, "sh") if "shared memory" in places[:1] else ()
        resumes = ("--resume", "auto") if again else ()
        process = subprocess.Popen(
            (
                *confined,
                *(cluster.inside if cluster else ()),
                sys.executable,
                "-m",
                "rl_backend.cli",
                example,
                *files,
                *resumes,
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **(cluster.environment if cluster else {}), MARK: mark},
            start_new_session=True,
        )
        made = cls(process, folder, mark, f"log-{again}" if again else "log", cluster=cluster)
        threading.Thread(target=made._read, daemon=True).start()
        return made

    def _read(self) -> None:
        assert self.process.stdout is not None
        with (self.folder / self.log).open("w", buffering=1) as log:
            for line in self.process.stdout:
                self.lines.append((time.monotonic(), line.rstrip()))
                log.write(line)

    def steps(self) -> int:
        """Steps of which metrics were written, of several users the mean; -1 before models are built."""
        if not any(BEGUN.search(line) for _, line in self.lines):
            return -1
        counts = [file.read_bytes().count(b"\n") for file in (self.folder / "run").rglob("metrics.jsonl")]
        return sum(counts) // max(len(counts), 1)

    def start_seconds(self) -> float:
        """Of the training group: its ranks, and the models on them."""
        found = [found for _, line in self.lines if (found := STARTED.search(line))]
        return round(sum(60 * int(each[1] or 0) + float(each[2]) for each in found), 1)

    def disturb(self, faults: Sequence[Fault], pace: float, save_every: int = 0) -> None:
        """Strikes at the moments of ``faults`` until the run ends or takes too long; ``pace`` is the seconds of a step."""
        left, due, looked, earliest = list(faults), math.inf, -math.inf, 0
        deadline, heard = time.monotonic() + RUN_SECONDS, 0
        while self.process.poll() is None and time.monotonic() < deadline:
            # Of two nodes one must be left.
            whole = not any(fault.place in NODES and fault.at < math.inf and fault.back is None for fault in faults)
            if left and math.isinf(due) and left[0].moment < 0:
                due = self.began + left[0].moment % 1 * START_SECONDS
            elif left and math.isinf(due) and whole and self.steps() >= max(int(left[0].moment), earliest):
                due = time.monotonic() + left[0].moment % 1 * pace
            if time.monotonic() >= due:
                struck = self._strike(left[0], {fault.process for fault in faults if fault.place not in {**ENDING, **NODES}})
                # What is scarce now is missed at the next checkpoint at the latest.
                earliest = self.steps() + save_every + 1 if struck and left[0].kind in ("fill", "few") else earliest
                left, due = (left[1:], math.inf) if struck else (left, due + 0.2)
            if len(self.lines) > heard:
                heard = len(self.lines)
                attribute(self.lines, faults)
            if time.monotonic() > looked + LOOK_SECONDS:
                looked = time.monotonic()
                self.segments.update(*(shared_files(pid) for pid, _ in processes(self.mark)))
            for fault in faults:
                if fault.wakes():
                    fault.woke = True
                    os.kill(fault.process.pid, signal.SIGCONT)
            time.sleep(0.05)
        self.hangs = self.process.poll() is None
        self.process.kill()
        self.process.wait()
        self.ended = time.monotonic()
        time.sleep(0.2)  # for the last lines
        attribute(self.lines, faults)

    def _strike(self, fault: Fault, struck: set[Process]) -> bool:
        """False while no process of this place is there."""
        parts = fault.place.removesuffix(" files").removeprefix("starting ").split(" and ")
        found = {part: self._processes(part) - struck for part in reversed(parts)}
        if not all(found.values()):
            return False
        fault.at = time.monotonic()
        for there in found.values():
            fault.process = sorted(there)[int(fault.chosen * len(there))]
            with suppress(ProcessLookupError):
                self._do(fault)
        return True

    def _processes(self, place: str) -> set[Process]:
        if place in ("driver", "terminal", "disk", "shared memory", *NODES):
            found = {Process.of(self.process.pid)}
        else:
            found = {Process.of(pid) for pid, command in processes(self.mark) if place_of(command) == place}
        return {process for process in found if process.started}

    def _do(self, fault: Fault) -> None:
        pid = fault.process.pid
        if fault.kind == "few":
            number = max(map(int, os.listdir(f"/proc/{pid}/fd"))) + 1
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (number, number))
        elif fault.kind == "fill":
            fill(self.folder / "run" if fault.place == "disk" else Path(f"/proc/{pid}/root/dev/shm"))
        elif fault.place in NODES:
            assert self.cluster is not None, "a setting of several nodes"
            (self.cluster.remove_last_node if fault.kind == "kill" else self.cluster.cut_last_node_off)()
            self.cluster.add_another_node()
        elif fault.place == "terminal":
            os.killpg(pid, SIGNALS[fault.kind])
        else:
            os.kill(pid, SIGNALS[fault.kind])

    def end(self) -> Left:
        """Ends what the run has left behind when :data:`END_SECONDS` have passed, and says what it was."""
        deadline = time.monotonic() + END_SECONDS
        while (left := dict(processes(self.mark))) and time.monotonic() < deadline:
            time.sleep(0.2)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return Left([command[:60] for command in left.values()], [path.name for path in self.segments if path.exists()])


def place_of(command: str) -> str:
    """As :func:`kind_of`, also of what that counts to the rest."""
    program = Path(command.partition(" ")[0]).name.partition(".")[0]
    return {"gcs_server": "gcs", "raylet": "raylet", "ray::MemoryHolder": "holder"}.get(program) or kind_of(command)


FILLER = "filler"


def fill(folder: Path) -> None:
    """Takes all that is left of a file system."""
    with (folder / FILLER).open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            with suppress(OSError):
                while file.write(bytes(size)):
                    pass


def attribute(lines: Sequence[tuple[float, str]], faults: Sequence[Fault]) -> None:
    """Notes when the run saw each fault that has struck, and when another process served in its place.

    Of one that struck while others took the place of processes that were lost before, the run does not tell.
    """
    told: set[float] = set()
    for fault in faults:
        after = [(when, line) for when, line in lines if when >= fault.at]
        if fault.place in ENDING:
            continue
        if fault.place == "holder":
            fault.seen = next((when for when, line in after if HOLDER_LOST.search(line)), None)
            continue
        if fault.place in ("rank", *NODES):
            replaced = [(when, line, found) for when, line in after if (found := RANKS_REPLACED.search(line))]
            for when, line, found in replaced[:1]:
                began, fault.back = when - 60 * int(found["minutes"] or 0) - float(found["seconds"]), when
                if began >= fault.at or f"process {fault.process.pid} on" in line:
                    fault.seen, fault.during = max(began, fault.at), found["during"] or "between operations"
            continue
        lost = [(when, found[1]) for when, line in after if when not in told and (found := ENGINE_LOST.search(line))]
        since, engine = lost[0] if lost else (fault.at, "")
        if lost:
            fault.seen = since
            told.add(since)
        fault.back = next((when for when, line in after if when >= since and f"{engine} was replaced after" in line), None)


def note_delays(faults: Sequence[Fault], came: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Of ranks that were struck in a run of one user; of several in one step each has an equal part."""
    delays: list[float] = []
    for file in came:
        if file.endswith("metrics.jsonl"):
            for line, alone in zip(came[file], wanted[file], strict=False):
                if count := int(line.get("recovery/count", 0)):
                    delays += [(seconds_of(line) - seconds_of(alone)) / count] * count
    struck = sorted(
        (fault for fault in faults if fault.place == "rank" and fault.back is not None), key=lambda each: each.at
    )
    # Else the run recovered from something else too, or from two at once.
    if len(delays) == len(struck):
        for fault, delay in zip(struck, delays, strict=True):
            fault.delay = delay


def left_alone(name: str, folder: Path, tasks: Path, busy: int) -> dict[str, Any]:
    """The undisturbed run of a setting, beside ``busy`` programs that compute all the time."""
    neighbours = [subprocess.Popen((sys.executable, "-c", "while True: pass")) for _ in range(busy)]
    try:
        command = Command.start(name, folder, tasks)
        command.disturb((), 1.0)
    finally:
        for each in neighbours:
            each.kill()
            each.wait()
    if command.process.returncode or any(command.end()):
        said = "\n".join(line for _, line in command.lines[-20:])
        raise RuntimeError(f"{name}, left alone, ended with {command.process.returncode} or left processes:\n{said}")
    (folder / "whole").touch()
    replaced = sum(bool(RANKS_REPLACED.search(line) or ENGINE_LOST.search(line)) for _, line in command.lines)
    load = [round(each, 1) for each in os.getloadavg()]
    return {"setting": name, "busy": busy, "load_averages": load, "replaced": replaced}


def trial(name: str, number: int, folder: Path, tasks: Path, expected: Path) -> dict[str, Any]:
    """A run with faults, and in what it differs from the undisturbed one in ``expected``."""
    (_, options, places), began, wanted = SETTINGS[name], time.monotonic(), outcome(expected / "run")
    faults = draw(name, number, options["steps"], places)
    metrics = next(lines for file, lines in wanted.items() if file.endswith("metrics.jsonl"))
    pace = statistics.median(map(seconds_of, metrics))
    waiting, left = faults, Left([], [])
    ended: list[dict[str, Any]] = []
    cluster = TwoNodes(apart=True) if set(places) & {*NODES} else None
    while True:
        there = [fault.place for fault in waiting]
        command = Command.start(name, folder, tasks, there, again=len(ended), cluster=cluster)
        command.disturb(waiting, pace, options["save_every"])
        status, each = command.process.returncode, command.end()
        left.processes.extend(each.processes)
        left.segments.extend(each.segments)
        last = [fault for fault in waiting if fault.at < math.inf][-1:]
        if not status or not last or last[0].place not in ENDING or last[0].kind == "stop":
            break
        waiting = [fault for fault in waiting if math.isinf(fault.at)]
        if not command.hangs:
            last[0].seen = command.ended
        said = [line[:200] for _, line in command.lines[-3:]]
        ended.append({"kind": last[0].kind, "place": last[0].place, "status": status, "hangs": command.hangs, "said": said})
        (folder / "run" / FILLER).unlink(missing_ok=True)
    if cluster is not None:
        cluster.close()
    came = outcome(folder / "run")
    note_delays(faults, came, wanted)
    found = ["it failed"] if status else differences(came, wanted)[:8]
    first: Mapping[str, Any] = next(
        (lines[0] for file, lines in came.items() if file.endswith("metrics.jsonl") and lines), {}
    )
    if any(fault.place == "disk" for fault in faults):
        subprocess.run(("umount", "--lazy", folder / "run"), check=True)
    return {
        "setting": name,
        "number": number,
        "status": status,
        "differs_in": found,
        **({"ended": ended} if ended else {}),
        "faults": [fault.told() for fault in faults if fault.at < math.inf],
        "left": left._asdict(),
        "seconds": round(time.monotonic() - began, 1),
        "start_seconds": command.start_seconds(),
        # Slower than the others, in a group that starts as in one that takes the place of another.
        "first_step_seconds": None if "recovery/count" in first else round(seconds_of(first), 2),
        "step_seconds": round(pace, 3),
        **({"said": [line[:200] for _, line in command.lines[-8:]]} if status else {}),
    }


def seconds_of(step: Mapping[str, Any]) -> float:
    """By its metrics."""
    return float(sum(value for name, value in step.items() if name.startswith("seconds/")))


def figures(trials: Sequence[Mapping[str, Any]], undisturbed: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Shares of trials that ended, and that ended as the undisturbed run, by what was struck; seconds of their faults."""
    found: dict[str, Any] = {}
    groups: dict[str, tuple[str, ...]] = {"ranks": ("rank",), "engines": ("engine", "worker"), "holders": ("holder",)}
    groups |= {"nodes": tuple(NODES), "runs": tuple(ENDING)}
    for group, places in groups.items():
        struck = [each for each in trials if any(fault["place"] in places for fault in each["faults"])]
        faults = [fault for each in struck for fault in each["faults"] if fault["place"] in places]
        lost = [fault["lost_seconds"] for fault in faults if fault["lost_seconds"] is not None]
        kinds = dict.fromkeys(kind for place in places for kind in {**ENDING, **NODES}.get(place, REPLACED))
        # Some were seen by code that was slower; these say so.
        timed = [fault for fault in faults if not fault.get("seen_by_older_code")]
        seen = {kind: [fault["seen_seconds"] for fault in timed if fault["kind"] == kind] for kind in kinds}
        found[group] = {
            "trials": len(struck),
            "faults": len(faults),
            "recovered_fraction": share(each["status"] == 0 for each in struck),
            "equal_fraction": share(not each["differs_in"] for each in struck),
            "detect_seconds_p95": {kind: p95(seconds) for kind, seconds in seen.items()},
            "lost_seconds_median": median(lost),
            "woke": sum(fault["woke"] for fault in faults),
        }
    table: dict[str, dict[str, int]] = {}
    for each in trials:
        for fault in each["faults"]:
            counts = table.setdefault(kind_of_fault(each["setting"], fault), {"faults": 0, "recovered": 0, "equal": 0})
            counts["faults"] += 1
            counts["recovered"] += each["status"] == 0
            counts["equal"] += not each["differs_in"]
    memory = [each for each in trials if each["setting"] == "sft_memory_large" and each.get("first_step_seconds")]
    delays = [fault["delay_seconds"] for each in memory for fault in each["faults"] if "delay_seconds" in fault]
    begun = [each["start_seconds"] + each["first_step_seconds"] for each in memory]
    found["memory"] = {"delay_seconds_median": median(delays), "step_and_start_seconds_median": median(begun)}
    left = {kind: sum(len(each["left"][kind]) for each in trials) for kind in Left._fields}
    false = {"runs": len(undisturbed), "replaced": sum(each["replaced"] for each in undisturbed)}
    return {**found, "kinds": dict(sorted(table.items())), "left": left, "false_replacements": false}


def kind_of_fault(setting: str, fault: Mapping[str, Any]) -> str:
    """What was done to what, and when where the run said so: ``kill rank in save_checkpoint``."""
    of = " of two workers" if setting == "grpo_workers" and fault["place"] == "engine" else ""
    when = " in the start" if fault["step"] < 0 else f" in {fault['during']}" if fault.get("during") else ""
    return f"{fault['kind']} {fault['place']}{of}{when}"


def median(values: Sequence[float]) -> float | None:
    return round(statistics.median(values), 2) if values else None


def share(values: Iterable[bool]) -> float | None:
    known = list(values)
    return round(sum(known) / len(known), 3) if known else None


def p95(values: Iterable[float | None]) -> float | None:
    known = sorted(value for value in values if value is not None)
    return known[math.ceil(0.95 * len(known)) - 1] if known else None


def record(trials: Sequence[Mapping[str, Any]] = (), undisturbed: Sequence[Mapping[str, Any]] = ()) -> None:
    before = read_result("recovery")
    every = {"undisturbed": [*before.get("undisturbed", []), *undisturbed], "trials": [*before.get("trials", []), *trials]}
    update_result("recovery", {**figures(every["trials"], every["undisturbed"]), **every, "machine": machine()})


def write_large_model(path: Path) -> None:
    """Random weights in the shape of ``checkpoint.MODEL``, with the tokenizer of sums."""
    tokenizer = character_tokenizer()
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**checkpoint.MODEL, **ends)).save_pretrained(path)
    tokenizer.save_pretrained(path)


def measure(names: list[str], arguments: argparse.Namespace, folder: Path) -> None:
    began, tasks, longest = time.monotonic(), folder / "tasks", dict.fromkeys(names, 0.0)
    if not tasks.exists():
        write_task(tasks / "sums", 0, num_layers=layers_for(2))
        write_large_model(tasks / "large")
        environment_tasks.write_task(tasks / "calculator", "calculator")
        (tasks / "reward.py").write_text(REWARD)
    for name in names * arguments.trials:
        alone = UNDISTURBED.get(name, name)
        expected, now = folder / f"{alone}-alone", time.monotonic()
        if not (expected / "whole").exists() and now - began < arguments.seconds / 2:
            record(undisturbed=[left_alone(alone, expected, tasks, arguments.busy)])
            longest[name] = time.monotonic() - now
        if time.monotonic() - began + 1.2 * longest[name] > arguments.seconds or not (expected / "whole").exists():
            continue
        number = sum(each["setting"] == name for each in read_result("recovery").get("trials", []))
        found = trial(name, number, folder / f"{name}-{number}-{uuid.uuid4().hex[:4]}", tasks, expected)
        record(trials=[found])
        longest[name] = max(longest[name], found["seconds"])
        print(json.dumps(found), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=tuple(SETTINGS), action="append", help="this kind of run (may be given again)")
    parser.add_argument("--trials", type=int, default=6, help="more trials of each kind of run")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no trial that would end later")
    parser.add_argument("--busy", type=int, default=4, help="programs that compute beside an undisturbed run")
    parser.add_argument("--folder", type=Path, help="of all runs; undisturbed ones that are there are not run again")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        measure(arguments.only or list(SETTINGS), arguments, arguments.folder or Path(temporary))


if __name__ == "__main__":
    main()
