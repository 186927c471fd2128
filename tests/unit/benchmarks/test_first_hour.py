"""The mistakes of a first hour: enough of them, each another command, in a world that has what they name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.first_hour import command_of, make_mistake, merged
from benchmarks.report import RESULTS
from benchmarks.user_mistakes import MISTAKES, RUN, command, grpo, write_world


def test_there_are_at_least_forty_different_commands() -> None:
    commands = [" ".join(mistake.arguments()) for mistake in MISTAKES]
    assert len(set(commands)) == len(commands) >= 40
    assert grpo("x", tp="3", reward=None).arguments()[-2:] == ["--tp", "3"]
    assert "--reward" not in grpo("x", reward=None).arguments()
    assert command("x", "plan --ranks 3").arguments() == ["-m", "rl_backend.cli", "plan", "--ranks", "3"]


def test_the_world_has_what_a_good_run_needs(tmp_path: Path) -> None:
    write_world(tmp_path)
    assert all((tmp_path / RUN[name].partition(":")[0]).exists() for name in ("--model", "--dataset", "--reward"))


def test_a_mistake_is_recorded_with_its_sentence_and_without_ray(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (mistake,) = [each for each in MISTAKES if each.about == "a report of a folder that is no run"]
    made = make_mistake(mistake, tmp_path)
    assert made["sentence"].startswith("runs is not a run folder")
    assert (made["status"], made["ray_started"], made["traceback"]) == (2, False, False)
    assert made["command"] == "python -m rl_backend.cli report runs"


def test_a_record_grows_in_the_order_of_the_mistakes() -> None:
    first, second = (
        {"about": each.about, "command": command_of(each), "status": 2, "traceback": False} for each in MISTAKES[:2]
    )
    record = merged({"seconds_to_first_line": 0.1}, second)
    record = merged({**record, "mistakes": [*record["mistakes"], {**second, "command": "no longer made"}]}, first)
    assert record == {"seconds_to_first_line": 0.1, "mistakes": [first, second], "not_refused": [], "with_traceback": []}
    record = merged(record, {**first, "status": 1, "traceback": True})
    assert record["not_refused"] == record["with_traceback"] == [MISTAKES[0].about]


@pytest.mark.skipif(not (RESULTS / "first_hour.json").exists(), reason="has not been measured")
def test_the_recorded_mistakes_are_answered_before_ray_in_a_sentence() -> None:
    result = json.loads((RESULTS / "first_hour.json").read_text())
    assert result["seconds_to_first_line"] < result["seconds_to_first_step"]
    assert [made["about"] for made in result["mistakes"]] == [mistake.about for mistake in MISTAKES]
    assert sum(made["ray_started"] for made in result["mistakes"]) <= 2
    assert result["not_refused"] == result["with_traceback"] == []
