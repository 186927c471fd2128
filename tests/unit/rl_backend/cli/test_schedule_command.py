"""``rl-backend schedule`` as a user meets it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from rl_backend.cli import schedule
from rl_backend.cli.main import main
from rl_backend.pipeline import SCHEDULES

ZBV = ("schedule", "--schedule", "zbv", "--pp", "4", "--microbatches", "8")


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


@pytest.mark.shows("pipelines: `rl-backend schedule` gives bubble and peak activations of a schedule and draws it")
def test_the_numbers_of_a_schedule_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    result = as_json(capsys, *ZBV)
    assert result["makespan"] == pytest.approx(25.5)
    assert result["bubble_makespan"] == pytest.approx(1.5 / 25.5)
    assert result["bubble_span"] == pytest.approx(0, abs=1e-12)
    assert result["peak_activations"] == [8, 8, 8, 8]
    assert result["placement"] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert result["actions"][0][:3] == ["0F0", "0SEND_F0", "0F1"]


def test_costs_and_transfers_are_those_given(capsys: pytest.CaptureFixture[str]) -> None:
    plain = ("schedule", "--schedule", "1f1b", "--pp", "2", "--microbatches", "1", "--costs", "1,2,4")
    assert as_json(capsys, *plain)["makespan"] == pytest.approx(14)
    assert as_json(capsys, *plain, "--comm", "0.5")["makespan"] == pytest.approx(15)
    forward = as_json(capsys, *plain, "--forward-only")
    assert forward["makespan"] == pytest.approx(2)
    assert forward["peak_activations"] == [0, 0]
    stages = as_json(capsys, "schedule", "--schedule", "interleaved-1f1b", "--pp", "2", "--microbatches", "2", "--vpp", "4")
    assert stages["stages_per_rank"] == 4
    # A rank's stages share its time.
    assert stages["makespan"] == pytest.approx(6 + 3 / 4)
    two = as_json(capsys, "schedule", "--schedule", "interleaved-1f1b", "--pp", "2", "--microbatches", "2")
    assert two["stages_per_rank"] == 2 and two["makespan"] == pytest.approx(6 + 3 / 2)


def test_the_text_says_what_the_json_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(ZBV) == 0
    text = capsys.readouterr().out
    assert text.startswith("zbv: 4 ranks with 2 stages each, 8 micro-batches\nmakespan 25.5 for F 1, B 1, W 1, transfer 0; ")
    assert "bubble 5.9% of the step, 0.0% inside a rank" in text
    assert re.search(r"^ +3  3, 4 +1\.5 +25\.5 +0\.0% +8 = 4 micro-batches$", text, re.MULTILINE)


def test_all_schedules_are_compared_and_the_ones_that_cannot_say_why(capsys: pytest.CaptureFixture[str]) -> None:
    command = ("schedule", "--schedule", "all", "--pp", "4", "--microbatches", "6")
    result = as_json(capsys, *command)
    assert list(result) == list(SCHEDULES)
    assert result["zbv"]["bubble_makespan"] < result["zb-h1"]["bubble_makespan"] < result["1f1b"]["bubble_makespan"]
    assert "use 4 or 8" in result["interleaved-1f1b"]["error"]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[0] for line in lines] == list(SCHEDULES)
    assert lines[1].split(maxsplit=1)[1] == result["interleaved-1f1b"]["error"]


def boxes(path: Path) -> list[ElementTree.Element]:
    """The computations in a picture: what has a tip that names a stage."""
    root = ElementTree.fromstring(re.search(r"<svg.*</svg>", path.read_text(), re.DOTALL)[0])  # type: ignore[index]
    name = "{http://www.w3.org/2000/svg}"
    return [
        rectangle
        for rectangle in root.iter(f"{name}rect")
        if (tip := rectangle.find(f"{name}title")) is not None and "stage" in (tip.text or "")
    ]


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_picture_has_every_computation_and_none_overlap(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "schedule.svg"
    facts = as_json(capsys, "schedule", "--schedule", name, "--pp", "3", "--microbatches", "6", "--draw", str(path))
    computed = [action for own in facts["actions"] for action in own if re.fullmatch(r"\d+(F|B|W|BW)\d+", action)]
    drawn = boxes(path)
    assert len(drawn) == len(computed)
    lanes: dict[str, list[tuple[float, float]]] = {}
    for box in drawn:
        left, width = float(box.attrib["x"]), float(box.attrib["width"])
        lanes.setdefault(box.attrib["y"], []).append((left, left + width))
    assert len(lanes) == 3
    for lane in lanes.values():
        assert all(end <= start for (_, end), (start, _) in zip(sorted(lane), sorted(lane)[1:], strict=False))


def test_a_page_has_the_picture_and_the_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "schedule.html"
    assert main([*ZBV, "--draw", str(path)]) == 0
    assert len(boxes(path)) == 3 * 8 * 8
    assert capsys.readouterr().out.splitlines()[-1] in path.read_text()


def test_a_png_is_drawn_where_pillow_is_and_refused_where_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    image = pytest.importorskip("PIL.Image")
    path = tmp_path / "schedule.png"
    assert main([*ZBV, "--draw", str(path)]) == 0
    with image.open(path) as picture:
        colours = {colour for _, colour in picture.convert("RGB").getcolors(1 << 20)}
        assert {(0x24, 0x63, 0xB4), (0xD9, 0x77, 0x06), (0x17, 0x8A, 0x63)} <= colours
    capsys.readouterr()
    monkeypatch.setitem(sys.modules, "PIL", None)
    other = tmp_path / "other.png"
    assert f"--draw {other}: a PNG needs Pillow" in refusal(capsys, *ZBV, "--draw", str(other))
    assert not other.exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--costs", "1,2"), "argument --costs: invalid three_costs value: '1,2'"),
        (("--costs", "1,0,1"), "Costs.backward_input=0.0: must be above 0"),
        (("--costs", "a,b,c"), "argument --costs: invalid three_costs value: 'a,b,c'"),
        (("--comm", "-1"), "Costs.communication=-1.0: must be 0 or more"),
        (("--draw", "picture.gif"), "--draw picture.gif: draws one schedule, into a file that ends in .png, .svg, .html"),
        (("--draw", "missing/picture.svg"), "--draw missing/picture.svg: cannot be written: "),
        (("--vpp", "1"), "--vpp 1: zbv needs 2 stages per rank"),
        (("--pp", "0"), "--pp 0: must be at least 1"),
        (("--microbatches", "0"), "0 micro-batches: a step needs at least 1"),
        (("--schedule", "all", "--draw", "x.svg"), "--draw x.svg: draws one schedule"),
    ],
)
def test_what_makes_no_sense_is_one_message_in_terms_of_the_flags(
    capsys: pytest.CaptureFixture[str], given: tuple[str, ...], message: str
) -> None:
    assert refusal(capsys, *ZBV, *given).startswith(f"error: {message}")


def test_a_run_without_a_trace_says_how_to_get_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for place, what in ((tmp_path, "has no trace.json"), (tmp_path / "absent", "no such folder or file")):
        error = refusal(capsys, "schedule", "--from-trace", str(place))
        said = f"{what}; run with --trace, which writes trace.json into the run's folder"
        assert error == f"error: --from-trace {place}: {said}\n"


def test_the_first_pass_of_a_trace_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = [SimpleNamespace(measured=SimpleNamespace(makespan=seconds)) for seconds in (9.0, 5.0, 7.0)]
    monkeypatch.setattr(schedule, "read_passes", lambda path: passes)
    (tmp_path / "trace.json").touch()
    chosen = [schedule._chosen_pass(tmp_path, number) for number in (0, 1, 2, None)]
    assert [passes.index(each) for each in chosen] == [0, 1, 2, 2]
