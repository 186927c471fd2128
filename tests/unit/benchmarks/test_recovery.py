"""The benchmark of recovery: what it draws, what it reads from a run's lines, and what it counts."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.cluster.processes import Process
from actors.rollout.group.healing import EngineEvent
from actors.train.recovery import Recovered
from actors.watch.engine_events import EngineEvents
from benchmarks.process_use import MARK, kind_of, processes
from benchmarks.recovery import (
    ENDING,
    FAULTS,
    NODES,
    PAUSE_SECONDS,
    REPLACED,
    SETTINGS,
    UNDISTURBED,
    Command,
    Fault,
    attribute,
    draw,
    figures,
    fill,
    kind_of_fault,
    note_delays,
    place_of,
)
from rl_backend.contracts import EngineDeadError
from tests.support.runs import differences, outcome, write_run


def fault(place: str, at: float, pid: int = 0) -> Fault:
    return Fault("kill", place, 1.5, 0.0, Process(pid, "1"), at)


def test_faults_are_drawn_by_the_number_of_a_trial_and_every_place_has_its_turn() -> None:
    places = ("rank", "engine")
    assert draw("grpo", 3, 10, places) == draw("grpo", 3, 10, places) != draw("grpo", 4, 10, places)
    drawn = [draw("grpo", number, 10, places) for number in range(40)]
    for faults in drawn:
        assert len(faults) == FAULTS
        assert [each.moment for each in faults] == sorted(each.moment for each in faults)
        assert all(0 <= each.moment <= 10.2 and each.at == math.inf for each in faults)
    in_three = {(each.place, each.kind) for faults in drawn[:3] for each in faults}
    assert in_three == {(place, kind) for place in places for kind in REPLACED}
    assert all(set(places) <= {"rank", "engine", "worker", "holder", *ENDING, *NODES} for _, _, places in SETTINGS.values())
    ends = SETTINGS["sft_ends"][2]
    kinds = {(place, kind) for place in ends for kind in ENDING[place]}
    endings = [draw("sft_ends", number, 40, ends) for number in range(math.ceil(len(kinds) / FAULTS))]
    assert {(each.place, each.kind) for faults in endings for each in faults} == kinds
    assert any(each.moment < 0 for number in range(9) for each in draw("sft_ends", number, 40, ends))
    assert set(UNDISTURBED.values()) <= set(SETTINGS) - {*UNDISTURBED}


def test_a_driver_that_is_stopped_is_continued_and_others_are_when_their_place_is_taken() -> None:
    now, process = time.monotonic(), Process.of(os.getpid())
    early, late = (
        Fault("stop", "driver", 1.5, 0.0, process, now - seconds) for seconds in (PAUSE_SECONDS / 2, PAUSE_SECONDS)
    )
    assert [each.wakes() for each in (early, late, fault("driver", now))] == [False, True, False]
    rank = Fault("stop", "rank", 1.5, 0.0, process, now - 100)
    assert not rank.wakes()
    rank.back = now
    assert rank.wakes() and not Fault("stop", "rank", 1.5, 0.0, Process(process.pid, "1"), now, back=now).wakes()


def test_a_small_file_system_is_filled_to_the_last_page(tmp_path: Path) -> None:
    mounted = subprocess.run(("mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", tmp_path), check=False, capture_output=True)
    if mounted.returncode:
        pytest.skip(f"mounting a small file system is not allowed here: {mounted.stderr.decode()}")
    try:
        fill(tmp_path)
        assert os.statvfs(tmp_path).f_bavail == 0
    finally:
        subprocess.run(("umount", "--lazy", tmp_path), check=True)


def test_a_group_has_started_when_its_ranks_and_models_are_there() -> None:
    command = Command(SimpleNamespace(), Path(), "", "")  # type: ignore[arg-type]
    said = [
        "   41.6 s  ranks      starting 2 training ranks of native ...",
        "  111.6 s  ranks      starting 2 training ranks of native: 1 min 12.5 s",
        "  122.6 s  model      loading sft: 8 s",
        "  130.0 s  engines    starting 2 engines: 20 s",
    ]
    command.lines = [(0.0, line) for line in said]
    assert command.start_seconds() == 80.5


def rank_line(pid: int, seconds: float) -> str:
    why = f"training group 'train-1': rank 1 (process {pid} on 127.0.0.1) died during operation 5 (step); Ray says: gone"
    return f"warning: {Recovered(why, 3, 1, seconds).describe()}"


def engine_lines(capsys: pytest.CaptureFixture[str], *events: EngineEvent) -> list[str]:
    rollout: Any = SimpleNamespace(config=SimpleNamespace(max_restarts=3))
    heard = EngineEvents(rollout)
    for event in events:
        heard._heard(event)
    return capsys.readouterr().out.splitlines()


def test_a_rank_was_seen_when_its_replacement_began() -> None:
    faults = [fault("rank", 10.0, 41), fault("rank", 13.0, 42), fault("rank", 30.0, 43), fault("rank", 200.0, 44)]
    lines = [(9.0, rank_line(40, 2.0)), (20.0, rank_line(41, 9.0)), (120.0, rank_line(43, 88.0)), (130.0, "step 9/10")]
    attribute(lines, faults)
    # The second one struck while the first was being replaced.
    assert [(each.seen, each.back) for each in faults] == [(11.0, 20.0), (None, 20.0), (32.0, 120.0), (None, None)]
    assert faults[0].told() == {
        "kind": "kill", "place": "rank", "step": 1.5, "during": "step",
        "seen_seconds": 1.0, "lost_seconds": 10.0, "woke": False,
    }  # fmt: skip


def test_a_step_in_which_ranks_were_replaced_was_longer_than_the_same_step_of_the_undisturbed_run() -> None:
    def lines(*steps: tuple[float, int]) -> dict[str, Any]:
        return {"metrics.jsonl": [{"seconds/train": seconds, "recovery/count": count} for seconds, count in steps]}

    wanted = lines((4.0, 0), (2.0, 0), (2.0, 0))
    faults = [fault("rank", 30.0, 43), fault("holder", 20.0), fault("rank", 10.0, 41), fault("rank", 40.0, 44)]
    for each in (faults[0], faults[2]):
        each.back = each.at + 5.0
    note_delays(faults, lines((9.0, 1), (2.0, 0), (10.0, 1)), wanted)
    assert [each.delay for each in faults] == [8.0, None, 5.0, None]
    assert faults[0].told()["delay_seconds"] == 8.0 and "delay_seconds" not in faults[1].told()
    note_delays(faults, lines((4.0, 0), (22.0, 2), (2.0, 0)), wanted)
    assert [each.delay for each in faults] == [10.0, None, 10.0, None]
    unclear = [fault("rank", 30.0, 43)]
    note_delays(unclear, lines((4.0, 0), (22.0, 2), (2.0, 0)), wanted)
    assert unclear[0].delay is None


def test_an_engine_was_seen_when_the_run_said_so(capsys: pytest.CaptureFixture[str]) -> None:
    died = str(EngineDeadError("engine 1 is dead: its process ended (gone)"))
    first, second, again, later = engine_lines(
        capsys,
        EngineEvent(1, "died", died),
        EngineEvent(0, "hung", died.replace("engine 1", "engine 0")),
        EngineEvent(0, "replaced", "hung", 6.0),
        EngineEvent(1, "replaced", "died", 9.0),
    )
    faults = [fault("engine", 10.0), fault("worker", 10.5), fault("engine", 40.0)]
    attribute([(11.0, first), (12.0, second), (18.0, again), (20.0, later)], faults)
    assert [(each.seen, each.back) for each in faults] == [(11.0, 20.0), (12.0, 18.0), (None, None)]


def test_processes_are_found_by_what_they_inherit_and_told_apart() -> None:
    mark = uuid.uuid4().hex
    with subprocess.Popen((sys.executable, "-c", "input()"), stdin=subprocess.PIPE, env={**os.environ, MARK: mark}) as made:
        (found,) = processes(mark)
        made.communicate(b"\n")
    assert found[0] == made.pid and kind_of(found[1]) == "rest"
    titles = ("ray::TrainWorker.execute", "ray::RolloutEngine", "VLLM::Worker_TP1", "ray::IDLE")
    assert [kind_of(title) for title in titles] == ["rank", "engine", "worker", "rest"]
    ray = "/a/.venv/lib/python3.12/site-packages/ray/core/src/ray"
    titles += (f"{ray}/gcs/gcs_server --a", f"{ray}/raylet/raylet --b", "ray::MemoryHolder.keep", f"python {ray}/raylet")
    assert [place_of(title) for title in titles[2:]] == ["worker", "rest", "gcs", "raylet", "holder", "rest"]
    assert list(processes("none")) == []


def trial(status: int, differs_in: list[str], *faults: tuple[str, str, float | None]) -> dict[str, Any]:
    told = [
        {
            "kind": kind,
            "place": place,
            "step": 3.5,
            "during": "step",
            "seen_seconds": seen,
            "lost_seconds": seen,
            "woke": False,
        }
        for kind, place, seen in faults
    ]
    left = {"processes": [], "segments": ["psm_1"]}
    return {"setting": "grpo", "status": status, "differs_in": differs_in, "faults": told, "left": left}


def test_figures_are_of_the_trials_that_struck_a_place() -> None:
    trials = [
        trial(0, [], ("kill", "rank", 1.0), ("stop", "rank", 5.0)),
        trial(2, ["it failed"], ("kill", "rank", 3.0), ("kill", "worker", None)),
        trial(0, ["metrics.jsonl:3: loss"], ("stop", "engine", 4.0)),
    ]
    found = figures(trials, [{"replaced": 0}, {"replaced": 1}])
    ranks, engines = found["ranks"], found["engines"]
    assert (ranks["trials"], ranks["faults"], ranks["recovered_fraction"], ranks["equal_fraction"]) == (2, 3, 0.5, 0.5)
    assert (engines["trials"], engines["recovered_fraction"], engines["equal_fraction"]) == (2, 0.5, 0.0)
    assert (
        ranks["detect_seconds_p95"] == {"kill": 3.0, "stop": 5.0, "terminate": None} and ranks["lost_seconds_median"] == 3.0
    )
    assert engines["detect_seconds_p95"] == {"kill": None, "stop": 4.0, "terminate": None}
    before = trial(0, [], ("stop", "engine", 9.0))
    before["faults"][0]["seen_by_older_code"] = True
    assert figures([*trials, before], [])["engines"]["detect_seconds_p95"]["stop"] == 4.0
    times = {"setting": "sft_memory_large", "start_seconds": 9.0, "first_step_seconds": 0.5}
    struck_at_once = {**trials[2], **times, "first_step_seconds": None}
    for number, each in enumerate(trials[0]["faults"]):
        each["delay_seconds"] = 2.0 + number
    in_memory = figures([*({**each, **times} for each in trials[:2]), struck_at_once], [])["memory"]
    assert in_memory == {"delay_seconds_median": 2.5, "step_and_start_seconds_median": 9.5}
    assert found["kinds"]["kill rank in step"] == {"faults": 2, "recovered": 1, "equal": 1}
    told = {"kind": "stop", "place": "engine", "step": -0.5}
    assert kind_of_fault("grpo_workers", told) == "stop engine of two workers in the start"
    assert found["left"]["segments"] == 3 and found["false_replacements"] == {"runs": 2, "replaced": 1}
    nothing = figures([], [])["ranks"]
    assert nothing["recovered_fraction"] is None and nothing["lost_seconds_median"] is None


def test_runs_differ_in_metrics_samples_and_weights_and_not_in_times_and_events(tmp_path: Path) -> None:
    def run(name: str, changes: dict[str, Any], reward: float = 1.0, weights: bytes = b"w") -> dict[str, Any]:
        metrics = {"loss": 0.5, "seconds/train": 1.0, "log_prob_gap": 1e-7, "rollout_kl": 2e-14}
        samples = [{"reward": reward, "metrics": {"turns": 2, "engine_seconds": time.monotonic()}}]
        written = write_run(tmp_path / name, 2, lambda step: metrics | changes, samples)
        for folder in ("model", "checkpoints/step-1/policy"):
            (written / folder).mkdir(parents=True)
        (written / "model" / "model.safetensors").write_bytes(weights)
        (written / "checkpoints" / "step-1" / "policy" / "a.safetensors").write_text(name)
        return outcome(written)

    wanted = run("wanted", {})
    events = {"seconds/train": 9.0, "recovery/count": 1.0, "engines/died": 1.0, "log_prob_gap": 9e-6, "rollout_kl": 9e-11}
    assert differences(run("same", events), wanted) == []
    assert differences(run("far", {"log_prob_gap": 1e-4}), wanted)[0] == "metrics.jsonl:1: log_prob_gap"
    assert differences(run("farther", {"rollout_kl": 1e-8}), wanted)[0] == "metrics.jsonl:1: rollout_kl"
    assert differences(run("other", {"loss": math.nextafter(0.5, 1)}), wanted)[0] == "metrics.jsonl:1: loss"
    found = differences(run("samples", {}, reward=0.0, weights=b"v"), wanted)
    assert found == ["model/model.safetensors", "samples.jsonl:1: reward"]
    assert differences({**wanted, "held_out.jsonl": []}, wanted) == ["only one run has held_out.jsonl"]
    json.dumps(wanted)
