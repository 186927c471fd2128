"""The suite as ``make test`` runs it: three pytest processes side by side, and one exit status.

Tests that start Ray, vLLM or other processes wait for them much of their time. The lane of ranks, which computes more, fills
that on both cores of a small machine, also after the others have ended. Each lane has a Ray of its own.
Arguments go to all lanes, or to one pytest where they name files. ``--matrix=FILE`` writes the record of the run
(:mod:`tests.support.matrix`), unless files are named or the run is interrupted.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import IO, Any

from tests.support import matrix

ROOT = Path(__file__).parents[1]
VERL = ("tests/e2e/test_verl_resume.py", "tests/e2e/test_verl_ppo.py")
"""What ``make test-all`` alone runs and what takes most memory: it runs while the first lane has few engines."""
RANKS = tuple(
    f"tests/e2e/test_{name}.py"
    for name in (
        *("cluster_jobs", "critic", "errors_through_ray", "lora_tenants", "recovery", "rollout_hangs", "train_group"),
        *("train_group_failures", "train_group_journal", "train_group_order", "verl_rollout_sync"),
    )
)
"""Tests with Ray that share no engine with others: training ranks and stand-ins for engines, which take little memory."""
BESIDE = (
    *("tests/unit/tree", "tests/unit/benchmarks", "tests/unit/examples", "tests/unit/actors", "tests/unit/adapters"),
    *(f"tests/unit/rl_backend/{name}" for name in ("cli", "data", "environment")),
)
"""Unit tests with a lane of their own. They wait for processes most, and import vLLM, as those of ``rl_backend`` do not."""
LANES = (
    ("tests/unit", "tests/e2e", *(f"--ignore={each}" for each in (*BESIDE, *VERL, *RANKS))),
    BESIDE,
    (*VERL, *RANKS, "tests/distributed", "tests/golden", "tests/gpu", "--suite"),
)
"""What each lane gives to pytest. The output of the first is shown while it runs, that of others when all have ended.

``--suite`` keeps the choice of cases (:mod:`tests.support.matrix`) although a file is named.
"""
NICENESS = (0, 3, 3)
"""Of each lane and of its Ray: engines, which have most to do, go before."""
END_SECONDS = 60.0
"""How long the lanes may take to end once they are interrupted."""
NOTHING_SELECTED = 5
"""pytest's status where no test was selected, as in a lane without tests of the marker that was asked for."""


def main(arguments: Sequence[str]) -> int:
    record = next((each.partition("=")[2] for each in arguments if each.startswith("--matrix=")), None)
    arguments = [each for each in arguments if not each.startswith("--matrix=")]
    if any(not argument.startswith("-") and Path(argument.partition("::")[0]).exists() for argument in arguments):
        os.chdir(ROOT)
        os.execv(sys.executable, [sys.executable, "-m", "pytest", *arguments])
    signal.signal(signal.SIGTERM, _leave)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lanes-") as folder:
        files = [Path(folder) / f"{lane}.log" for lane in range(len(LANES))]
        cases = [Path(folder) / f"{lane}.json" for lane in range(len(LANES))] if record else [None] * len(LANES)
        with ExitStack() as stack:
            tee = stack.enter_context(subprocess.Popen(["tee", str(files[0])], stdin=subprocess.PIPE))
            outputs = [tee.stdin, *(stack.enter_context(file.open("w")) for file in files[1:])]
            lanes = [
                _start(folders, niceness, [*arguments, *([f"--cases={each}"] if each else [])], out)
                for folders, niceness, out, each in zip(LANES, NICENESS, outputs, cases, strict=True)
            ]
            try:
                statuses = [lane.wait() for lane in lanes]
            except KeyboardInterrupt:
                # The terminal has sent it to the lanes as well, which now end what their tests have started.
                _end(lanes, ask=False)
                raise
            except BaseException:
                _end(lanes, ask=True)
                raise
        if record:
            matrix.write(ROOT / record, [each for each in cases if each and each.exists()])
        logs = [file.read_text(errors="replace").rstrip() for file in files]
    print(*logs[1:], "", sep="\n")
    print(*(line for log in logs for line in re.findall(r"^(?:FAILED|ERROR) .*", log, re.MULTILINE)), sep="\n")
    for folders, log in zip(LANES, logs, strict=True):
        print(f"{' '.join(each for each in folders if not each.startswith('--'))}: {log.rpartition('\n')[2].strip('= ')}")
    print(f"{time.monotonic() - started:.0f} s in all", flush=True)
    return max((status for status in statuses if status != NOTHING_SELECTED), key=abs, default=NOTHING_SELECTED)


def _leave(number: int, _: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second one must not cut the end of the lanes short
    raise SystemExit(128 + number)


def _end(lanes: Sequence[subprocess.Popen[bytes]], *, ask: bool) -> None:
    """Waits for fixtures to end Ray and vLLM: pytest runs them on SIGINT, and not on SIGTERM."""
    if ask:
        for lane in lanes:
            lane.send_signal(signal.SIGINT)
    deadline = time.monotonic() + END_SECONDS
    for lane in lanes:
        try:
            lane.wait(max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            lane.kill()
            lane.wait()


def _start(
    folders: Sequence[str], niceness: int, arguments: Sequence[str], output: IO[Any] | None
) -> subprocess.Popen[bytes]:
    command = ["nice", "-n", str(niceness), sys.executable, "-m", "pytest", *folders, *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
