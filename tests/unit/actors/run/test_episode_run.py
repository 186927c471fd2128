"""A run of episodes, from its first push to its summary, with engines that are stand-ins."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import ray

from actors import EpisodeRun, Session
from actors.collect.episodes import turn_sampling
from actors.collect.held_out import HeldOutSet
from actors.collect.inputs import EpisodeInputs
from actors.options.sampled_config import EpisodeConfig
from actors.rollout.config import SamplingConfig
from rl_backend.environment import Episode, Result, Sampler
from tests.support.sampled_runs import Words, config_of, without_ray
from tests.support.token_sources import RandomSource


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "cluster_resources", dict)


async def player(row: Mapping[str, Any], sampler: Sampler) -> Result:
    turn = await sampler.sample([row["task"]], max_tokens=30)
    if row["task"] % 2 == 0 and turn.token_ids[0] % 2:
        raise ValueError("no such door")
    sampler.reward(row["task"])
    return Result(stop="turns" if row["task"] == 3 else "done")


def scored(episodes: Any) -> list[float]:
    return [100.0] * len(episodes)


class Sources:
    """Engines of turns, and how each was asked for."""

    def __init__(self, engines: Any) -> None:
        self.engines = engines
        self.made: list[tuple[Any, SamplingConfig, Any, RandomSource]] = []

    def __call__(self, rollout: Any, sampling: SamplingConfig, *, adapter: Any) -> RandomSource:
        made = RandomSource(version=10)
        self.made.append((rollout, sampling, adapter, made))
        return made


def run_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, score: Any = None, held_out: Any = (), **changes: Any
) -> tuple[EpisodeConfig, Session, Sources]:
    config = config_of(tmp_path, EpisodeConfig, steps=2, **changes)
    rows = [{"task": task} for task in range(1, 7)]
    batches = [rows[:2], rows[2:4], rows[4:6]]
    session, engines, _ = without_ray(
        monkeypatch,
        config,
        lambda: EpisodeInputs(Words(), player, score, rows, held_out, iter(batches), (7, 11), ("a note",)),
    )
    sources = Sources(engines)
    monkeypatch.setattr("actors.run.rl_run.RolloutTokens", sources)
    return config, session, sources


def take_steps(config: EpisodeConfig, session: Session) -> list[list[Episode]]:
    found = []
    with EpisodeRun(config, session, label="bob ") as run:
        policy = run.build_model("policy")
        run.begin("Mine", {"policy": policy})
        for _ in run.steps():
            run._sampled.collector.versions._step_of_version[10] = run._step - 1  # the stand-in knows no other version
            batch = run.collect()
            found.append(list(batch.episodes))
            run.push()
            run.end_step(batch.metrics)
        run.finish()
    return found


def lines(tmp_path: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "run" / name).read_text().splitlines()]


def test_a_run_plays_every_row_and_logs_episodes_and_what_was_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, session, sources = run_of(
        tmp_path,
        monkeypatch,
        samples_per_prompt=4,
        least_episodes=1,
        samples_logged=7,
        temperature=0.5,
        sampling={"stop_token_ids": [7, 9]},
    )
    steps = take_steps(config, session)
    ((rollout, sampling, adapter, _),) = sources.made
    assert (rollout, adapter) == (session.rollout, None)
    assert sampling == SamplingConfig(temperature=0.5, stop_token_ids=(7, 9, 11))
    logged = lines(tmp_path, "metrics.jsonl")
    assert [line["reward"] for line in logged] == [pytest.approx(sum(e.reward for e in each) / len(each)) for each in steps]
    assert [line["episodes_dropped"] for line in logged] == [8 - len(each) for each in steps]
    assert [round(line["episodes_cut_off"] * len(each)) for line, each in zip(logged, steps, strict=True)] == [0, 4]
    samples = lines(tmp_path, "samples.jsonl")
    for step, each in enumerate(steps, 1):
        of_step = [line for line in samples if line["step"] == step]
        assert [line["reward"] for line in of_step if "dropped" not in line] == [e.reward for e in each][:7]
        assert len(of_step) == 7, "episodes first, then what was dropped, as many as there is room for"
        dropped = [line for line in of_step if line.get("dropped")]
        assert len(dropped) == max(7 - len(each), 0)
        assert all(line["error"].startswith("ValueError: no such door") for line in dropped)
    assert all(len(turn["text"].split()) <= 8 for line in samples for turn in line["turns"]), "max_response_tokens"
    printed = capsys.readouterr().out
    first = " ".join(line.strip() for line in printed.splitlines())
    assert "bob Mine: 6 rows, player json:dumps, a note, 2 x 4 episodes a step, up to 48 tokens," in first
    assert f"reading {config.dataset}, and player json:dumps:" in printed
    failed = 8 - len(steps[0])
    name = "episode" if failed == 1 else "episodes"
    assert f"bob step 1: {failed} {name} failed, such as: error after 1 turns: ValueError: no such door" in printed


def test_held_out_rows_are_played_with_the_sets_sampling_and_count_failures_as_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    easy = HeldOutSet("easy", [{"task": 1}, {"task": 5}], SamplingConfig(n=1, temperature=0.0, max_new_tokens=5), (1,), 2.0)
    hard = HeldOutSet("hard", [{"task": 2}], SamplingConfig(n=6, max_new_tokens=3, top_k=4), (1, 6), 2.0)
    config, session, sources = run_of(
        tmp_path, monkeypatch, held_out=[easy, hard], samples_per_prompt=1, on_episode_failure="zero", seed=3
    )
    take_steps(config, session)
    assert [sampling.temperature for _, sampling, *_ in sources.made] == [1.0, 0.0, 1.0, 0.0, 1.0]
    assert [sampling.top_k for _, sampling, *_ in sources.made] == [0, 0, 4, 0, 4]
    answers = lines(tmp_path, "held_out.jsonl")
    assert [(line["step"], line["set"]) for line in answers] == [(s, n) for s in (0, 2) for n in ["easy"] * 2 + ["hard"] * 6]
    assert {len(line["turns"][0]["text"].split()) for line in answers if line["set"] == "easy"} == {5}
    assert {len(line["turns"][0]["text"].split()) for line in answers if line["set"] == "hard"} == {3}
    of_hard = [line for line in answers if line["set"] == "hard" and line["step"] == 0]
    failed = [line for line in of_hard if line["stop"] == "error"]
    assert 0 < len(failed) < 6 and {line["reward"] for line in failed} == {0.0}
    assert {line["reward"] for line in of_hard if line not in failed} == {2.0}
    first = lines(tmp_path, "metrics.jsonl")[0]
    assert first["held_out_reward"] == 3.0 and first["eval/easy/pass@1"] == 0.5
    assert first["eval/hard/mean@6"] == pytest.approx(2 * (6 - len(failed)) / 6)
    seeds = [source.prompts for *_, source in sources.made]
    assert seeds[1] == seeds[3] == [[1], [5]]
    printed = capsys.readouterr().out
    word = "episode" if len(failed) == 1 else "episodes"
    assert f"bob held-out set hard: {len(failed)} {word} failed, such as: error: ValueError: no such door" in printed


def test_a_groups_score_is_added_to_its_episodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, session, _ = run_of(tmp_path, monkeypatch, score=scored, on_episode_failure="zero")
    rewards = [episode.reward for step in take_steps(config, session) for episode in step if episode.stop != "error"]
    assert {101.0, 103.0} <= set(rewards) <= {101.0, 102.0, 103.0, 104.0}


def test_turns_are_sampled_with_what_was_asked_and_end_with_every_end_once() -> None:
    given = SamplingConfig(n=4, temperature=0.6, top_p=0.9, max_new_tokens=30, stop_token_ids=(3, 5), stop_strings=(".",))
    assert turn_sampling(given, (5, 4, 4)) == SamplingConfig(
        temperature=0.6, top_p=0.9, stop_strings=(".",), stop_token_ids=(3, 5, 4)
    )
    assert turn_sampling(given.replace(stop_token_ids=()), ()).stop_token_ids == ()


def test_episodes_of_training_and_held_out_ones_are_sampled_with_the_adapter_that_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    easy = HeldOutSet("easy", [{"task": 1}], SamplingConfig(n=1, temperature=0.0, max_new_tokens=5), (1,), 2.0)
    options: dict[str, Any] = {"samples_per_prompt": 1, "on_episode_failure": "zero", "lora.rank": 4, "lora.push": "adapter"}
    config, session, sources = run_of(tmp_path, monkeypatch, held_out=[easy], **options)
    take_steps(config, session)
    names = [adapter for _, _, adapter, _ in sources.made]
    assert len(names) == 3 and len(set(names)) == 1 and str(names[0]).startswith("run-") and names[0].endswith("/policy")
