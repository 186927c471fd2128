"""docs/schedules.md says what the schedules are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rl_backend.cli.main import main
from rl_backend.contracts import BatchError
from rl_backend.pipeline import SCHEDULES, make_schedule, simulate

DOCS = Path(__file__).resolve().parents[4] / "docs"
PAGE = (DOCS / "schedules.md").read_text()


def test_the_table_of_bubbles_is_what_the_schedules_have() -> None:
    header = re.search(r"^\| p, m \| (.*) \|$", PAGE, re.MULTILINE)
    assert header is not None
    assert header[1].split(" | ") == list(SCHEDULES)
    rows = re.findall(r"^\| (\d+), (\d+) \| (.*) \|$", PAGE, re.MULTILINE)
    assert [(int(p), int(m)) for p, m, _ in rows] == [(p, times * p) for p in (4, 8) for times in (1, 2, 4)]
    for p, m, cells in rows:
        assert cells.split(" | ") == [bubbles(name, int(p), int(m)) for name in SCHEDULES], (p, m)


def bubbles(name: str, pp_size: int, num_micro_batches: int) -> str:
    try:
        timeline = simulate(make_schedule(name, pp_size, num_micro_batches))
    except BatchError:
        return "refused"
    return f"{100 * timeline.bubble_makespan:.1f} / {100 * timeline.bubble_span:.1f}"


def test_the_pages_picture_is_what_its_command_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "schedule.svg"
    assert main(["schedule", "--schedule", "zbv", "--pp", "4", "--microbatches", "8", "--draw", str(path)]) == 0
    assert (DOCS / "schedule_zbv.svg").read_text() == path.read_text(), "draw it again"


def test_the_pages_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
    exec(compile(code, "schedules.md", "exec"), {})
    assert capsys.readouterr().out.startswith("0: 0F0 0F1 0F2 ")
