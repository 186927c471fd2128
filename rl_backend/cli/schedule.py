"""``rl-backend schedule``: what a pipeline schedule costs in idle time and activations, in numbers and as a picture."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from rl_backend.cli import schedule_trace
from rl_backend.cli.errors import CommandError
from rl_backend.cli.picture import Picture
from rl_backend.cli.schedule_chart import draw_schedule
from rl_backend.contracts import BatchError, ConfigError
from rl_backend.pipeline import SCHEDULES, Costs, Schedule, Timeline, make_schedule, simulate
from rl_backend.report.html import Html, tag
from rl_backend.report.numbers import short

ALL = "all"
REQUIRED = ("schedule", "pp", "microbatches")
DEFAULTS = {"costs": "1,1,1", "comm": 0.0}
FORMATS = (".png", ".svg", ".html")
STYLE = "body { margin: 24px; background: #fff; color: #1c2330; } div { overflow-x: auto; } pre { margin: 24px 0 0 64px; }"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "docs/schedules.md says what the schedules are, what they need and how the numbers are meant."
    parser.add_argument(
        "--schedule",
        choices=[*SCHEDULES, ALL],
        metavar="NAME",
        help=f"{', '.join(SCHEDULES)}; {ALL} compares",
    )
    parser.add_argument("--pp", type=int, metavar="N", help="pipeline ranks")
    parser.add_argument("--microbatches", type=int, metavar="N", help="of a step, on each data-parallel rank")
    parser.add_argument("--vpp", type=int, metavar="N", help="stages per rank (default: what the schedule needs, or 2)")
    parser.add_argument(
        "--costs",
        metavar="F,B,W",
        help="times of forward, backward for inputs and backward for weights of one micro-batch on one rank, in any unit; "
        "a rank's stages share them (default 1,1,1)",
    )
    parser.add_argument("--comm", type=float, metavar="C", help="time of one transfer, same unit (default 0)")
    parser.add_argument("--forward-only", action="store_true", help="a step without backward pass, as for log-probs")
    parser.add_argument(
        "--from-trace",
        type=Path,
        metavar="RUN",
        help="in place of a schedule: a traced run's folder, or its trace; what its pipeline did, beside what was predicted",
    )
    parser.add_argument(
        "--pass", dest="number", type=int, metavar="N", help="of --from-trace: which training pass (default: the median one)"
    )
    parser.add_argument("--draw", type=Path, metavar="FILE", help="the timeline of one schedule: .png, .svg or .html")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(arguments: argparse.Namespace) -> int:
    """Prints the numbers and draws the picture.

    Raises:
        CommandError: a value that makes no sense, what the schedule cannot do, or a picture that cannot be written.
    """
    if arguments.draw is not None:
        _check_drawing(arguments)
    if arguments.from_trace is not None:
        return _show_trace(arguments)
    missing = [flag for flag in REQUIRED if getattr(arguments, flag) is None]
    if missing:
        raise CommandError(
            f"--{missing[0]} is missing; name a schedule with --schedule, --pp and --microbatches, or a run "
            "with --from-trace"
        )
    if arguments.number is not None:
        raise CommandError(f"--pass {arguments.number}: chooses a pass of --from-trace, which is not given")
    for name, default in DEFAULTS.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, default)
    costs = _costs(arguments)
    if arguments.schedule == ALL:
        return _compare(arguments, costs)
    schedule, timeline = _simulated(arguments.schedule, arguments, costs)
    facts = _facts(schedule, timeline, arguments, costs)
    if arguments.draw is not None:
        picture = draw_schedule(schedule, timeline, _summary(facts))
        _write(arguments.draw, picture, schedule, _as_text(schedule, timeline, facts))
    print(json.dumps(facts, indent=1) if arguments.json else _as_text(schedule, timeline, facts))
    return 0


def _show_trace(arguments: argparse.Namespace) -> int:
    given = [flag for flag in (*REQUIRED, "vpp", *DEFAULTS) if getattr(arguments, flag) is not None]
    if given:
        raise CommandError(f"--{given[0]} {getattr(arguments, given[0])}: the trace of --from-trace says that; leave it out")
    if arguments.forward_only:
        raise CommandError("--forward-only: --from-trace shows training passes; leave it out")
    found = schedule_trace.chosen_pass(arguments.from_trace, arguments.number)
    if arguments.draw is not None:
        _write(arguments.draw, schedule_trace.draw(found), found.schedule, schedule_trace.as_text(found))
    schedule_trace.print_pass(found, as_json=arguments.json)
    return 0


def _compare(arguments: argparse.Namespace, costs: tuple[float, float, float]) -> int:
    """All schedules, one line each; of one that cannot do what is asked for, why."""
    rows: dict[str, dict[str, Any]] = {}
    for name in SCHEDULES:
        try:
            rows[name] = _facts(*_simulated(name, arguments, costs), arguments, costs)
        except CommandError as error:
            rows[name] = {"error": str(error)}
    if all("error" in facts for facts in rows.values()):
        raise CommandError(rows[next(iter(rows))]["error"])
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return 0
    print(f"{'':18}makespan  bubble of the step  inside a rank  peak activations of a rank's layers")
    for name, facts in rows.items():
        if "error" in facts:
            print(f"{name:16}  {facts['error']}")
            continue
        peak = max(facts["peak_activations"]) / facts["stages_per_rank"]
        bubbles = f"{facts['bubble_makespan']:>18.1%}  {facts['bubble_span']:>13.1%}"
        print(f"{name:16}  {short(facts['makespan']):>8}  {bubbles}  {short(peak):>16}")
    return 0


def _simulated(name: str, arguments: argparse.Namespace, costs: tuple[float, float, float]) -> tuple[Schedule, Timeline]:
    stages = arguments.vpp or SCHEDULES[name].stages_per_rank or 2
    forward, inputs, weights = (cost / stages for cost in costs)
    shared = Costs(forward, inputs, weights, arguments.comm)
    try:
        schedule = make_schedule(
            name,
            arguments.pp,
            arguments.microbatches,
            stages_per_rank=arguments.vpp,
            forward_only=arguments.forward_only,
            costs=shared,
        )
    except (BatchError, ConfigError) as error:
        raise CommandError(_in_flags(str(error))) from None
    return schedule, simulate(schedule, shared)


def _in_flags(message: str) -> str:
    """An error in terms of the command line: ``vpp=1`` is ``--vpp 1``, ``6 micro-batches`` is ``--microbatches 6``."""
    message = re.sub(r"^(-?\d+) micro-batches:", r"--microbatches \1:", message)
    return re.sub(r"\b(pp|vpp|schedule)=(-?\w+)", r"--\1 \2", message)


def _facts(
    schedule: Schedule, timeline: Timeline, arguments: argparse.Namespace, costs: tuple[float, float, float]
) -> dict[str, Any]:
    return {
        "schedule": schedule.name,
        "pp": schedule.pp_size,
        "num_micro_batches": schedule.num_micro_batches,
        "stages_per_rank": schedule.stages_per_rank,
        "forward_only": schedule.forward_only,
        "costs": {**dict(zip(("forward", "backward_input", "backward_weight"), costs, strict=True)), "comm": arguments.comm},
        **schedule_trace.times(timeline),
        "peak_activations": list(timeline.peak_activations),
        "placement": list(schedule.placement),
        "actions": [[str(action) for action in own] for own in schedule.actions],
    }


def _as_text(schedule: Schedule, timeline: Timeline, facts: dict[str, Any]) -> str:
    lines = [
        f"{schedule.name}: {_count(schedule.pp_size, 'rank')} with {_count(schedule.stages_per_rank, 'stage')} each, "
        f"{_count(schedule.num_micro_batches, 'micro-batch')}{', forward passes alone' if schedule.forward_only else ''}",
        _summary(facts),
        "",
        "rank  stages        start       end  idle inside  peak activations",
    ]
    for rank, (spans, busy) in enumerate(zip(timeline.spans, timeline.busy, strict=True)):
        start, end = spans[0].start, spans[-1].end
        stages = ", ".join(map(str, schedule.stages_of(rank)))
        idle = max(0.0, 1 - busy / (end - start))
        times = f"{short(start):>7}  {short(end):>8}  {idle:>11.1%}"
        lines.append(f"{rank:>4}  {stages:<10}  {times}  {_activations(schedule, timeline.peak_activations[rank])}")
    return "\n".join(lines)


def _count(number: int, noun: str) -> str:
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{plural if number != 1 else ''}"


def _summary(facts: dict[str, Any]) -> str:
    costs = facts["costs"]
    times = f"F {short(costs['forward'])}, B {short(costs['backward_input'])}, W {short(costs['backward_weight'])}"
    return (
        f"makespan {short(facts['makespan'])} for {times}, transfer {short(costs['comm'])}; "
        f"bubble {facts['bubble_makespan']:.1%} of the step, {facts['bubble_span']:.1%} inside a rank"
    )


def _activations(schedule: Schedule, peak: int) -> str:
    if schedule.stages_per_rank == 1:
        return f"{peak:>16}"
    return f"{peak:>16} = {short(peak / schedule.stages_per_rank)} micro-batches"


def _costs(arguments: argparse.Namespace) -> tuple[float, float, float]:
    try:
        forward, inputs, weights = (float(number) for number in arguments.costs.split(","))
        Costs(forward, inputs, weights)
    except (ValueError, ConfigError):
        raise CommandError(f"--costs {arguments.costs}: expected three times above 0, as in 1,1.2,0.8") from None
    try:
        Costs(communication=arguments.comm)
    except ConfigError:
        raise CommandError(f"--comm {arguments.comm}: expected a time of 0 or more") from None
    return forward, inputs, weights


def _check_drawing(arguments: argparse.Namespace) -> None:
    path: Path = arguments.draw
    if arguments.schedule == ALL:
        raise CommandError(f"--draw {path}: draws one schedule; name it with --schedule")
    if path.suffix not in FORMATS:
        raise CommandError(f"--draw {path}: expected a file name that ends in {', '.join(FORMATS)}")
    if path.is_dir() or not path.parent.is_dir():
        raise CommandError(f"--draw {path}: must be a file in a directory that exists")


def _write(path: Path, picture: Picture, schedule: Schedule, text: str) -> None:
    try:
        if path.suffix == ".png":
            picture.save_png(path)
        elif path.suffix == ".svg":
            path.write_text(f"{picture.svg()}\n", encoding="utf-8")
        else:
            path.write_text(_page(schedule, picture, text), encoding="utf-8")
    except OSError as error:
        raise CommandError(f"--draw {path}: cannot be written: {error}") from None


def _page(schedule: Schedule, picture: Picture, text: str) -> str:
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("title", f"{schedule.name}, {schedule.pp_size} ranks, {schedule.num_micro_batches} micro-batches"),
        tag("style", Html(STYLE)),
    )
    body = tag("body", tag("div", picture.svg()), tag("pre", text))
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"
