"""The report of a run says what its files say."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from rl_backend.cli.main import main
from rl_backend.lab.report.page import write_report
from tests.support.page import Element, read_page
from tests.support.runs import write_run

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&amp;\x00\x1b[31m\ud800\u202e</pre>"
SHOWN = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&amp;\u2400\u241b[31m?<U+202E></pre>"


def report(folder: Path) -> Element:
    return read_page(write_report(folder))


def chart(page: Element, name: str) -> Element:
    return page.one("figure", id=f"chart-{name}")


def drawn_values(figure: Element) -> list[float]:
    """Values of the first curve, read off the chart as a reader would: by the labels of the value axis."""
    labels = [label for label in figure.all("text") if label.attributes["text-anchor"] == "end" and label.text != "step"]
    ticks = sorted((float(label.attributes["y"]) - 3.5, float(label.text.replace("k", "e3"))) for label in labels)
    (top, high), (bottom, low) = ticks[0], ticks[-1]
    curve = figure.all("path", class_="line")[0].attributes["d"]
    pixels = [float(y) for _, y in re.findall(r"[ML]([\d.-]+) ([\d.-]+)", curve)]
    return [low + (bottom - y) / (bottom - top) * (high - low) for y in pixels]


def hover(figure: Element) -> dict[str, Any]:
    return json.loads(figure.one("svg").attributes["data-hover"])


def test_a_curve_goes_through_the_logged_values(tmp_path: Path) -> None:
    values = [0.2, 0.5, 0.45, 0.9]
    page = report(write_run(tmp_path, 4, lambda step: {"reward": values[step - 1]}))
    assert drawn_values(chart(page, "reward")) == pytest.approx(values, abs=0.005)
    assert [point[2] for point in hover(chart(page, "reward"))["series"][0]["points"]] == values


def test_a_folder_of_runs_has_a_curve_for_each_of_its_tenants(tmp_path: Path) -> None:
    for index, name in enumerate(("ann", "bob", "eve", "joe", "kim")):
        write_run(
            tmp_path / name, 3 + index, lambda step, index=index: {"reward": 0.1 * index, "mine": 1.0, "seconds/train": 1.0}
        )  # type: ignore[misc]
    page = report(tmp_path)
    assert [len(hover(figure)["series"]) for figure in page.all("figure")] == [4, 1, 4, 1]
    curves = hover(chart(page, "tenant/ann/reward"))["series"]
    assert [curve["name"] for curve in curves] == [f"tenant/{name}/reward" for name in ("ann", "bob", "eve", "joe")]
    assert [point[2] for point in curves[1]["points"]] == [0.1] * 4
    assert hover(chart(page, "tenant/kim/mine"))["x"][1] >= 7


@pytest.mark.parametrize("steps", [1, 2, 7, 5000])
def test_every_logged_metric_has_a_chart_however_long_the_run(tmp_path: Path, steps: int) -> None:
    names = ["reward", "log_prob_gap", "staleness_mean", "value_loss", "explained_variance", "my/own metric"]
    page = report(write_run(tmp_path, steps, lambda step: dict.fromkeys(names, 0.5) | {"seconds/train": 1.0}))
    ids = [figure.attributes["id"] for figure in page.all("figure")]
    assert sorted(ids) == sorted([*(f"chart-{name}" for name in names), "phases"])
    for name in names:
        axis = hover(chart(page, name))["x"]
        assert axis[0] <= 1 and axis[1] >= steps


def test_metrics_are_shown_together_where_they_belong_together(tmp_path: Path) -> None:
    page = report(write_run(tmp_path, 3, lambda step: {"staleness_max": 2.0, "staleness_mean": 0.5, "grad_norm": 1.0}))
    figure = chart(page, "staleness_mean")
    assert [key.text for key in figure.all("span", class_="key")] == ["staleness_mean", "staleness_max"]
    assert [series["points"][0][2] for series in hover(figure)["series"]] == [0.5, 2.0]
    titles = [heading.text for heading in page.all("h2")]
    assert titles[:2] == ["Is the update sound?", "Do trainer and engines agree?"]


def test_values_that_are_not_finite_are_marked_and_named(tmp_path: Path) -> None:
    values = {3: math.nan, 5: math.inf, 6: -math.inf}
    page = report(write_run(tmp_path, 8, lambda step: {"policy_loss": values.get(step, 1.0 + step), "grad_norm": math.nan}))
    figure = chart(page, "policy_loss")
    assert len(figure.all("path", class_="not-finite")) == 3
    assert "3 of 8 values not finite, first NaN at step 3" in figure.one("figcaption").text
    assert figure.all("path", class_="line")[0].attributes["d"].count("M") == 3, "a gap at each of them"
    assert [point[2] for point in hover(figure)["series"][0]["points"]][2:6] == ["NaN", 5.0, "+inf", "-inf"]
    assert len(chart(page, "grad_norm").all("path", class_="not-finite")) == 8
    assert [line.text for line in page.one("section", class_="problems").all("li")] == [
        "policy_loss: 3 of 8 values not finite, first at 3",
        "grad_norm: 8 of 8 values not finite, first at 1",
    ]


def test_warnings_of_the_run_stand_at_the_top_in_the_order_of_their_steps(tmp_path: Path) -> None:
    said = {2: ["step 2: <b>equal</b> rewards", "step 2: no entropy"], 3: ["step 3: all cut off"]}
    for folder in (tmp_path / "alone", tmp_path / "users" / "ann"):
        write_run(folder, 4, lambda step: {"reward": 0.5} | ({"warnings": said[step]} if step in said else {}))  # type: ignore[dict-item]
    page = report(tmp_path / "alone")
    assert [line.text for line in page.one("section", id="warnings").all("li")] == [*said[2], *said[3]]
    assert [figure.attributes["id"] for figure in page.all("figure")] == ["chart-reward"]
    assert len(page.all("section", class_="problems")) == 1, "a warning is no damage"
    of_all = report(tmp_path / "users").one("section", id="warnings").all("li")
    assert [line.text for line in of_all] == [f"ann, {sentence}" for sentence in (*said[2], *said[3])]


def test_events_of_processes_and_resumes_stand_in_the_order_of_their_steps(tmp_path: Path) -> None:
    lost = {
        3: {"engines/died": 1.0, "engines/seconds_lost": 12.5},
        2: {"recovery/count": 1.0},
        4: {"reshape/ranks": 1.0},
    }
    resumed = [{"after_step": 2, "at": "2026-01-01", "damaged": ["step-00000004"]}, "?", {"after_step": "?"}]
    page = report(write_run(tmp_path, 4, lambda step: {"reward": 0.5} | lost.get(step, {}), run={"resumed": resumed}))
    assert [line.text for line in page.one("section", id="events").all("li")] == [
        "step 2: recovery count 1, resumed after it at 2026-01-01, because step-00000004 was damaged",
        "step 3: engines died 1, engines seconds lost 12.5",
        "step 4: reshape ranks 1",
    ]
    assert not report(write_run(tmp_path / "quiet", 4, lambda step: {"reward": 0.5})).all("section", id="events")


def test_a_log_prob_gap_that_spans_decades_has_a_logarithmic_axis(tmp_path: Path) -> None:
    page = report(write_run(tmp_path, 4, lambda step: {"log_prob_gap": [1e-6, 0.0, 1e-3, 0.1][step - 1]}))
    figure = chart(page, "log_prob_gap")
    ticks = [label.text for label in figure.all("text") if label.attributes["text-anchor"] == "end" and label.text != "step"]
    assert hover(figure)["log"] is True
    assert ticks == ["1e-6", "1e-5", "1e-4", "0.001", "0.01", "0.1"]
    assert "1 values of 0 or below" in figure.one("figcaption").text


def test_a_long_run_keeps_its_extremes_in_a_file_of_bounded_size(tmp_path: Path) -> None:
    names = [f"layer{index}/norm" for index in range(200)]

    def metrics(step: int) -> dict[str, float]:
        return dict.fromkeys(names, step / 7) | {"grad_norm": 1000.0 if step == 1777 else 1.0 + step % 3 / 10}

    path = write_report(write_run(tmp_path, 2500, metrics))
    assert path.stat().st_size < 2_000_000
    page = read_page(path)
    points = hover(chart(page, "grad_norm"))["series"][0]["points"]
    (spike,) = [point for point in points if len(point) == 5 and point[4] == 1000.0]
    assert spike[0] <= 1777 <= spike[0] + spike[1]
    assert chart(page, "grad_norm").all("path", class_="band")
    left = [note.text for note in page.all("p", class_="note") if note.text.startswith("Not drawn")]
    assert len(left) == 1 and "layer199/norm" in left[0]


def test_phases_stand_on_top_of_each_other(tmp_path: Path) -> None:
    page = report(write_run(tmp_path, 2, lambda step: {"seconds/sample": 1.0 * step, "seconds/train": 3.0}))
    figure = page.one("figure", id="phases")
    bars = [re.findall(r"[\d.]+", bar.attributes["d"]) for bar in figure.all("path", class_="bar")]
    spans = [(float(bottom), float(top)) for _, bottom, top, *_ in bars]
    assert len(spans) == 4
    heights = [bottom - top for bottom, top in spans]
    assert heights[1] == pytest.approx(3 * heights[0], rel=0.01)
    assert heights[2] == pytest.approx(2 * heights[0], rel=0.01)
    assert spans[1][0] == spans[0][1], "train begins where sample ends"
    assert "sample 1.5 s, 33%" in figure.one("p", class_="legend").text
    assert figure.one("output").text == "4.5 s per step"


def test_samples_of_prompts_that_both_steps_had_stand_side_by_side(tmp_path: Path) -> None:
    samples = [
        {"step": step, "prompt": prompt, "response": f"{answer} at {step}", "reward": reward}
        for step, prompts in ((1, "abc"), (2, "xyz"), (3, "cde"))
        for prompt in prompts
        for answer, reward in (("bad", 0.0), ("good", 1.0))
    ]
    page = report(write_run(tmp_path, 3, lambda step: {"reward": 0.5}, samples))
    pairs = [pair.all("article") for pair in page.one("section", id="samples").all("div", class_="pair")[1:]]
    prompts = [[article.all("pre")[0].text for article in pair] for pair in pairs]
    assert prompts == [["c", "c"], ["a", "d"], ["b", "e"]]
    best, worst = pairs[0][1].all("div", class_="response")
    assert (best.one("span", class_="reward").text, best.one("pre").text) == ("1", "good at 3")
    assert (worst.one("span", class_="reward").text, worst.one("pre").text) == ("0", "bad at 3")


def test_held_out_answers_that_changed_most_come_first(tmp_path: Path) -> None:
    folder = write_run(tmp_path, 2, lambda step: {"reward": 0.5})
    rewards = {"a": (0.0, 0.0), "b": (1.0, 0.5), "c": (0.0, 1.0)}
    lines = [
        {"step": step, "prompt": prompt, "response": f"{prompt} after {step}", "reward": rewards[prompt][index]}
        for index, step in enumerate((0, 2))
        for prompt in rewards
    ]
    (folder / "held_out.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    section = report(folder).one("section", id="held-out-answers")
    before, after = (head.text for head in section.all("h3"))
    assert before.startswith("Before the first step") and after.startswith("Step 2")
    pairs = [pair.all("article") for pair in section.all("div", class_="pair")[1:]]
    texts = [[article.all("pre")[1].text for article in pair] for pair in pairs]
    assert texts == [["c after 0", "c after 2"], ["b after 0", "b after 2"], ["a after 0", "a after 2"]]


def test_text_of_a_run_is_text_on_the_page(tmp_path: Path) -> None:
    sample = {"step": 1, "prompt": HOSTILE, "response": HOSTILE, "reward": 0.0, "note": HOSTILE}
    run = {"state": "failed", "error": HOSTILE}
    folder = write_run(tmp_path, 1, lambda step: {HOSTILE: 1.0}, [sample], config={"model": HOSTILE}, run=run)
    page = report(folder)
    assert len(page.all("script")) == 1 and page.all("img") == []
    assert [pre.text for pre in page.one("section", id="samples").all("pre")] == [SHOWN, SHOWN]
    assert page.one("p", class_="error").text == SHOWN
    assert SHOWN in [cell.text for cell in page.all("td")]
    assert SHOWN in [heading.children[0] for heading in page.all("h3")]


def test_the_page_loads_nothing_and_may_not(tmp_path: Path) -> None:
    page = report(write_run(tmp_path, 2, lambda step: {"reward": 0.5}))
    assert [element for element in page.all() if {"src", "href", "action"} & set(element.attributes)] == []
    assert not re.search(r"@import|url\(", page.one("style").text)
    (policy,) = [meta for meta in page.all("meta") if meta.attributes.get("http-equiv") == "Content-Security-Policy"]
    assert policy.attributes["content"].startswith("default-src 'none';")


def test_the_headline_says_how_the_run_went(tmp_path: Path) -> None:
    run = {"state": "finished", "started": "2026-01-01T10:00:00+00:00", "ended": "2026-01-01T12:30:00+00:00"}
    summary = {"held_out_reward_before": 0.3871, "held_out_reward_after": 0.979}
    metrics = {"reward": 0.5, "log_prob_gap": 4e-7, "weight_version": 3.0, "tokens_computed": 30.0}
    metrics["tokens_trained"] = 80.0
    page = report(write_run(tmp_path, 3, lambda step: metrics, summary=summary, run=run, config={"steps": 5}))
    tiles = {tile.one("small").text: tile.one("b").text for tile in page.all("div", class_="tile")}
    assert tiles == {
        "state": "finished",
        "steps": "3 of 5",
        "held-out reward": "0.387 → 0.979",
        "reward": "0.5",
        "largest log-prob gap": "4.0e-07 nats",
        "weight version": "3",
        "computed tokens": "38% of those trained",
        "time": "2 h 30 min",
    }


def test_damage_is_named_and_half_a_last_line_is_not(tmp_path: Path) -> None:
    folder = write_run(tmp_path, 3, lambda step: {"reward": 0.5, "name": "x"}, summary={})  # type: ignore[dict-item]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')
    assert [line.text for line in report(folder).one("section", class_="problems").all("li")] == [
        "metrics.jsonl: name is not a number in every step"
    ]
    (folder / "metrics.jsonl").write_text('no json\n{"reward": 1}\n{"step": 1, "reward": 1}\n')
    (folder / "summary.json").write_text("[")
    problems = [line.text for line in report(folder).one("section", class_="problems").all("li")]
    assert problems[0].startswith("summary.json: ")
    (folder / "summary.json").write_text("[" * 100_000)
    assert report(folder).one("section", class_="problems").all("li")[0].text.startswith("summary.json: ")
    assert problems[1] == "metrics.jsonl: 2 line(s) are not an object with a step, the first is line 1"


def test_the_last_step_of_many_samples_is_found_without_reading_them_all(tmp_path: Path) -> None:
    samples = [
        {"step": step, "prompt": "p", "response": "long " * 2000, "reward": 0.0} for step in range(1, 60) for _ in range(20)
    ]
    page = report(write_run(tmp_path, 59, lambda step: {"reward": 0.0}, samples))
    heads = [heading.text for heading in page.one("section", id="samples").all("h3")]
    assert heads[0].startswith("Step 1") and heads[1].startswith("Step 59")
    assert "8500 more characters" in page.one("section", id="samples").all("em")[0].text


def test_of_a_set_larger_than_what_is_read_both_steps_have_the_same_prompts(tmp_path: Path) -> None:
    held_out = [
        {"step": step, "prompt": f"p{row}", "response": "long " * 2000, "reward": float(step > 0 and row < 9)}
        for step in (0, 5, 10)
        for row in range(600)
    ]
    folder = write_run(tmp_path, 10, lambda step: {"reward": 0.0}, [])
    (folder / "held_out.jsonl").write_text("".join(json.dumps(line) + "\n" for line in held_out))
    section = report(folder).one("section", id="held-out-answers")
    before, after = (heading.text for heading in section.all("h3"))
    assert before.startswith("Before the first step") and after.startswith("Step 10")
    # 4 MiB of lines of 10 KiB, of which nine have learned.
    shared = int(re.findall(r"first (\d+) samples, mean reward 0$", before)[0])
    assert abs(int(re.findall(r"first (\d+) samples", after)[0]) - shared) <= 1 and 300 < shared < 600
    assert f"Of {shared} prompts that both steps had" in section.text or f"Of {shared - 1} prompts" in section.text


ODD_METRICS = [
    "",
    '{"step": 1, "reward": 1.7e308}\n{"step": 2, "reward": -1.7e308}\n',
    '{"step": 1, "reward": 5e-324, "tokens": 1' + "0" * 400 + "}\n",
    '{"step": 1, "reward": 0}\n{"step": 1, "reward": 1}\n{"step": -4, "reward": 1}\n{"step": 1000000000000000}\n',
    '{"step": 1, "reward": NaN, "seconds/a": Infinity, "log_prob_gap": -Infinity}\n',
    '{"step": 1.5, "reward": null}\n[]\n3\nnull\n{"step": null}\n{"step": true, "reward": false}\n',
]


@pytest.mark.parametrize("metrics", ODD_METRICS)
def test_odd_files_still_make_a_report(tmp_path: Path, metrics: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(metrics)
    odd = [{"step": 1}, {"step": 2, "prompt": ["chat"], "response": {"a": 1}, "reward": math.nan, "version_spans": "z"}]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in odd))
    (tmp_path / "summary.json").write_text(
        '{"held_out_reward_before": NaN, "held_out_reward_after": "a", "seconds": NaN, "nested": {"a": [1]}}'
    )
    (tmp_path / "run.json").write_text('{"state": 5, "error": ["x"], "started": 3, "command": "x"}')
    (tmp_path / "config.json").write_text("[1]")
    (tmp_path / "trace.json").write_text('[\n{"ph": "X", "cat": "step"},\n{"ph": "f", "id": 3, "name": "x"},\n{"ph":')
    assert report(tmp_path).one("h1").text.startswith(tmp_path.name)


def test_the_command_makes_a_report_again_and_refuses_what_is_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "runs" / "mine", 2, lambda step: {"nll": 1.0 / step, "answer_probability": 0.1 * step})
    assert main(["report", str(folder)]) == 0
    assert Path(capsys.readouterr().out.strip()) == folder / "report.html"
    assert chart(read_page(folder / "report.html"), "nll")
    for nothing in (tmp_path, tmp_path / "gone"):
        assert main(["report", str(nothing)]) == 2
        assert "is not a run folder: it has no metrics.jsonl, and neither has a folder in it" in capsys.readouterr().err


def test_the_command_makes_the_report_of_all_users_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("ann", "bob"):
        write_run(tmp_path / "tenants" / name, 2, lambda step: {"reward": 0.1 * step})
    assert main(["report", str(tmp_path / "tenants")]) == 0
    assert Path(capsys.readouterr().out.strip()) == tmp_path / "tenants" / "report.html"
    curves = hover(chart(read_page(tmp_path / "tenants" / "report.html"), "tenant/ann/reward"))["series"]
    assert [curve["name"] for curve in curves] == ["tenant/ann/reward", "tenant/bob/reward"]
