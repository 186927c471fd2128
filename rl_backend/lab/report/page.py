"""The report of a run as one HTML file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

from rl_backend.lab.picture import Html, document, escaped, tag
from rl_backend.lab.report.charts import EACH_STEP, draw_chart, draw_phases
from rl_backend.lab.report.metrics import PHASE, charts_for
from rl_backend.lab.report.run_data import RunData, read_run
from rl_backend.lab.report.samples import draw_samples
from rl_backend.lab.report.timeline import draw_timeline, read_step
from rl_backend.lab.text import duration, short

FILE_NAME = "report.html"
MOST_CHARTS = 120
"""Charts of metrics that are not known by name, beyond those that are."""

ALL_POINTS, MOST_POINTS, FEWEST_POINTS = 12_000, 300, 40
"""Points of all curves, which bounds the size of the file, and limits of one curve."""

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def write_report(run_dir: Path | str) -> Path:
    """Writes ``report.html`` into a run folder from the files in it, all at once, and returns its path."""
    folder = Path(run_dir)
    page = render(read_run(folder))
    path = folder / FILE_NAME
    unfinished = folder / f".{FILE_NAME}.{os.getpid()}"
    unfinished.write_text(page, encoding="utf-8")
    unfinished.replace(path)
    return path


def render(data: RunData) -> str:
    """The page. It loads nothing: style, script and charts are in it."""
    title = f"{data.path.resolve().name} · rl_backend run"
    head = (
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
    )
    return document(
        title,
        _own_file("report.css"),
        tag("main", _headline(data), _problems(data), *_sections(data)),
        tag("div", id="tip", role="status"),
        tag("script", _own_file("report.js")),
        head=head,
    )


def _sections(data: RunData) -> list[Html]:
    sections = []
    groups = charts_for(data.metrics)
    curves = sum(len(chart.names) for charts in groups.values() for chart in charts)
    most = max(FEWEST_POINTS, min(MOST_POINTS, ALL_POINTS // max(curves, 1)))
    for group, charts in groups.items():
        figures = [
            draw_chart(chart, [data.metrics[name] for name in chart.names], data.span, most)
            for chart in charts[:MOST_CHARTS]
        ]
        left = ", ".join(chart.title for chart in charts[MOST_CHARTS:])
        note = tag("p", f"Not drawn, as there are more than {MOST_CHARTS}: {left}", class_="note") if left else None
        sections.append(_section(group, tag("div", *figures, class_="charts"), note))
    phases = [series for name, series in data.metrics.items() if name.startswith(PHASE)]
    time = [draw_phases(phases)] if phases else []
    trace = data.path / "trace.json"
    if trace.is_file() and (step := read_step(trace)) is not None:
        where = "The whole trace: open trace.json of the run folder in Perfetto (ui.perfetto.dev) or chrome://tracing."
        time += [draw_timeline(step), tag("p", where, class_="note")]
    if time:
        sections.append(_section("Where does the time go?", *time))
    for kind, (first, last) in (("Held-out answers", data.held_out), ("Samples", data.samples)):
        if first:
            sections.append(draw_samples(kind, first, last))
    for title, values in (("Summary", data.summary), ("Configuration", data.config)):
        if values:
            rows = [tag("tr", tag("th", name), tag("td", _value(value))) for name, value in values.items()]
            sections.append(_section(title, tag("div", tag("table", *rows), class_="table")))
    return sections


def _section(title: str, *body: Html | None, **attributes: object) -> Html:
    return tag("section", tag("h2", title), *body, **attributes)


def _headline(data: RunData) -> Html:
    state, planned = str(data.run.get("state", "unknown")), data.config.get("steps")
    facts = [("steps", f"{data.steps}" + (f" of {planned}" if isinstance(planned, int) else "")), *_results(data)]
    seconds = data.summary.get("seconds")
    elapsed = seconds if isinstance(seconds, int | float) and math.isfinite(seconds) else _elapsed(data.run)
    if elapsed is not None:
        facts.append(("time", duration(elapsed)))
    tiles = [
        tag("div", tag("small", name), tag("b", value), class_=f"tile {kind}".strip())
        for name, value, kind in (("state", state, state), *((*fact, "") for fact in facts))
    ]
    written = f"as of {datetime.now(UTC).strftime('%Y-%m-%d %H:%M:%S UTC')}"
    when = f"{written}; reload for later steps" if state == "running" else written
    command = data.run.get("command")
    lines = [
        tag("p", " ".join(map(str, command)), class_="command") if isinstance(command, list) else None,
        tag("p", data.run["error"], class_="error") if data.run.get("error") else None,
    ]
    reading = (
        "Curves of many steps: in bold their running mean, in pale each step, or the range of steps that share a point."
    )
    return tag(
        "header",
        tag("h1", data.path.resolve().name, tag("span", when, class_="unit")),
        *lines,
        tag("div", *tiles, class_="tiles"),
        tag("p", reading, class_="note") if data.steps > EACH_STEP else None,
    )


def _results(data: RunData) -> list[tuple[str, str]]:
    """What a reader wants to know first, of what there is."""
    found = []
    before, after = data.summary.get("accuracy_before"), data.summary.get("accuracy_after")
    if isinstance(before, int | float) and isinstance(after, int | float):
        found.append(("held-out accuracy", f"{before:.3f} → {after:.3f}"))
    for name in ("answer_probability", "nll", "reward"):
        series = data.metrics.get(name)
        if series is not None and len(found) < 2:
            values = f"{series.values[0]:.3g}", f"{series.values[-1]:.3g}"
            found.append((name.replace("_", " "), " → ".join(dict.fromkeys(values))))
    gap = data.metrics.get("log_prob_gap")
    if gap is not None and gap.finite:
        found.append(("largest log-prob gap", f"{max(gap.finite):.1e} nats"))
    version = data.metrics.get("weight_version")
    if version is not None:
        found.append(("weight version", short(version.values[-1])))
    return found


def _elapsed(run: Mapping[str, Any]) -> float | None:
    try:
        started = datetime.fromisoformat(run["started"])
        ended = datetime.fromisoformat(run["ended"]) if run.get("ended") else datetime.now(UTC)
        return (ended - started).total_seconds()
    except (KeyError, TypeError, ValueError):
        return None


def _problems(data: RunData) -> Html | None:
    problems = list(data.problems)
    problems += [
        f"{name}: {len(series.not_finite)} of {len(series.values)} values not finite, first at {series.not_finite[0][0]}"
        for name, series in data.metrics.items()
        if series.not_finite
    ]
    if not data.metrics:
        problems.append("metrics.jsonl: no step has been logged")
    if not problems:
        return None
    more = [f"and {len(problems) - 12} more"] if len(problems) > 12 else []
    return _section("Problems", tag("ul", *(tag("li", line) for line in problems[:12] + more)), class_="problems")


def _value(value: Any) -> Html:
    if isinstance(value, str):
        return escaped(value)
    return escaped(short(value) if isinstance(value, float) else json.dumps(value))


def _own_file(name: str) -> Html:
    return Html(resources.files("rl_backend.lab.report").joinpath(name).read_text(encoding="utf-8"))
