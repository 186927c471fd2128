"""Lines for terminals and pipes, at the edges of their width and time."""

from __future__ import annotations

import re
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from actors.watch import console
from actors.watch.console import Phases, StepLines, announce, command_began, say, say_facts, warn


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: found[0])
    return found


def test_a_warning_has_the_label_of_its_run(capsys: pytest.CaptureFixture[str]) -> None:
    warn("it is late", "ann ")
    warn("it is early")
    assert capsys.readouterr().out == "ann warning: it is late\nwarning: it is early\n"


@pytest.mark.parametrize(("room", "lines"), [(0, 1), (1, 2)])
def test_a_fact_that_just_fits_stays_in_its_line(capsys: pytest.CaptureFixture[str], room: int, lines: int) -> None:
    first = "a" * 40
    second = "b" * (100 - len(f"Mine: {first},") - 2 + room)
    say_facts("Mine", [first, second])
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == lines and printed[-1].endswith(second) and all(len(line) <= 100 for line in printed)


def step_line(capsys: pytest.CaptureFixture[str], lines: StepLines, *arguments: Any) -> str:
    lines.end(*arguments)
    return capsys.readouterr().out.rstrip("\n")


def test_a_step_has_its_longest_phase_and_every_metric_in_its_form(
    now: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = StepLines(9, began=now[0] - 3600, label="ann ")
    now[0] += 50
    lines.begin()
    now[0] += 4
    seconds = {"seconds/sample": 1.0, "seconds/train": 3.0, "seconds/sync": 0.5}
    metrics = {"reward": 0.12345, "entropy": 1.239, "equal_groups": 0.256, "next_lr": 3.21e-5, "staleness_mean": 1.25}
    assert step_line(capsys, lines, 1, metrics, seconds) == (
        "ann step    1/9  1:00:54, 00:32 left  4.0s (train 75%)  reward 0.123  entropy 1.24  equal groups 26%"
    ), "and what there is room for"
    now[0] += 2
    assert step_line(capsys, lines, 2, {"peak_memory_gib": 1.256}, {}) == (
        "ann step    2/9  1:00:56, 00:14 left  2.0s  memory GiB 1.26"
    ), "the first step is no measure of others"
    now[0] += 1
    assert step_line(capsys, lines, 3, {"kl": 0.5, "step_ok": 1}, {"seconds/train": 7.0}) == (
        "ann step    3/9  1:00:57, 00:09 left  1.0s (train 100%)  kl 0.500"
    )
    now[0] += 0.9
    assert step_line(capsys, lines, 4, {"kl": 0.5}, {}) == ""
    now[0] += 0.1
    assert step_line(capsys, lines, 5, {"kl": 0.5}, {}).startswith("ann step    5/9  1:00:58"), (
        "a second after the last line"
    )
    now[0] += 0.1
    assert step_line(capsys, lines, 6, {"held_out_reward": 0.5}, {}).endswith("held-out reward 0.500")
    assert "UPDATE SKIPPED: a gradient is not finite" in step_line(capsys, lines, 7, {"step_ok": 0.5}, {})
    assert step_line(capsys, lines, 8, {}, {}) == "" and step_line(capsys, lines, 9, {}, {}) != ""


def test_the_time_that_is_left_follows_from_the_last_twenty_steps(
    now: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = StepLines(1000, began=now[0])
    lines.begin()
    for step, seconds in enumerate([500.0, *[100.0] * 5, *[10.0] * 20], 1):
        now[0] += seconds
        line = step_line(capsys, lines, step, {}, {})
    assert line.startswith("step   26/1000  20:00, 2:42:20 left  10.0s")


def test_the_first_line_names_the_program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(console, "_command_began", [])
    for spec, argv, name in (
        (None, "/x/grpo.py", "grpo"),
        (SimpleNamespace(name="examples.demo.__main__"), "/x/__main__.py", "examples.demo"),
    ):
        monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__spec__=spec))
        monkeypatch.setattr(sys, "argv", [argv])
        announce("__main__")
        printed = capsys.readouterr()
        assert (printed.out, printed.err) == ("", f"{name}: importing PyTorch and Ray, which takes some seconds\n")
    began = command_began()
    assert Phases().began == began and Phases(began=0.0).began == 0.0
    assert command_began(take=True) == began != command_began()


@pytest.mark.parametrize(("columns", "term", "shown"), [(40, "xterm", 39), (300, "xterm", 99), (40, "dumb", None)])
def test_a_terminal_shows_a_phase_in_its_width_and_lines_above_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int, term: str, shown: int | None
) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr("shutil.get_terminal_size", lambda fallback: SimpleNamespace(columns=columns))
    with Phases("ann ").phase("ranks", "w" * 200), Phases().phase("other", "inside"):
        say("between")
    pieces = capsys.readouterr().out.split(console._CLEAR)
    if shown is None:
        assert len(pieces) == 1 and pieces[0].startswith("between\n")
        return
    assert len(pieces[1]) == shown and pieces[1].startswith("ann ") and pieces[2] == "between\n"
    assert len(pieces[3]) == shown and re.search(r"other      inside: \d\.\d s\n$", pieces[4]), "one is live"
    assert re.search(r"w{200}: \d\.\d s\n$", pieces[-1]) and console._live == []
