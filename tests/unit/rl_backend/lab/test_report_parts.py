"""Parts of a run's report: charts, samples and what is read of the files."""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from rl_backend.lab.report import page as page_module
from rl_backend.lab.report.charts import Chart, charts_for, draw_chart, draw_phases, points, running_mean
from rl_backend.lab.report.page import MOST_CHARTS, MOST_EVENTS, PROMPTS, draw_samples, write_report
from rl_backend.lab.report.run_data import RunData, Series, read_run
from tests.support.page import Element, read_page
from tests.support.runs import write_run


def series(*values: float, name: str = "m", first: int = 1) -> Series:
    return Series(name, tuple(range(first, first + len(values))), values)


def element(markup: str, folder: Path) -> Element:
    """A part of a page."""
    (folder / "part.html").write_text(f"<!DOCTYPE html><html><body>{markup}</body></html>")
    return read_page(folder / "part.html")


def test_points_keep_the_extremes_of_the_steps_that_they_stand_for() -> None:
    assert [point.first for point in points(series(1.0, math.nan, 5.0), 9)] == [1, 2, 3]
    found = points(series(1.0, 3.0, math.inf, -2.0, math.nan, math.nan, 4.0, first=10), 4)
    steps = [(point.first, point.last, point.step) for point in found]
    assert steps == [(10, 11, 10.5), (12, 13, 12.5), (14, 15, 14.5), (16, 16, 16.0)]
    assert [(point.mean, point.low, point.high) for point in (found[0], found[1], found[3])] == [
        (2.0, 1.0, 3.0),
        (-2.0, -2.0, -2.0),
        (4.0, 4.0, 4.0),
    ]
    assert all(math.isnan(value) for value in (found[2].mean, found[2].low, found[2].high))
    assert [len(points(series(*map(float, range(count))), 300)) for count in (300, 301)] == [300, 151]


def test_a_running_mean_is_centred_and_leaves_out_what_is_not_finite() -> None:
    assert running_mean([1.0, 2.0, 6.0, 4.0], 3) == [1.5, 3.0, 4.0, 5.0]
    found = running_mean([1.0, math.inf, math.nan, math.nan, 7.0, 0.0], 3)
    assert found[:2] == [1.0, 1.0] and math.isnan(found[2]) and found[3:] == [7.0, 3.5, 3.5]


def test_charts_are_of_what_there_is_and_a_few_curves_each() -> None:
    tenants = [f"tenant/{name}/reward" for name in "abcdef"]
    sets = ["eval/math/mean", "eval/math/mean_stderr", "eval/a/b/mean", "eval/a/b/best"]
    found = charts_for(["grad_norm", "seconds/train", *tenants, *sets, "my/own", "tenant/a/my/own", "other"])
    names = {group: [tuple(chart.names) for chart in charts] for group, charts in found.items()}
    first = next(iter(names))
    assert names[first][:2] == [tuple(tenants[:4]), tuple(tenants[4:])]
    held_out = [chart for chart in found[first] if chart.title.startswith("Held-out set")]
    assert [(chart.title, tuple(chart.names), chart.full_range) for chart in held_out] == [
        ("Held-out set math", ("eval/math/mean",), True),
        ("Held-out set a/b", ("eval/a/b/mean", "eval/a/b/best"), True),
    ]
    assert names["Other metrics"] == [("my/own", "tenant/a/my/own"), ("other",)]
    assert [chart.title for chart in found["Other metrics"]] == ["my/own", "other"]
    assert not any("seconds" in name for charts in names.values() for chart in charts for name in chart)
    assert [group for group, charts in found.items() if not charts] == []
    assert charts_for(["my"]).keys() == {"Other metrics"}


def test_a_chart_says_its_latest_values_and_where_they_were_not_finite(tmp_path: Path) -> None:
    chart = Chart("title", "unit", ["a", "b"])
    given = [series(0.25, math.nan, 0.5, name="a"), series(3.0, 2.0, math.inf, name="b")]
    figure = element(draw_chart(chart, given, (1, 9), 40), tmp_path)
    hover = json.loads(figure.one("svg").attributes["data-hover"])
    assert hover["x"][:2] == [1, 9] and (hover["y"][0], hover["y"][1]) == (0.0, 3.0) and hover["log"] is False
    assert hover["y"][2] > hover["y"][3], "up is up"
    assert hover["series"] == [
        {"name": "a", "points": [[1, 0, 0.25], [2, 0, "NaN"], [3, 0, 0.5]]},
        {"name": "b", "points": [[1, 0, 3.0], [2, 0, 2.0], [3, 0, "+inf"]]},
    ]
    assert len(figure.all("path", class_="not-finite")) == 2 and "0.5 / +inf" in figure.text
    alone = element(draw_chart(chart, [series(*[1.0, 2.0] * 3, name="a")], (1, 6), 3), tmp_path)
    hover = json.loads(alone.one("svg").attributes["data-hover"])
    assert hover["series"] == [{"name": "title", "points": [[step, 1, 1.5, 1.0, 2.0] for step in (1, 3, 5)]}]


@pytest.mark.parametrize(
    ("chart", "values", "ends", "log"),
    [
        ({"full_range": True}, (0.4, 0.6), (0.0, 1.0), False),
        ({"full_range": True}, (0.4, 1.2), (0.4, 1.2), False),
        ({"full_range": True}, (-0.2, 0.6), (-0.2, 0.6), False),
        ({"log": True}, (0.0, 1.0, 30.0), (1.0, 100.0), True),
        ({"log": True}, (1.0, 29.0), (0.0, 30.0), False),
        ({"log": True}, (-1.0, -300.0), (-300.0, 0.0), False),
        ({}, (math.nan, math.inf), (0.0, 1.0), False),
    ],
)
def test_an_axis_fits_the_values(
    chart: dict[str, Any], values: tuple[float, ...], ends: tuple[float, float], log: bool, tmp_path: Path
) -> None:
    figure = element(draw_chart(Chart("title", "", ["m"], **chart), [series(*values)], (1, len(values)), 40), tmp_path)
    hover = json.loads(figure.one("svg").attributes["data-hover"])
    assert hover["y"][:2] == pytest.approx(list(ends)) and hover["log"] is log


def test_bars_of_many_steps_are_means_and_a_phase_may_be_missing_in_some(tmp_path: Path) -> None:
    steps = tuple(range(1, 322))
    train = Series("seconds/train", steps, (3.0,) * 321)
    push = Series("seconds/push", (2, 4, 5), (6.0, math.inf, -1.0))
    figure = element(draw_phases([train, push]), tmp_path)
    hover = json.loads(figure.one("svg").attributes["data-hover"])
    assert len(hover["steps"]) == 107 and hover["names"] == ["train", "push"]
    assert (hover["steps"][0], hover["steps"][-1]) == ([1, 3], [319, 321])
    assert hover["values"][:2] == [[3.0, 2.0], [3.0, 0.0]]
    legend = figure.one("p", class_="legend").text
    assert "train 3 s, 99%" in legend and "push 0.0156 s, 1%" in legend


def cells(first: list[dict[str, Any]], last: list[dict[str, Any]], folder: Path) -> Element:
    return element(draw_samples("Samples", first, last), folder)


def sample(step: int, prompt: str, reward: Any, response: str = "r", **more: Any) -> dict[str, Any]:
    return {"step": step, "prompt": prompt, "reward": reward, "response": response, **more}


def test_of_many_responses_the_best_the_middle_and_the_worst_are_shown(tmp_path: Path) -> None:
    rewards = (0.1, 0.9, None, 0.7, 0.3)
    found = cells([sample(3, "p", reward, f"r{reward}") for reward in rewards], [], tmp_path)
    assert [response.one("pre").text for response in found.all("div", class_="response")] == ["r0.9", "r0.3", "rNone"]
    text = found.text
    assert (
        "All samples are of one step." in text
        and "mean of 4: 0.5" in text
        and "the first 5 samples, mean reward 0.5" in text
    )
    assert "its best, its middle and its worst of up to 3 responses" in text
    sides = [
        response.one("span", class_="reward").attributes["class"] for response in found.all("div", class_="response")[:2]
    ]
    assert ["good" in side for side in sides] == [True, False] and "bad" in sides[1]


def test_notes_say_what_two_steps_have_in_common(tmp_path: Path) -> None:
    some = [sample(1, "a", 0.0), sample(1, "b", 1.0)]
    assert "The two steps had no prompt in common." in cells(some, [sample(2, "c", 1.0)], tmp_path).text
    text = cells(some, [sample(2, "b", 0.0), sample(2, "a", 0.0)], tmp_path).text
    assert "Of 2 prompts that both steps had, those whose rewards changed most." in text and "up to 3" not in text


def test_a_response_says_all_that_is_known_of_it(tmp_path: Path) -> None:
    given = sample(
        1,
        "p",
        0.5,
        finish_reason="stop",
        version_spans=[[3, 10], [4, 2]],
        many=list(range(9)),
        few=list(range(8)),
        reward_info={"format": 0.25, "judge": {"score": 2, "why": "good"}},
        turns=[
            {"calls": [{"name": "add", "arguments": {"a": 1}, "status": "ok", "answer": 3}, "no call"], "reward": 0.0},
            "no turn",
            {"calls": None, "reward": -0.5},
        ],
        segments=[[["read", False], ["written", True], ["odd"]], "no segment", [["later", True]]],
    )
    text = cells([given], [sample(2, "p", 0.5, version_spans="odd", segments=3, turns={"a": 1})], tmp_path).text
    few = "few [0, 1, 2, 3, 4, 5, 6, 7]"
    assert f"finish reason stop, weight version 3, then 4, {few}, format 0.25, judge score 2, judge why good" in text
    assert 'turn 1: add({"a": 1}) → ok: 3' in text and "turn 2: reward -0.5" in text and "turn 1: reward" not in text
    assert all(word in text for word in ("read", "written", "later")) and "many" not in text and "odd" in text


def test_a_run_that_nobody_holds_was_killed_when_it_wrote_last(tmp_path: Path) -> None:
    state = {"state": "running", "started": "2026-01-01T10:00:00+00:00"}
    folder = write_run(tmp_path, 2, lambda step: {"reward": 0.5}, run=state)
    lock = folder / ".lock"
    assert read_run(folder).run["state"] == "running", "without a lock nothing is known"
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert read_run(folder).run["state"] == "running"
    written = {"metrics.jsonl": 90, "config.json": 1000}
    for file in folder.iterdir():
        moment = datetime(2026, 1, 1, 11, tzinfo=UTC).timestamp() + written.get(file.name, 0)
        os.utime(file, (moment, moment))
    run = read_run(folder).run
    assert (run["state"], run["ended"]) == ("killed", "2026-01-01T11:01:30+00:00")
    tiles = {
        tile.one("small").text: tile.one("b").text for tile in read_page(write_report(folder)).all("div", class_="tile")
    }
    assert tiles["time"] == "1 h 01 min" and tiles["state"] == "killed"


def test_metrics_are_in_the_order_of_steps_and_the_last_line_of_a_step_counts(tmp_path: Path) -> None:
    lines = [{"step": 3, "a": 3.0}, {"step": 0, "a": 9.0, "b": "NaN"}, {"step": 1, "a": "x"}, {"step": 3, "a": 4.0}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    data = read_run(tmp_path)
    assert data.metrics["a"] == Series("a", (0, 3), (9.0, 4.0)) and data.metrics["b"].not_finite[0][0] == 0
    assert (data.steps, data.span) == (2, (0, 3))
    assert data.problems == ["metrics.jsonl: a is not a number in every step"]


def test_a_file_that_cannot_be_read_is_a_problem_and_the_rest_is_shown(tmp_path: Path) -> None:
    (tmp_path / "summary.json").mkdir()
    (tmp_path / "run.json").write_text("[1]")
    (tmp_path / "config.json").write_text('{"a": 1}')
    data = read_run(tmp_path)
    assert (data.config, data.run, data.summary) == ({"a": 1}, {}, {})
    assert data.problems[0] == "run.json: is not an object" and data.problems[1].startswith("summary.json: [Errno 21]")


def test_problems_are_named_up_to_twelve() -> None:
    some = {f"m{index}": series(1.0, math.nan, math.inf) for index in range(12)}
    data = RunData(Path("run"), metrics=dict(some))
    found = page_module._problems(data)
    assert len(found) == 12 and found[3] == "m3: 2 of 3 values not finite, first at 2"
    data.problems = ["damaged"]
    assert page_module._problems(data)[:1] == ["damaged"] and page_module._problems(data)[-1] == "and 1 more"
    assert data.problems == ["damaged"]
    assert page_module._problems(RunData(Path("run"))) == ["metrics.jsonl: no step has been logged"]


def test_the_time_of_a_run_goes_on_until_it_ends() -> None:
    started = (datetime.now(UTC) - timedelta(seconds=30)).isoformat()
    elapsed = page_module._elapsed({"started": started})
    assert elapsed is not None and 29 < elapsed < 60
    assert page_module._elapsed({"started": "2026-01-01T10:00:00+00:00", "ended": "2026-01-01T10:00:05+00:00"}) == 5.0
    assert page_module._elapsed({}) is page_module._elapsed({"started": "soon"}) is None


def test_the_headline_has_no_more_than_two_results_and_the_planned_steps_if_known() -> None:
    metrics = {"answer_probability": series(0.1, 0.1), "nll": series(2.0, 1.0), "reward": series(0.0, 1.0)}
    data = RunData(
        Path("run"),
        metrics=metrics,
        steps=2,
        summary={"seconds": 61, "held_out_reward_before": 0, "held_out_reward_after": 1},
    )
    assert page_module._facts(data) == [
        ("steps", "2"),
        ("held-out reward", "0.000 → 1.000"),
        ("answer probability", "0.1"),
        ("time", "1 min 01 s"),
    ]
    data = RunData(Path("run"), metrics=metrics, config={"steps": 0}, summary={"seconds": math.nan})
    assert page_module._facts(data) == [("steps", "0 of 0"), ("answer probability", "0.1"), ("nll", "2 → 1")]


def lines_of(figure: Element) -> dict[str, list[str]]:
    """The paths of curves by their class, without the number of the colour."""
    found: dict[str, list[str]] = {}
    for path in figure.all("path"):
        found.setdefault(path.attributes["class"].split()[0], []).append(path.attributes["d"])
    return found


def curve_of(values: list[float], folder: Path, most: int = 300) -> dict[str, list[str]]:
    return lines_of(element(draw_chart(Chart("title", "", ["m"]), [series(*values)], (1, len(values)), most), folder))


def test_a_noisy_curve_has_its_running_mean_before_it_and_a_smooth_one_is_drawn_alone(tmp_path: Path) -> None:
    short, noisy = curve_of([0.0, 1.0] * 30, tmp_path), curve_of([0.0, 1.0] * 30 + [0.0], tmp_path)
    assert short.keys() == {"line"}, "of a few steps each is a dot"
    (line,), (behind,) = noisy["line"], noisy["faint"]
    assert line != behind and len(line.split("L")) == len(behind.split("L")) == 61
    heights = {float(place.split()[1]) for place in behind.split("L")[1:]}
    means = {float(place.split()[1]) for place in line.split("L")[2:-2]}
    assert min(heights) < min(means) <= max(means) < max(heights)
    smooth = curve_of([float(step) for step in range(61)], tmp_path)
    assert smooth["line"] == smooth["faint"]


def test_steps_that_share_a_point_have_a_band_that_ends_where_values_do(tmp_path: Path) -> None:
    whole = curve_of([1.0, 3.0, 2.0, 4.0, 3.0, 5.0, 4.0, 6.0], tmp_path, 4)
    (band,) = whole["band"]
    places = [tuple(map(float, place.split())) for place in band.removesuffix("z").replace("h0", "").lstrip("M").split("L")]
    assert len(places) == 8 and band.endswith("z")
    upper, lower = places[:4], places[:3:-1]
    assert [x for x, _ in upper] == [x for x, _ in lower] and all(
        up < down for (_, up), (_, down) in zip(upper, lower, strict=True)
    )
    (broken,) = curve_of([1.0, 3.0, math.nan, math.inf, 3.0, 5.0, 4.0, 6.0], tmp_path, 4)["band"]
    assert broken.count("M") == broken.count("z") == 2


def test_marks_of_values_that_are_not_finite_are_few_however_many_there_are(tmp_path: Path) -> None:
    assert [len(curve_of([1.0, *[math.nan] * number], tmp_path).get("not-finite", [])) for number in (0, 100, 101, 950)] == [
        0,
        100,
        51,
        95,
    ]


def test_what_a_logarithmic_axis_has_no_place_for_stands_at_its_bottom(tmp_path: Path) -> None:
    chart = Chart("title", "", ["m"], log=True)
    figure = element(draw_chart(chart, [series(-1.0, 0.0, 1.0, 100.0)], (1, 4), 40), tmp_path)
    bottom, top = json.loads(figure.one("svg").attributes["data-hover"])["y"][2:]
    heights = [float(circle.attributes["cy"]) for circle in figure.one("g").all("circle")]
    assert heights == [bottom, bottom, bottom, top]
    assert "2 values of 0 or below" in figure.text


def test_the_mean_of_values_near_the_largest_float_is_finite(tmp_path: Path) -> None:
    (point,) = points(series(1.7e308, 1.7e308), 1)
    assert point.mean == 1.7e308
    assert curve_of([1.7e308, -1.7e308, 0.0], tmp_path)["line"]


def test_bars_stand_on_each_other_and_what_takes_no_time_is_not_drawn(tmp_path: Path) -> None:
    steps = (4,)
    figure = element(
        draw_phases([Series(f"seconds/{name}", steps, (value,)) for name, value in (("a", 1.0), ("b", 0.0), ("c", 3.0))]),
        tmp_path,
    )
    bars = [(bar.attributes["class"].split()[-1], bar.attributes["d"]) for bar in figure.all("path", class_="bar")]
    assert [colour for colour, _ in bars] == ["s0", "s2"]
    first, second = (re.fullmatch(r"M([\d.]+) ([\d.]+)V([\d.]+)h([\d.]+)V[\d.]+z", d) for _, d in bars)
    assert first is not None and second is not None and first[3] == second[2] and first[1] == second[1]
    low, middle, high = float(first[2]), float(first[3]), float(second[3])
    assert low - middle == pytest.approx((middle - high) / 3, abs=0.1)
    assert "4 s per step" in figure.text
    hover = json.loads(figure.one("svg").attributes["data-hover"])
    assert hover["steps"] == [[4, 4]] and hover["values"] == [[1.0, 0.0, 3.0]]


def test_prompts_of_both_steps_come_first_and_no_more_than_a_few_are_shown(tmp_path: Path) -> None:
    first = [sample(1, f"old{n}", 0.0) for n in range(4)] + [sample(1, f"both{n}", 0.0) for n in range(4)]
    last = [sample(2, f"new{n}", 0.0) for n in range(4)] + [sample(2, f"both{n}", float(n)) for n in range(4)]
    found = [pre.text for pre in cells(first, last, tmp_path).all("pre", class_="prompt")]
    changed = ["both3", "both2", "both1", "both0"]
    assert found[::2] == [*changed, "old0", "old1"] and found[1::2] == [*changed, "new0", "new1"]
    assert len(found) == 2 * PROMPTS


@pytest.mark.parametrize(
    ("rewards", "sides"),
    [
        ((0.5, 0.5), ["", ""]),
        ((1.0, 0.5, 0.0), ["good", "bad", "bad"]),
        ((math.inf, 1.0, 0.0), ["good", "good", "bad"]),
        ((math.inf,), [""]),
    ],
)
def test_a_reward_is_good_above_the_middle_of_all_that_are_finite(
    rewards: tuple[float, ...], sides: list[str], tmp_path: Path
) -> None:
    found = cells([sample(1, "p", reward) for reward in rewards], [], tmp_path)
    classes = [each.attributes["class"].split() for each in found.all("span", class_="reward")]
    assert [" ".join(each[1:]) for each in classes] == sides


def test_samples_before_the_first_step_say_so(tmp_path: Path) -> None:
    found = cells([sample(0, "p", 0.0)], [sample(7, "p", 1.0)], tmp_path)
    assert [head.children[0] for head in found.all("h3")] == ["Before the first step", "Step 7"]


def data_of(**metrics: tuple[float, ...]) -> RunData:
    return RunData(Path("run"), metrics={name: series(*values, name=name) for name, values in metrics.items()})


def test_the_headline_says_the_largest_gap_and_what_sharing_has_saved() -> None:
    def results(**metrics: tuple[float, ...]) -> dict[str, str]:
        return dict(page_module._results(data_of(**metrics)))

    assert results(log_prob_gap=(1e-3, math.inf, 2e-2, math.nan, 1e-4)) == {"largest log-prob gap": "2.0e-02 nats"}
    assert results(log_prob_gap=(math.nan, math.inf)) == {}
    assert results(tokens_computed=(30.0, 20.0), tokens_trained=(60.0, 40.0)) == {"computed tokens": "50% of those trained"}
    assert results(tokens_computed=(60.0,), tokens_trained=(60.0,)) == results(tokens_trained=(60.0,)) == {}
    assert results(tokens_computed=(0.0,), tokens_trained=(60.0,)) == {}
    assert results(weight_version=(1.0, 2.0, 3.0)) == {"weight version": "3"}
    data = data_of()
    data.summary = {"held_out_reward_before": 0.25}
    assert page_module._results(data) == [], "one of two says no change"


def test_the_time_is_what_the_run_has_written_where_that_is_a_number() -> None:
    run = {"started": "2026-01-01T10:00:00+00:00", "ended": "2026-01-01T10:00:05+00:00"}
    times = []
    for seconds in (7, 7.5, math.inf, "7", None):
        data = RunData(Path("run"), run=run, summary={"seconds": seconds}, config={"steps": "many"})
        assert page_module._facts(data)[0] == ("steps", "0")
        times.append(dict(page_module._facts(data))["time"])
    assert times == ["7 s", "7.5 s", "5 s", "5 s", "5 s"]


def test_events_are_those_of_the_first_hundred_steps_that_have_some() -> None:
    data = RunData(Path("run"), metrics={"recovery/restarts": series(*range(MOST_EVENTS + 5)), "reward": series(1.0)})
    data.run = {"resumed": [{"after_step": 0, "at": "noon"}, {"after_step": "x"}, 3]}
    found = page_module._events(data)
    assert len(found) == MOST_EVENTS and found[:2] == ["step 0: resumed after it at noon", "step 1: recovery restarts 0"]


def page_of(folder: Path, **run: Any) -> str:
    write_run(folder, 1, lambda step: {"reward": 0.5}, run=run)
    return read_page(write_report(folder)).text


def test_the_page_says_how_the_run_was_started_and_what_ended_it(tmp_path: Path) -> None:
    text = page_of(tmp_path, state="failed", command=["train.py", "--lr", 3], error="out of memory")
    assert "train.py --lr 3" in text and "out of memory" in text and "reload for later steps" not in text
    text = page_of(tmp_path, state="running", command="train.py --lr 3")
    assert "train.py" not in text and "reload for later steps" in text and "Perfetto" not in text
    (tmp_path / "trace.json").write_text("[]")
    assert "Perfetto" in page_of(tmp_path)


def test_charts_beyond_the_most_are_named_in_place_of_drawn(tmp_path: Path) -> None:
    folder = write_run(tmp_path, 1, lambda step: {f"my{index:03}": 0.5 for index in range(MOST_CHARTS + 2)})
    page = read_page(write_report(folder))
    assert len(page.all("figure")) == MOST_CHARTS
    assert f"{MOST_CHARTS}: my{MOST_CHARTS:03}, my{MOST_CHARTS + 1:03}" in page.text


def test_a_folder_of_runs_has_the_longest_of_them_and_what_each_warned_of(tmp_path: Path) -> None:
    write_run(tmp_path / "b", 5, lambda step: {"reward": 0.5, "seconds/train": 1.0})
    lines = [{"step": 0, "reward": 0.0}, {"step": 1, "reward": 1.0, "warnings": ["slow"]}]
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "metrics.jsonl").write_text(
        "".join(f"{json.dumps(line)}\n" for line in [*lines, {"step": 1, "x": "y"}])
    )
    data = read_run(tmp_path)
    assert data.metrics["tenant/a/reward"] == Series("tenant/a/reward", (0, 1), (0.0, 1.0))
    assert set(data.metrics) == {"tenant/a/reward", "tenant/b/reward"}
    assert (data.steps, data.span, data.warnings) == (5, (0, 5), ["a, slow"])
    assert data.problems == ["metrics.jsonl: x is not a number in every step"]
