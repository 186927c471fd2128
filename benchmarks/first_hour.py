"""The first hour of a user: seconds until a run says something and takes a step, and what mistakes are answered with.

Every mistake of :mod:`benchmarks.user_mistakes` is a command in a process of its own, as a user would give it.
``results/first_hour.json`` has of each the command, the sentence that is printed, the seconds until the command ends, and
whether Ray was started. All of it takes about a quarter of an hour. The Hub is not asked. The file is written after every
mistake: ``--missing`` continues an interrupted run, ``--only WORDS`` makes those anew whose description has the words.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.report import read_result, write_result
from benchmarks.user_mistakes import MISTAKES, Mistake, grpo, write_world

MISTAKE_SECONDS, STEP_SECONDS = 300.0, 900.0
STARTS = ("seconds_to_first_line", "seconds_to_first_step")
REPOSITORY = Path(__file__).parents[1]


def command_of(mistake: Mistake) -> str:
    """As a user would give it."""
    return f"python {shlex.join(mistake.arguments())}"


def make_mistake(mistake: Mistake, world: Path) -> dict[str, Any]:
    """Gives the command in ``world``; the entry of the result.

    Besides ``sentence``, ``lines`` counts what was printed, and ``traceback`` says whether a traceback was. ``status`` is
    None for a command that was still going on after ``MISTAKE_SECONDS``, and was ended then.
    """
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as ray_files:
        started = time.perf_counter()
        status, output = _give(mistake, world, _environment(ray_files))
        seconds = time.perf_counter() - started
        ray_started = any(Path(ray_files).glob("**/session_*"))
    lines = [line for line in output.splitlines() if line.strip()]
    said = [line for line in lines if line.startswith("error: ")] or lines[-1:]
    return {
        "about": mistake.about,
        "command": command_of(mistake),
        "status": status,
        "sentence": said[-1].removeprefix("error: ") if said else "",
        "lines": len(lines),
        "traceback": any(line.startswith("Traceback") for line in lines),
        "seconds": round(seconds, 2),
        "ray_started": ray_started,
    }


def _give(mistake: Mistake, world: Path, environment: Mapping[str, str]) -> tuple[int | None, str]:
    """Exit status and all that the command prints."""
    command = [sys.executable, *mistake.arguments()]
    with tempfile.TemporaryFile("w+") as output:
        with subprocess.Popen(command, cwd=world, env=environment, stdout=output, stderr=subprocess.STDOUT) as process:
            try:
                status: int | None = process.wait(MISTAKE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                status = None
        output.seek(0)
        return status, output.read()


def time_start(world: Path) -> dict[str, float]:
    """Seconds from the command of a run of the demo's model until its first line, and until that of its first step."""
    run = grpo("", run_dir="runs/timed", steps="2", prompts_per_step="8", samples_per_prompt="2")
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as ray_files:
        started, found = time.perf_counter(), dict[str, float]()
        process = subprocess.Popen(
            [sys.executable, *run.arguments()],
            cwd=world,
            env=_environment(ray_files),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                now = time.perf_counter() - started
                if line.strip():
                    found.setdefault("seconds_to_first_line", round(now, 2))
                if line.startswith("step "):
                    found["seconds_to_first_step"] = round(now, 2)
                    break
                if now > STEP_SECONDS:
                    break
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate()
    if "seconds_to_first_step" not in found:
        raise SystemExit(f"the run ended with status {process.returncode} before its first step")
    return found


def _environment(ray_files: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "RAY_TMPDIR": ray_files, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    environment.pop("RAY_ADDRESS", None)
    return environment


def merged(record: Mapping[str, Any], made: Mapping[str, Any]) -> dict[str, Any]:
    """``record`` with ``made``, the entry of a mistake: entries in the order of the mistakes, none of another command."""
    entries = {entry["command"]: entry for entry in [*record.get("mistakes", []), made]}
    mistakes = [entries[command] for command in map(command_of, MISTAKES) if command in entries]
    return {
        **{name: record[name] for name in STARTS if name in record},
        "mistakes": mistakes,
        "not_refused": [entry["about"] for entry in mistakes if entry["status"] != 2],
        "with_traceback": [entry["about"] for entry in mistakes if entry["traceback"]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", help="words of the descriptions of mistakes to make; what else is in the file stays")
    parser.add_argument("--missing", action="store_true", help="make what the file lacks, as after an interruption")
    arguments = parser.parse_args()
    record = read_result("first_hour") if arguments.only is not None or arguments.missing else {}
    with tempfile.TemporaryDirectory() as folder:
        world = Path(folder)
        write_world(world)
        if arguments.only is None and any(name not in record for name in STARTS):
            record |= time_start(world)
            for name in STARTS:
                print(f"{record[name]:7.2f} s  {name}", flush=True)
        kept = {entry["command"] for entry in record.get("mistakes", [])} if arguments.missing else set()
        for mistake in MISTAKES:
            if command_of(mistake) in kept or (arguments.only or "") not in mistake.about:
                continue
            entry = make_mistake(mistake, world)
            late = " AFTER RAY" if entry["ray_started"] else ""
            print(f"{entry['seconds']:7.2f} s{late}  {entry['about']}: {entry['sentence']}", flush=True)
            record = merged(record, entry)
            write_result("first_hour", record)


if __name__ == "__main__":
    main()
