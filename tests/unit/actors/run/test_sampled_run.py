"""A run that samples, from its first push to its summary: what it asks, logs, prints, saves and takes up again."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from actors import RLRun, Session
from actors.cluster.session import RunStopped
from actors.folder.resume import find_start
from actors.rollout.messages import sample_seeds
from actors.run import RunResult
from actors.run.run import StopRequest
from rl_backend.contracts import RLBackendError
from rl_backend.data.rewards import LoadedReward, RewardScorer
from tests.support.sampled_runs import config_of, held_out_sets, inputs_of, without_ray

STEP_SECONDS = 200.0


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "cluster_resources", dict)


def lines(tmp_path: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "run" / name).read_text().splitlines()]


def take_steps(
    config: Any,
    session: Session,
    gaps: dict[int, float] | None = None,
    *,
    stop: StopRequest | None = None,
    during: Callable[[int], None] = lambda step: None,
    label: str = "",
) -> RunResult:
    with RLRun(config, session, label=label, stop=stop) as run:
        policy = run.build_model("policy")
        run.begin("Mine", {"policy": policy}, ["a fact"])
        for step in run.steps():
            batch = run.collect()
            session.rollout.seconds_ahead += STEP_SECONDS  # type: ignore[union-attr]
            run.lap("train")
            run.push()
            during(step)
            run.end_step(batch.metrics | {"log_prob_gap": (gaps or {}).get(step, 0.0), "step_ok": 1.0})
        return run.finish()


def test_a_run_pushes_answers_held_out_sets_and_logs_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(tmp_path, steps=4, eval_every=2, eval_dataset=["x", "y"], samples_logged=3, transport="gloo")
    held_out = [*held_out_sets("x"), *held_out_sets("y", n=2)]
    session, engines, _ = without_ray(monkeypatch, config, lambda: inputs_of(config, held_out))
    result = take_steps(config, session, {1: 0.25, 2: 0.75, 3: 0.5}, label="ann ")
    logged = lines(tmp_path)
    assert [line["step"] for line in logged] == [0, 1, 2, 3, 4]
    assert [line.get("held_out_reward") for line in logged] == [1, None, 3, None, 5]
    assert [line.get("eval/y/mean@2") for line in logged] == [1.25, None, 3.25, None, 5.25]
    assert (
        [line["reward"] for line in logged[1:]]
        == [1.25, 2.25, 3.25, 4.25]
        == [line["reward/push"] + 0.25 for line in logged[1:]]
    )
    assert [line["weight_version"] for line in logged[1:]] == [20, 30, 40, 50]
    assert all({"seconds/sample", "seconds/reward", "seconds/train", "seconds/sync"} <= set(line) for line in logged[1:])
    assert ["seconds/evaluate" in line for line in logged] == [False, False, True, False, True]
    assert "seconds/wait_for_samples" not in logged[1] and "staleness_max" not in logged[1]
    assert (result.held_out_reward_before, result.held_out_reward_after, result.max_log_prob_gap) == (1, 5, 0.75)
    assert result.held_out_before == {name: value for name, value in logged[0].items() if name.startswith("eval/")}
    assert result.held_out_after == {name: value for name, value in logged[4].items() if name.startswith("eval/")}
    measured = result.seconds, result.start_seconds, result.step_seconds
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == json.loads(json.dumps(vars(result)))
    samples = lines(tmp_path, "samples.jsonl")
    assert [(line["step"], line["prompt"], line["response"]) for line in samples[:4]] == [
        (1, "1 1", "1 0 89"),
        (1, "1 1", "1 1 89"),
        (1, "2 2", "1 0 89"),
        (2, "3 3", "2 0 89"),
    ]
    assert (len(samples), samples[3]["reward"], samples[3]["version_spans"]) == (12, 2.0, [[20, 3]])
    answers = lines(tmp_path, "held_out.jsonl")
    assert [(line["step"], line["set"]) for line in answers] == [(step, name) for step in (0, 2, 4) for name in "xxxyyyyyy"]
    printed = capsys.readouterr().out.splitlines()
    (first,) = [index for index, line in enumerate(printed) if line.startswith("ann Mine:")]
    assert " ".join(printed[first:]).startswith("ann Mine: 8 prompts, a note, 2 x 2 responses a step, up to 8 + 8 tokens,")
    assert "a fact, weights by gloo" in " ".join(each.strip() for each in printed)
    about = [line.removeprefix("ann held-out ") for line in printed if line.startswith("ann held-out ")]
    assert [line.partition(":")[0] for line in about] == [
        f"{name} {when}" for when in ("before", "after step 2", "after step 4") for name in "xy"
    ]
    assert "mean@2 3.250" in about[3]
    assert "answering 6 prompts" in "\n".join(printed) and f"reading {config.dataset}:" in "\n".join(printed)
    # Pushes, three times two sets, and four steps.
    assert [times == pytest.approx(found, abs=50) for times, found in zip((5500, 1500, 2600), measured, strict=True)] == [
        True
    ] * 3
    assert re.fullmatch(r"ann finished 4 steps in 1 h 3\d min: start 25 min \d\d s, steps 4\d min \d\d s", printed[-1])
    assert [name for name, _ in engines.syncs] == ["policy", "closed"]
    assert engines.syncs[0][1] == {"transport": "gloo", "merged": False}
    assert engines.forgotten == 1, "a session that was lent has weights of another run"


def test_one_greedy_set_is_answered_before_and_after_and_only_then_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(tmp_path, steps=2, eval_dataset="x")
    session, _, _ = without_ray(monkeypatch, config, lambda: inputs_of(config, held_out_sets("x")))
    result = take_steps(config, session)
    assert [line.get("held_out_reward") for line in lines(tmp_path)] == [1, None, 3]
    printed = capsys.readouterr().out
    assert "held-out x before: mean@1 1.000" in printed and "held-out x after" not in printed
    assert result.held_out_reward_after == 3


def test_a_run_without_held_out_sets_has_no_results_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path, steps=2)
    session, engines, _ = without_ray(monkeypatch, config, lambda: inputs_of(config))
    result = take_steps(config, session)
    assert (result.held_out_reward_before, result.held_out_reward_after, result.held_out_before) == (None, None, {})
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]
    assert [seeds for _, _, seeds, _ in engines.asked] == [sample_seeds(0, number, 2, 2) for number in (1, 2)]
    assert "held_out_reward" not in lines(tmp_path)[1] and "seconds/evaluate" not in lines(tmp_path)[1]


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_run_that_was_stopped_has_the_times_and_results_of_all_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    config = config_of(tmp_path, save_every=9, steps=4, eval_dataset=f"{tmp_path}/train.jsonl", seed=5, max_staleness=ahead)
    held_out, stop = held_out_sets("x"), StopRequest()
    session, engines, _ = without_ray(monkeypatch, config, lambda: inputs_of(config, held_out))
    with pytest.raises(RunStopped):
        take_steps(config, session, {1: 0.5}, stop=stop, during=lambda step: stop.ask("SIGTERM") if step == 2 else None)
    start = find_start(config)
    saved = start.progress.part("log")
    assert (start.step, saved["held_out_reward_before"], saved["max_log_prob_gap"]) == (2, 1.0, 0.5)
    assert saved["start_seconds"] == pytest.approx(800, abs=50)  # a push, and a held-out set
    assert saved["step_seconds"] == pytest.approx(2 * (STEP_SECONDS + 100), abs=50)
    assert saved["seconds"] == pytest.approx(1400, abs=50)
    assert start.progress.part("collector")["step_of_version"] == [[10, 0], [20, 1], [30, 2]][2 - ahead :]
    assert start.progress.part("batches") == {"taken": 2}
    session, engines, _ = without_ray(monkeypatch, config, lambda: inputs_of(config, held_out))
    engines.version = 30
    result = take_steps(config, session, {3: 0.25})
    assert [line["step"] for line in lines(tmp_path)] == [0, 1, 2, 3, 4], "the set was not answered again"
    assert (result.held_out_reward_before, result.held_out_reward_after) == (1.0, 3.0)
    assert result.held_out_before["eval/x/mean@1"] == 1.0 and result.held_out_after["eval/x/mean@1"] == 3.0
    assert result.max_log_prob_gap == 0.5
    assert result.start_seconds == pytest.approx(900, abs=50)
    assert result.step_seconds == pytest.approx(4 * (STEP_SECONDS + 100), abs=50)
    assert result.seconds == pytest.approx(1400 + 100 + 600 + 700, abs=90)
    prompts = [line["prompt"] for line in lines(tmp_path, "samples.jsonl")]
    assert prompts == [f"{each} {each}" for each in range(1, 9) for _ in range(2)], "every batch was trained on once"


def test_sampling_ahead_waits_for_samples_before_a_push(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path, max_staleness=1)
    session, engines, _ = without_ray(monkeypatch, config, lambda: inputs_of(config))
    take_steps(config, session)
    logged = lines(tmp_path)
    assert all("seconds/wait_for_samples" in line for line in logged)
    assert [line["staleness_max"] for line in logged] == [0, 1, 1]
    assert [line["reward"] for line in logged] == [1.25, 1.25, 2.25], "a batch was begun before the push"
    assert len(engines.asked) == 3, "nothing is sampled that nobody will train on"


@pytest.mark.parametrize("gap", [math.nan, math.inf])
def test_a_gap_that_is_no_number_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gap: float) -> None:
    config = config_of(tmp_path)
    session, _, _ = without_ray(monkeypatch, config, lambda: inputs_of(config))
    with pytest.raises(RLBackendError, match=rf"^step 2: the log-prob gap between trainer and vLLM is {gap}$"):
        take_steps(config, session, {2: gap})
    assert [line["step"] for line in lines(tmp_path)] == [1]


def test_failures_and_unknown_tokens_of_a_step_are_said_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(tmp_path, steps=2, on_reward_failure="zero")
    session, engines, _ = without_ray(monkeypatch, config, lambda: inputs_of(config, truth="fails"))
    engines.unknown = {2}
    take_steps(config, session, label="ann ")
    printed = capsys.readouterr().out
    told = [line for line in printed.splitlines() if "failed, such as" in line]
    assert [line.partition(" failed, such as: ")[0] for line in told] == [
        f"ann step {step}: 2 calls of reward functions" for step in (1, 2)
    ]
    assert "ValueError: no score of push 2" in told[1]
    assert [line.get("unknown_tokens") for line in lines(tmp_path)] == [None, 4]
    assert "ann warning: step 2: 4 of the sampled tokens are ids that the tokenizer has no token for" in printed


@pytest.mark.parametrize("push", ["adapter", "merged"])
def test_engines_serve_an_adapter_or_the_merged_weights_until_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, push: str
) -> None:
    config = config_of(tmp_path, steps=1, transport="gloo", **{"lora.rank": 4, "lora.push": push})
    session, engines, trainer = without_ray(monkeypatch, config, lambda: inputs_of(config))
    take_steps(config, session)
    (made,) = [options["name"] for call, (*_, options) in trainer.calls if call == "create"]
    assert re.fullmatch(r"run-[0-9a-f]{8}/policy", made) and trainer.calls[-1] == ("remove", made)
    base = "base of model"
    if push == "adapter":
        assert engines.syncs == [
            (base, {"transport": "gloo"}),
            ("closed", {}),
            (made, {}),
            ("closed", {}),
        ]
        assert [adapter for *_, adapter in engines.asked] == [made] and engines.removed == [made]
    else:
        assert engines.syncs == [(made, {"transport": "gloo", "merged": True}), ("closed", {})]
        assert [adapter for *_, adapter in engines.asked] == [None] and engines.removed == []
    assert lines(tmp_path)[0]["weight_version"] == (30 if push == "adapter" else 20)


def test_a_run_may_sample_more_batches_for_groups_that_teach_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path, steps=2, reward="m:f")
    equal = RewardScorer([LoadedReward(lambda solution_str, **_: 1.0, "m:f")], on_failure="stop")
    session, engines, _ = without_ray(monkeypatch, config, lambda: replace(inputs_of(config), reward=equal))
    with RLRun(config, session) as run:
        policy = run.build_model("policy")
        run.begin("Mine", {"policy": policy}, batches_with_signal=2)
        for _ in run.steps():
            batch = run.collect()
            run.push()
            run.end_step(batch.metrics)
    logged = lines(tmp_path)
    assert [(line["batches_sampled"], line["groups_without_signal"]) for line in logged] == [(2, 4)] * 2
    assert len(engines.asked) == 4


def test_held_out_sets_are_answered_with_the_adapter_that_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path, steps=1, eval_dataset="x", **{"lora.rank": 4, "lora.push": "adapter"})
    session, engines, trainer = without_ray(monkeypatch, config, lambda: inputs_of(config, held_out_sets("x")))
    take_steps(config, session)
    (made,) = [options["name"] for call, (*_, options) in trainer.calls if call == "create"]
    assert [adapter for *_, adapter in engines.asked] == [made] * 3, "before, in the step, and after it"
