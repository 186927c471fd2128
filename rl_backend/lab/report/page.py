"""The report of a run as one HTML file, with the model's first and last responses."""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import zip_longest
from pathlib import Path
from typing import Any

from markupsafe import Markup

from rl_backend.lab.picture import render, template_text
from rl_backend.lab.report.charts import EACH_STEP, Chart, charts_for, draw_chart, draw_phases
from rl_backend.lab.report.run_data import PHASE, RunData, Sample, read_run
from rl_backend.lab.text import as_number, count, duration, short

FILE_NAME = "report.html"
MOST_CHARTS = 120
# Begin the names of metrics of what befell processes.
EVENTS, MOST_EVENTS = ("recovery/", "engines/", "reshape/"), 100
# Points of all curves, which bounds the size of the file, and limits of one curve.
ALL_POINTS, MOST_POINTS, FEWEST_POINTS = 12_000, 300, 40


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
        events=_events(data),
        problems=_problems(data),
        charts=[
            (group, map(draw, charts[:MOST_CHARTS]), ", ".join(chart.title for chart in charts[MOST_CHARTS:]))
            for group, charts in groups.items()
        ],
        phases=draw_phases(phases) if phases else None,
        traced=(data.path / "trace.json").is_file(),
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
    planned, seconds = data.config.get("steps"), data.summary.get("seconds")
    facts = [("steps", f"{data.steps}" + (f" of {planned}" if isinstance(planned, int) else "")), *_results(data)]
    elapsed = seconds if isinstance(seconds, int | float) and math.isfinite(seconds) else _elapsed(data.run)
    return facts if elapsed is None else [*facts, ("time", duration(elapsed))]


_COMPUTED = "tokens_computed", "tokens_trained"


def _results(data: RunData) -> list[tuple[str, str]]:
    found = []
    before, after = data.summary.get("held_out_reward_before"), data.summary.get("held_out_reward_after")
    if isinstance(before, int | float) and isinstance(after, int | float):
        found.append(("held-out reward", f"{before:.3f} → {after:.3f}"))
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
    computed, trained = (sum(data.metrics[name].finite) if name in data.metrics else 0.0 for name in _COMPUTED)
    if 0 < computed < trained:
        found.append(("computed tokens", f"{computed / trained:.0%} of those trained"))
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


def _events(data: RunData) -> list[str]:
    """What became of the run's processes, and where it was resumed, in the order of its steps."""
    found: dict[int, list[str]] = {}
    for name, series in data.metrics.items():
        if name.startswith(EVENTS):
            for step, value in zip(series.steps, series.values, strict=True):
                found.setdefault(step, []).append(f"{name.replace('/', ' ').replace('_', ' ')} {short(value)}")
    resumed = data.run.get("resumed")
    for each in resumed if isinstance(resumed, list) else ():
        if isinstance(each, dict) and isinstance(each.get("after_step"), int):
            damaged = f", because {', '.join(map(str, each['damaged']))} was damaged" if each.get("damaged") else ""
            found.setdefault(each["after_step"], []).append(f"resumed after it at {each.get('at')}{damaged}")
    return [f"step {step}: {', '.join(texts)}" for step, texts in sorted(found.items())][:MOST_EVENTS]


def _value(value: Any) -> str:
    if isinstance(value, str):
        return value
    return short(value) if isinstance(value, float) else json.dumps(value)


PROMPTS, RESPONSES, CHARACTERS = 6, 3, 1500
TEXTS = ("prompt", "response", "reward", "step", "turns", "segments")


def draw_samples(kind: str, first: Sequence[Sample], last: Sequence[Sample]) -> Markup:
    """Two columns; prompts that both steps have come first, those with the largest change of reward on top."""
    before, after = _by_prompt(first), _by_prompt(last)
    shared = [prompt for prompt in before if prompt in after]
    shared.sort(key=lambda prompt: -abs(_mean_reward(after[prompt]) - _mean_reward(before[prompt])))
    left = [*shared, *(prompt for prompt in before if prompt not in after)][:PROMPTS]
    right = [*shared, *(prompt for prompt in after if prompt not in before)][:PROMPTS]
    # Between the lowest and the highest reward, for the colours; None when there is nothing to tell apart.
    rewards = _rewards([*first, *last], finite=True)
    middle = (min(rewards) + max(rewards)) / 2 if rewards and min(rewards) < max(rewards) else None
    columns = [(left, before), (right, after)] if last else [(left, before)]
    rows = zip_longest(*([_cell(prompt, of[prompt], middle) for prompt in prompts] for prompts, of in columns))
    if not last:
        note = "All samples are of one step."
    elif shared:
        note = f"Of {len(shared)} prompts that both steps had, those whose rewards changed most."
    else:
        note = "The two steps had no prompt in common."
    if any(len(responses) > 1 for responses in before.values()):
        note += f" Of each prompt: its best, its middle and its worst of up to {RESPONSES} responses."
    heads = []
    for samples in filter(None, (first, last)):
        rewards = _rewards(samples)
        mean = f", mean reward {short(sum(rewards) / len(rewards))}" if rewards else ""
        heads.append((_step(samples), f"the first {count(len(samples), 'sample')}{mean}"))
    return render("samples.html", kind=kind, both=bool(last), note=note, heads=heads, rows=rows, most=CHARACTERS)


def _by_prompt(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    found: dict[str, list[Sample]] = {}
    for sample in samples:
        found.setdefault(str(sample.get("prompt", "")), []).append(sample)
    return found


def _rewards(samples: Sequence[Sample], *, finite: bool = False) -> list[float]:
    rewards = (as_number(sample.get("reward")) for sample in samples)
    return [reward for reward in rewards if reward is not None and (not finite or math.isfinite(reward))]


def _mean_reward(samples: Sequence[Sample]) -> float:
    rewards = _rewards(samples, finite=True)
    return sum(rewards) / len(rewards) if rewards else 0.0


def _step(samples: Sequence[Sample]) -> str:
    step = samples[0].get("step")
    return "Before the first step" if step == 0 else f"Step {step}"


def _cell(prompt: str, samples: Sequence[Sample], middle: float | None) -> dict[str, Any]:
    rewards = _rewards(samples)
    ordered = sorted(samples, key=lambda sample: -(as_number(sample.get("reward")) or 0.0))
    if len(ordered) > RESPONSES:
        # Best, middle and worst.
        ordered = [ordered[0], ordered[len(ordered) // 2], ordered[-1]]
    return {
        "step": _step(samples),
        "mean": f"mean of {len(rewards)}: {short(sum(rewards) / len(rewards))}" if len(rewards) > 1 else None,
        "prompt": prompt,
        "responses": [_response(sample, middle) for sample in ordered],
    }


def _response(sample: Sample, middle: float | None) -> dict[str, Any]:
    reward = as_number(sample.get("reward"))
    facts = ", ".join(
        _versions(value) if name == "version_spans" else f"{name.replace('_', ' ')} {_plain(value)}"
        for name, value in [*sample.items(), *_reward_info(sample)]
        if name not in TEXTS and not isinstance(value, dict) and not (isinstance(value, list) and len(value) > 8)
    )
    side = "" if middle is None or reward is None else " good" if reward > middle else " bad"
    return {
        "reward": reward,
        "side": side,
        "facts": facts,
        "text": str(sample.get("response", "")),
        "segments": _segments(sample),
        "turns": _turns(sample),
    }


def _segments(sample: Sample) -> list[list[tuple[str, bool]]]:
    segments = sample.get("segments")
    return [
        [(str(piece[0]), bool(piece[1])) for piece in segment if isinstance(piece, list) and len(piece) == 2]
        for segment in (segments if isinstance(segments, list) else ())
        if isinstance(segment, list)
    ]


def _turns(sample: Sample) -> list[str]:
    turns = sample.get("turns")
    found = []
    for number, turn in enumerate((each for each in turns if isinstance(each, dict)) if isinstance(turns, list) else (), 1):
        calls = turn.get("calls")
        for call in calls if isinstance(calls, list) else ():
            if isinstance(call, dict):
                asked = f"{call.get('name') or '?'}({_plain(call.get('arguments'))})"
                found.append(f"turn {number}: {asked} → {call.get('status')}: {call.get('answer')}")
        reward = as_number(turn.get("reward"))
        if reward:
            found.append(f"turn {number}: reward {short(reward)}")
    return found


def _reward_info(sample: Sample) -> Iterator[tuple[str, Any]]:
    info = sample.get("reward_info")
    for name, value in info.items() if isinstance(info, dict) else ():
        if isinstance(value, dict):
            yield from ((f"{name} {key}", each) for key, each in value.items())
        else:
            yield name, value


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _versions(spans: Any) -> str:
    try:
        return f"weight version {', then '.join(str(version) for version, _ in spans)}"
    except (TypeError, ValueError):
        return f"version spans {_plain(spans)}"
