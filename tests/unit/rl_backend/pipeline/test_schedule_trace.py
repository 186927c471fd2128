"""``rl-backend schedule --from-trace``: what a trace says of a pipeline, beside what its schedule predicts."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from rl_backend.cli.main import main
from rl_backend.pipeline import COMPUTATIONS, Costs, make_schedule, simulate
from rl_backend.pipeline.measured import SPAN_NAMES, read_passes, span_arguments
from rl_backend.trace.chrome import ChromeTraceWriter

MILLISECOND = 1000.0


def write_trace(path: Path, name: str, *, pp: int, micro_batches: int, passes: int, late: float = 0.0) -> Path:
    """Passes as simulated, a second each, with costs of milliseconds; ``late`` is added to what the last rank starts."""
    schedule = make_schedule(name, pp, micro_batches)
    timeline = simulate(schedule, Costs(20.0, 25.0, 15.0))
    path.mkdir()
    writer = ChromeTraceWriter(path / "trace.json")
    for rank in range(pp):
        writer.process(rank + 1, f"rank {rank}")
    for number in range(passes):
        for rank, spans in enumerate(timeline.spans):
            for action, start, end in spans:
                assert action.kind in COMPUTATIONS
                when = number * 1e6 + (start + (late if rank == pp - 1 else 0.0)) * MILLISECOND
                facts = span_arguments(action, schedule=schedule, pipeline=0, rank=rank, model="actor", number=number)
                length = (end - start) * MILLISECOND
                writer.complete(rank + 1, 0, SPAN_NAMES[action.kind], "micro_batch", when, length, facts)
                other = {**facts, "pipeline": 1}
                writer.complete(rank + 9, 0, SPAN_NAMES[action.kind], "micro_batch", when, 3 * length, other)
    writer.close()
    return path


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zbv", "dualpipev"])
def test_a_trace_of_a_simulated_run_gives_the_simulated_numbers(tmp_path: Path, name: str) -> None:
    run = write_trace(tmp_path / "run", name, pp=2, micro_batches=4, passes=3)
    passes = read_passes(run / "trace.json")
    assert [one.number for one in passes] == [0, 1, 2]
    for one in passes:
        assert one.measured.makespan == pytest.approx(one.predicted.makespan, rel=1e-6)
        assert one.measured.bubble_makespan == pytest.approx(one.predicted.bubble_makespan, abs=1e-6)
        assert one.measured.bubble_span == pytest.approx(one.predicted.bubble_span, abs=1e-6)


@pytest.mark.shows("pipelines: `rl-backend schedule --from-trace` draws what a run's pipeline did, beside the prediction")
def test_the_command_shows_what_took_longer_than_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_trace(tmp_path / "run", "zbv", pp=2, micro_batches=4, passes=1, late=40.0)
    assert main(["schedule", "--from-trace", str(run), "--json", "--draw", str(tmp_path / "run.svg")]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["schedule"], facts["pp"], facts["stages_per_rank"], facts["model"]) == ("zbv", 2, 2, "actor")
    # A trace has no memory in it, so that the activations held are the schedule's and nothing that was measured.
    assert facts["peak_activations"] == list(make_schedule("zbv", 2, 4).peak_activations)
    assert "peak_activations" not in facts["measured"]
    assert facts["measured"]["makespan"] > facts["predicted"]["makespan"] * 1.05
    assert facts["measured"]["bubble_makespan"] > facts["predicted"]["bubble_makespan"] + 0.05
    text = "".join(ElementTree.parse(tmp_path / "run.svg").getroot().itertext())
    assert "measured, in seconds" in text and "predicted from its mean times" in text
    assert main(["schedule", "--from-trace", str(run / "trace.json")]) == 0
    assert "bubble of the step" in capsys.readouterr().out


def test_passes_that_are_cut_or_have_no_backward_pass_are_left_out(tmp_path: Path) -> None:
    run = write_trace(tmp_path / "run", "zb-h1", pp=2, micro_batches=4, passes=3)
    lines = (run / "trace.json").read_text().splitlines()
    first = next(index for index, line in enumerate(lines) if '"pass":0' in line)
    (run / "trace.json").write_text("\n".join([*lines[:first], *lines[first + 1 :]]))
    assert [one.number for one in read_passes(run / "trace.json")] == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--from-trace", "{run}", "--pp", "2"), "--pp: the trace of --from-trace says that"),
        (("--from-trace", "{run}", "--costs", "1,1,1"), "--costs: the trace of --from-trace says that"),
        (("--from-trace", "{run}", "--forward-only"), "--forward-only: the trace of --from-trace says that"),
        (("--from-trace", "{run}", "--pass", "7"), "--pass 7: the trace has the passes 0 to 0"),
        (("--from-trace", "{missing}"), "--from-trace {missing}: no such folder or file; run with --trace"),
        (("--from-trace", "{empty}"), "--from-trace {empty}: has no complete training pass of a pipeline"),
        (("--pp", "2", "--microbatches", "2"), "--schedule is missing"),
        (
            ("--schedule", "zbv", "--pp", "2", "--microbatches", "2", "--pass", "0"),
            "--pass 0: chooses a pass of --from-trace",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_what_makes_no_sense_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    paths = {"run": tmp_path / "run", "missing": tmp_path / "missing", "empty": tmp_path / "empty.json"}
    write_trace(paths["run"], "1f1b", pp=2, micro_batches=2, passes=1)
    paths["empty"].write_text("[]\n")
    assert main(["schedule", *(argument.format(**paths) for argument in arguments)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message.format(**paths)}")
