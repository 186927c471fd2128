"""The report of a run as one HTML file."""

import json
import math
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from markupsafe import Markup

from rl_backend.lab.picture import render, template_text
from rl_backend.lab.report.charts import EACH_STEP, Chart, charts_for, draw_chart, draw_phases
from rl_backend.lab.report.run_data import PHASE, RunData, read_run
from rl_backend.lab.report.samples import draw_samples
from rl_backend.lab.report.timeline import draw_timeline, read_step
from rl_backend.lab.text import duration, short

FILE_NAME = "report.html"
MOST_CHARTS = 120
"""Charts of metrics that are not known by name, beyond those that are."""

ALL_POINTS, MOST_POINTS, FEWEST_POINTS = 12_000, 300, 40
"""Points of all curves, which bounds the size of the file, and limits of one curve."""


def write_report(run_dir: Path | str) -> Path:
    """Writes ``report.html`` into a run folder from the files in it, all at once, and returns its path."""
    folder = Path(run_dir)
    path = folder / FILE_NAME
    unfinished = folder / f".{FILE_NAME}.{os.getpid()}"
    unfinished.write_text(page(read_run(folder)), encoding="utf-8")
    unfinished.replace(path)
    return path


def page(data: RunData) -> str:
    """The page. It loads nothing: style, script and charts are in it."""
    groups = charts_for(data.metrics)
    curves = sum(len(chart.names) for charts in groups.values() for chart in charts)
    most = max(FEWEST_POINTS, min(MOST_POINTS, ALL_POINTS // max(curves, 1)))

    def draw(chart: Chart) -> Markup:
        return draw_chart(chart, [data.metrics[name] for name in chart.names], data.span, most)

    phases = [series for name, series in data.metrics.items() if name.startswith(PHASE)]
    trace = data.path / "trace.json"
    step = read_step(trace) if trace.is_file() else None
    state, now = str(data.run.get("state", "unknown")), f"as of {datetime.now(UTC).strftime('%Y-%m-%d %H:%M:%S UTC')}"
    command = data.run.get("command")
    return render(
        "report.html",
        name=data.path.resolve().name,
        style=Markup(template_text("report.css")),
        script=Markup(template_text("report.js")),
        when=f"{now}; reload for later steps" if state == "running" else now,
        command=" ".join(map(str, command)) if isinstance(command, list) else None,
        error=data.run.get("error"),
        tiles=[("state", state, state), *((*fact, "") for fact in _facts(data))],
        most_charts=MOST_CHARTS,
        many_steps=data.steps > EACH_STEP,
        warnings=data.warnings,
        problems=_problems(data),
        charts=[
            (group, map(draw, charts[:MOST_CHARTS]), ", ".join(chart.title for chart in charts[MOST_CHARTS:]))
            for group, charts in groups.items()
        ],
        phases=draw_phases(phases) if phases else None,
        timeline=None if step is None else draw_timeline(step),
        samples=[
            draw_samples(kind, first, last)
            for kind, (first, last) in (("Held-out answers", data.held_out), ("Samples", data.samples))
            if first
        ],
        tables=[
            (title, [(name, _value(value)) for name, value in values.items()])
            for title, values in (("Summary", data.summary), ("Configuration", data.config))
            if values
        ],
    )


def _facts(data: RunData) -> list[tuple[str, str]]:
    """(name, value) of the headline."""
    planned, seconds = data.config.get("steps"), data.summary.get("seconds")
    facts = [("steps", f"{data.steps}" + (f" of {planned}" if isinstance(planned, int) else "")), *_results(data)]
    elapsed = seconds if isinstance(seconds, int | float) and math.isfinite(seconds) else _elapsed(data.run)
    return facts if elapsed is None else [*facts, ("time", duration(elapsed))]


def _results(data: RunData) -> list[tuple[str, str]]:
    """What a reader wants to know first, of what there is."""
    found = []
    # Summaries of the version before call it an accuracy.
    for measured in ("held_out_reward", "accuracy"):
        before, after = data.summary.get(f"{measured}_before"), data.summary.get(f"{measured}_after")
        if isinstance(before, int | float) and isinstance(after, int | float):
            found.append(("held-out reward", f"{before:.3f} → {after:.3f}"))
            break
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


def _problems(data: RunData) -> list[str]:
    problems = list(data.problems)
    problems += [
        f"{name}: {len(series.not_finite)} of {len(series.values)} values not finite, first at {series.not_finite[0][0]}"
        for name, series in data.metrics.items()
        if series.not_finite
    ]
    if not data.metrics:
        problems.append("metrics.jsonl: no step has been logged")
    return problems if len(problems) <= 12 else [*problems[:12], f"and {len(problems) - 12} more"]


def _value(value: Any) -> str:
    if isinstance(value, str):
        return value
    return short(value) if isinstance(value, float) else json.dumps(value)
