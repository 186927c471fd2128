"""What a run prints: a first line at once, the phases of its start, and steps with the time that is left."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import time

import pytest

from actors.watch import console
from actors.watch.console import COLUMNS, SHOWN, Phases, StepLines, command_began
from tests.support.clusters import ROOT

REFUSE = """
import runpy, sys

class Refuse:
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {"torch", "ray", "vllm", "transformers"}:
            sys.exit(f"imports {name}")

sys.meta_path.insert(0, Refuse())
runpy.run_module(sys.argv[1], run_name="__main__", alter_sys=True)
"""


@pytest.fixture(autouse=True)
def no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "_command_began", [])


class Clock:
    """Stands for time.monotonic."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


@pytest.mark.parametrize("example", ["grpo", "ppo", "sft", "tenants", "demo"])
@pytest.mark.shows("reading a run: an example prints its first line before it imports PyTorch, Ray or vLLM")
def test_the_first_line_comes_before_imports_that_take_seconds(example: str) -> None:
    command = [sys.executable, "-c", REFUSE, f"examples.{example}"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    first, last = run.stderr.splitlines()
    assert first == f"examples.{example}: importing PyTorch and Ray, which takes some seconds"
    assert last.startswith("imports ")


def test_a_module_that_another_imports_announces_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    console.announce("examples.grpo")
    assert capsys.readouterr().err == ""
    assert command_began() == pytest.approx(time.monotonic(), abs=1)


def test_the_start_of_a_command_belongs_to_its_first_run(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    console.announce("__main__")
    clock.now += 7
    assert command_began() == 1000 and command_began(take=True) == 1000
    assert command_began() == command_began(take=True) == 1007


def printed(lines: StepLines, clock: Clock, took: float, step: int, **metrics: float) -> None:
    clock.now += took
    lines.end(step, metrics, {"seconds/sample": 0.75 * took, "seconds/train": 0.2 * took})


@pytest.mark.shows("reading a run: a step's line has elapsed time, time left and the longest phase, in 100 columns")
def test_a_steps_line_has_elapsed_time_and_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock(monkeypatch)
    lines = StepLines(200, began=clock.now - 46)
    lines.begin()
    printed(lines, clock, 20.0, 1, reward=0.5, step_ok=1)
    printed(lines, clock, 4.0, 2, reward=0.25, step_ok=1, unknown=3)
    printed(lines, clock, 6.0, 3, reward=0.75, grad_norm=float("nan"), step_ok=0.5)
    assert capsys.readouterr().out.splitlines() == [
        "step    1/200  01:06, 1:06:20 left  20.0s (sample 75%)  reward 0.500",
        "step    2/200  01:10, 13:12 left  4.0s (sample 75%)  reward 0.250",
        "step    3/200  01:16, 16:25 left  UPDATE SKIPPED: a gradient is not finite  6.0s (sample 75%)",
    ]


def test_a_line_without_room_for_every_metric_leaves_out_the_last(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock(monkeypatch)
    lines = StepLines(100_000, began=clock.now, label=f"{'a user':12}")
    lines.begin()
    every = dict.fromkeys(SHOWN, -123.456)
    printed(lines, clock, 3000.0, 1, **every)
    (line,) = capsys.readouterr().out.splitlines()
    assert len(line) <= COLUMNS
    assert line.startswith("a user      step    1/100000  50:00, ")
    labels = [label for label, _ in SHOWN.values()]
    there = [label in line for label in labels]
    assert there[0] and not there[-1] and there == sorted(there, reverse=True)


def test_a_reader_that_has_left_ends_no_run() -> None:
    code = (
        "import os, signal, sys\nfrom actors.watch.console import say\nfrom actors.run.run import StopRequest\n"
        "out, err = os.dup(1), os.dup(2)\n"
        "for fd in (1, 2):\n    read, write = os.pipe(); os.close(read); os.dup2(write, fd)\n"
        "stop = StopRequest()\n"
        "with stop.on_signals('the run ends'):\n    os.kill(os.getpid(), signal.SIGINT)\n"
        "    say('a step')\n    say('another')\n"
        "os.write(out, f'went on, {stop.reason}'.encode())"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.startswith("went on, ") and "None" not in ended.stdout


def test_of_quick_steps_a_line_is_printed_each_second(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock(monkeypatch)
    lines = StepLines(20, began=clock.now)
    lines.begin()
    for step in range(1, 21):
        extra = {"held_out_nll": 0.5} if step == 9 else {"step_ok": 0.0} if step == 11 else {}
        printed(lines, clock, 0.3, step, **extra)
    steps = [int(line.split()[1].partition("/")[0]) for line in capsys.readouterr().out.splitlines()]
    assert steps == [1, 5, 9, 11, 15, 19, 20]


@pytest.mark.shows(
    "reading a run: each phase of a start says what it waits for and its time, in plain lines without a terminal"
)
def test_without_a_terminal_a_phase_is_a_line_and_a_long_one_says_so_while_it_lasts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "_BEGUN_SECONDS", 0.05)
    monkeypatch.setattr(console, "_STILL_SECONDS", 0.2)
    phases = Phases("label ", began=time.monotonic() - 100)
    with phases.phase("ray", "starting on this machine"):
        pass
    with phases.phase("engines", "starting 2 vLLM engines"):
        time.sleep(0.4)
    with pytest.raises(ValueError, match="no GPU"), phases.phase("ranks", "starting 1 rank"):
        raise ValueError("no GPU")
    with pytest.raises(KeyboardInterrupt), phases.phase("push", "the first weights"):
        raise KeyboardInterrupt
    short, begun, still, ended, failed, stopped = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"label   100\.\d s  ray        starting on this machine: 0\.0 s", short)
    assert re.fullmatch(r"label   100\.\d s  engines    starting 2 vLLM engines \.\.\.", begun)
    assert re.fullmatch(r"label   100\.\d s  engines    starting 2 vLLM engines \.\.\. 00:00", still)
    assert re.fullmatch(r"label   100\.\d s  engines    starting 2 vLLM engines: 0\.[45] s", ended)
    assert re.fullmatch(r"label   100\.\d s  ranks      starting 1 rank: failed after 0\.0 s", failed)
    assert stopped.endswith("push       the first weights: stopped after 0.0 s")


def test_a_terminal_shows_the_seconds_of_a_phase_in_place() -> None:
    program = (
        "import time; from actors.watch.console import Phases, say\n"
        "with Phases().phase('ranks', 'starting'): time.sleep(1.2); say('between'); time.sleep(0.1)"
    )
    leader, follower = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "40"}
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, stdout=follower, timeout=60, check=True)
    os.close(follower)
    text = os.read(leader, 10_000).decode()
    os.close(leader)
    shown = text.split(console._CLEAR)
    assert shown[1].endswith("ranks      starting ... 0s") and shown[2].endswith("ranks      starting ... 1s")
    assert shown[3] == "between\r\n"
    assert re.fullmatch(r" +1\.\d s  ranks      starting: 1\.\d s\r\n", shown[-1])
    assert all(len(part) < 40 for part in shown)


def test_facts_are_never_divided(capsys: pytest.CaptureFixture[str]) -> None:
    facts = ["1234 prompts", "weights by shared_memory", f"continuing after step 7, from {'/long' * 30}", "2 engines"]
    console.say_facts("GRPO", facts)
    assert capsys.readouterr().out.splitlines() == [
        "GRPO: 1234 prompts, weights by shared_memory,",
        f"    {facts[2]},",
        "    2 engines",
    ]
    console.say_facts("SFT", [])
    assert capsys.readouterr().out == "SFT\n"
