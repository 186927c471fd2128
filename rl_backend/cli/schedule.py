"""``rl-backend schedule``: what a pipeline schedule costs in idle time and activations, in numbers and as a picture."""

import argparse
import json
from pathlib import Path
from typing import Any

from rl_backend.cli.command import flag, given, in_flags
from rl_backend.contracts import BatchError, ConfigError
from rl_backend.lab import schedule as view
from rl_backend.lab.picture import Picture, render
from rl_backend.options.parser import CommandError
from rl_backend.pipeline import SCHEDULES, Costs, Schedule, Timeline, make_schedule, simulate
from rl_backend.pipeline.measured import MeasuredPass, median_pass, read_passes

ALL = "all"
EXIT_NONE = 2
REQUIRED = ("schedule", "pp", "microbatches")
DEFAULTS = {"costs": (1.0, 1.0, 1.0), "comm": 0.0}
TRACE = "trace.json"
FORMATS = (".png", ".svg", ".html")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "docs/schedules.md says what the schedules are, what they need and how the numbers are meant."
    add = parser.add_argument
    add("--schedule", choices=[*SCHEDULES, ALL], metavar="NAME", help=f"{', '.join(SCHEDULES)}; {ALL} compares")
    add("--pp", type=int, metavar="N", help="pipeline ranks")
    add("--microbatches", type=int, metavar="N", help="of a step, on each data-parallel rank")
    add("--vpp", type=int, metavar="N", help="stages per rank (default: what the schedule needs, or 2)")
    add(
        "--costs",
        type=three_costs,
        metavar="F,B,W",
        help="times of forward, backward for inputs and backward for weights of one micro-batch on one rank, in any unit; "
        "a rank's stages share them (default 1,1,1)",
    )
    add("--comm", type=float, metavar="C", help="time of one transfer, same unit (default 0)")
    add("--forward-only", action="store_true", default=None, help="a step without backward pass, as for log-probs")
    trace = "in place of a schedule: folder or trace of a traced run; shows its pipeline beside what was predicted"
    add("--from-trace", type=Path, metavar="RUN", help=trace)
    add("--pass", dest="number", type=int, metavar="N", help="of --from-trace: which training pass (default: the median)")
    add("--draw", type=Path, metavar="FILE", help="the timeline of one schedule: .png, .svg or .html")
    add("--json", action="store_true", help="print JSON instead of text")


def run(arguments: argparse.Namespace) -> int:
    draw = arguments.draw
    if draw is not None and (arguments.schedule == ALL or draw.suffix not in FORMATS):
        raise CommandError(f"--draw {draw}: draws one schedule, into a file that ends in {', '.join(FORMATS)}")
    if arguments.from_trace is not None:
        return _show_trace(arguments)
    missing = [name for name in REQUIRED if getattr(arguments, name) is None]
    if missing:
        raise CommandError(
            f"--{missing[0]} is missing; name a schedule with --schedule, --pp and --microbatches, or a run "
            "with --from-trace"
        )
    if arguments.number is not None:
        raise CommandError(f"--pass {arguments.number}: chooses a pass of --from-trace, which is not given")
    vars(arguments).update(DEFAULTS | given(arguments, DEFAULTS))
    if arguments.schedule == ALL:
        return _compare(arguments)
    schedule, timeline = _simulated(arguments.schedule, arguments)
    facts = view.schedule_facts(schedule, timeline, arguments.costs, arguments.comm)
    picture = view.draw_schedule(schedule, timeline, view.schedule_summary(facts))
    return _show(arguments, facts, view.schedule_text(schedule, timeline, facts), schedule, picture)


def _show_trace(arguments: argparse.Namespace) -> int:
    if of_schedule := given(arguments, (*REQUIRED, "vpp", *DEFAULTS, "forward_only")):
        raise CommandError(f"--{flag(next(iter(of_schedule)))}: the trace of --from-trace says that; leave it out")
    found = _chosen_pass(arguments.from_trace, arguments.number)
    return _show(arguments, view.pass_facts(found), view.pass_text(found), found.schedule, view.draw_pass(found))


def _chosen_pass(run: Path, number: int | None) -> MeasuredPass:
    path = run / TRACE if run.is_dir() else run
    if not path.is_file():
        what = "has no trace.json" if run.is_dir() else "no such folder or file"
        raise CommandError(f"--from-trace {run}: {what}; run with --trace, which writes trace.json into the run's folder")
    passes = read_passes(path)
    if not passes:
        raise CommandError(
            f"--from-trace {run}: has no complete training pass of a pipeline; traced are runs with --trace whose native "
            "runtime has pp or vpp above 1, or a pipeline_schedule"
        )
    if number is None:
        return median_pass(passes)
    if not 0 <= number < len(passes):
        raise CommandError(f"--pass {number}: the trace has the passes 0 to {len(passes) - 1}")
    return passes[number]


def _compare(arguments: argparse.Namespace) -> int:
    rows: dict[str, dict[str, Any]] = {}
    for name in SCHEDULES:
        try:
            rows[name] = view.schedule_facts(*_simulated(name, arguments), arguments.costs, arguments.comm)
        except CommandError as error:
            rows[name] = {"error": str(error)}
    print(json.dumps(rows, indent=1) if arguments.json else view.comparison_text(rows))
    return EXIT_NONE if all("error" in facts for facts in rows.values()) else 0


def _simulated(name: str, arguments: argparse.Namespace) -> tuple[Schedule, Timeline]:
    stages = arguments.vpp or SCHEDULES[name].stages_per_rank or 2
    # A rank's stages share the time of a micro-batch, so that schedules with more of them can be compared.
    forward, inputs, weights = (cost / stages for cost in arguments.costs)
    try:
        shared = Costs(forward, inputs, weights, arguments.comm)
        schedule = make_schedule(
            name,
            arguments.pp,
            arguments.microbatches,
            stages_per_rank=arguments.vpp,
            forward_only=bool(arguments.forward_only),
            costs=shared,
        )
    except (BatchError, ConfigError) as error:
        raise CommandError(in_flags(error)) from None
    return schedule, simulate(schedule, shared)


def three_costs(text: str) -> tuple[float, float, float]:
    forward, inputs, weights = map(float, text.split(","))
    return forward, inputs, weights


def _show(arguments: argparse.Namespace, facts: dict[str, Any], text: str, schedule: Schedule, picture: Picture) -> int:
    path: Path | None = arguments.draw
    try:
        if path is not None and path.suffix == ".png":
            picture.save_png(path)
        elif path is not None:
            page = render("schedule.html", schedule=schedule, picture=picture, text=text)
            path.write_text(f"{picture.svg()}\n" if path.suffix == ".svg" else page, encoding="utf-8")
    except ImportError:
        raise CommandError(
            f"--draw {path}: a PNG needs Pillow, which comes with the extras examples and vllm (pip install pillow); "
            ".svg and .html need nothing"
        ) from None
    except OSError as error:
        raise CommandError(f"--draw {path}: cannot be written: {error}") from None
    print(json.dumps(facts, indent=1) if arguments.json else text)
    return 0
