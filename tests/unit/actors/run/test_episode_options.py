"""Options of a run reach its episodes: seeds, sampling, limits, and what is done with those that were cut off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from actors.collect.collector import Collector
from actors.collect.episodes import EpisodeSource, EpisodeStream, group_tasks, turn_sampling
from actors.collect.held_out import HeldOutSet
from actors.collect.inputs import EpisodeInputs
from actors.options.sampled_config import EpisodeConfig
from actors.rollout.config import RolloutConfig, SamplingConfig
from actors.rollout.tokens import RolloutTokens
from actors.watch.metrics import Clock
from rl_backend.environment import Result, Sampler
from rl_backend.environment.groups import GroupTask, PlayOptions
from rl_backend.options.option_set import filled
from tests.support.token_sources import RandomSource
from tests.unit.actors.rollout.test_tokens import Engines, ask

STOP = 17


def settings(**options: Any) -> EpisodeConfig:
    given = {"model": "nowhere", "dataset": "rows.jsonl", "player": "m:play", "run_dir": "runs/x"}
    return EpisodeConfig(**{**given, "prompts_per_step": 3, "samples_per_prompt": 2, **options})


def drawn(tasks: list[GroupTask]) -> list[int]:
    return [seed for task in tasks for seed in (task.seed, *task.sampling_seeds)]


@pytest.mark.shows("episodes: environments of a group draw the same, those of other rows, batches and runs something else")
def test_every_row_of_every_batch_has_seeds_of_its_own() -> None:
    rows = [{"task": each} for each in range(3)]
    tasks = group_tasks(rows, 4, 2, 7)
    assert [task.row for task in tasks] == rows and [len(task.sampling_seeds) for task in tasks] == [2] * 3
    assert len({task.seed for task in tasks}) == 3
    others = (tasks, group_tasks(rows, 5, 2, 7), group_tasks(rows, -1, 2, 7), group_tasks(rows, 4, 2, 8))
    assert len({seed for each in others for seed in drawn(each)}) == 4 * 9
    assert group_tasks(rows[:1], 4, 2, 7) == tasks[:1] == group_tasks(rows, 4, 2, 7)[:1]
    assert [task.seed for task in group_tasks(rows, 4, 5, 7)] == [task.seed for task in tasks]
    seen: list[tuple[int, int]] = []

    async def play(row: Mapping[str, Any], sampler: Sampler) -> Result:
        seen.append((row["task"], sampler.seed))
        await sampler.sample([1], max_tokens=1)
        return Result()

    with EpisodeStream(play, RandomSource(), PlayOptions(), iter([rows]), n=2, seed=7, ahead=0) as stream:
        number = stream.next(more=0).number
    assert sorted(seen) == sorted(
        (task.row["task"], task.seed) for task in group_tasks(rows, number, 2, 7) for _ in range(2)
    )


@pytest.mark.shows(
    "episodes: temperature, top_p, top_k, min_p and stop strings of a run and of a held-out set reach every turn"
)
def test_the_sampling_of_a_run_and_of_a_held_out_set_reaches_turns() -> None:
    of_run = {"temperature": 0.7, "top_p": 0.8, "top_k": 11, "min_p": 0.05, "stop_strings": ["</answer>", "."]}
    of_set = {"temperature": 0.3, "top_p": 0.5, "top_k": 3, "min_p": 0.2, "stop_strings": ["!"]}
    config = settings(**of_run, sampling={"stop_token_ids": [42]}, eval_dataset={"hard": {"path": "x", "n": 2, **of_set}})
    engines = Engines()
    engines.config = RolloutConfig(model_path="x", num_engines=2, load_tokenizer=True)
    for sampling, expected, stops in (
        (config.sampling, of_run, (9, 42, 5, STOP)),
        (config.eval_sampling["hard"], of_set, (9, 42, 5, STOP)),
    ):
        tokens: Any = engines
        ask(RolloutTokens(tokens, turn_sampling(sampling, (5, STOP))))
        given = {**expected, "stop_strings": tuple(expected["stop_strings"])}  # type: ignore[arg-type]
        assert engines.asked[-1].sampling == SamplingConfig(**given, max_new_tokens=7, stop_token_ids=stops)  # type: ignore[arg-type]


def source_of(config: EpisodeConfig, held_out: list[HeldOutSet] | None = None) -> EpisodeSource:
    player: Any = None
    return EpisodeSource(config, EpisodeInputs(None, player, None, [], held_out or [], iter(())), lambda _: player)


def play_options(config: EpisodeConfig) -> PlayOptions:
    return source_of(config).play_options(filled(config, "limits"))


@pytest.mark.parametrize(
    ("options", "lengths", "stop"),
    [
        ({"max_response_tokens": 5}, [5, 5, 4], "done"),
        ({"max_turns": 2}, [8, 8], "turns"),
        ({"limits": {"sampled_tokens": 11}}, [8, 3], "tokens"),
        ({"max_episode_tokens": 15, "max_response_tokens": 9}, [8, 6], "tokens"),
        ({"limits": {"turns": 9, "sampled_tokens": 99}, "max_response_tokens": 6}, [6, 6, 4], "done"),
    ],
    ids=str,
)
def test_the_limits_of_a_run_bound_its_players_who_ask_for_more(
    options: dict[str, Any], lengths: list[int], stop: str
) -> None:
    """Turns of 8, 8 and 4 tokens after prompts of 1, 9 and so on."""

    async def play(row: Mapping[str, Any], sampler: Sampler) -> Result:
        prompt = [1]
        for most in (8, 8, 4):
            turn = await sampler.sample(prompt, max_tokens=most)
            prompt = [*prompt, *turn.token_ids]
        return Result()

    config = settings(**options)
    batches = iter([[{"task": 1}]])
    with EpisodeStream(play, RandomSource(), play_options(config), batches, n=2, seed=1, ahead=0) as stream:
        (group,) = stream.next(more=0).samples
    for episode in group.episodes:
        assert ([len(turn.token_ids) for turn in episode.turns], episode.stop) == (lengths, stop)


def test_a_held_out_sets_own_length_bounds_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(
        max_response_tokens=8, max_turns=3, eval_dataset={"long": {"path": "x", "max_new_tokens": 13}, "same": {"path": "y"}}
    )
    sets = [HeldOutSet(name, [{}], sampling, (1,), 1.0) for name, sampling in config.eval_sampling.items()]
    asked: list[tuple[int | None, int | None]] = []

    def played(held_out: Any, player: Any, source: Any, options: PlayOptions, **more: Any) -> Any:
        asked.append((options.limits.turn_tokens, options.limits.turns))

    monkeypatch.setattr("actors.collect.episodes.play_held_out", played)
    source_of(config, sets).answer_held_out()
    assert asked == [(13, 3), (8, 3)]


def test_failures_and_the_least_number_of_a_run_decide_what_is_played() -> None:
    config = settings(on_episode_failure="drop", least_episodes=1, limits={"concurrent": 5, "episode_seconds": 9.0})
    options = play_options(config)
    assert (options.on_failure, options.fewest) == ("drop", 1)
    assert (options.limits.concurrent, options.limits.episode_seconds) == (5, 9.0)
    assert play_options(settings(on_episode_failure="zero")).on_failure == "zero"


@pytest.mark.shows(
    "episodes: one sample that is older than max_staleness leaves the whole batch out, whatever the others are"
)
@pytest.mark.parametrize(("ages", "dropped"), [((2, 0, 0), True), ((0, 0, 2), True), ((1, 0, 1), False), ((0, 1, 2), True)])
def test_a_batch_is_as_old_as_its_oldest_episode(ages: tuple[int, ...], dropped: bool) -> None:
    source = RandomSource(version=1)

    async def play(row: Mapping[str, Any], sampler: Sampler) -> Result:
        source.version = 10 - row["age"]
        await sampler.sample([1], max_tokens=2)
        return Result()

    config = settings(max_staleness=1, sample_ahead=2, samples_per_prompt=1, least_episodes=1)
    batches = iter([[{"age": each} for each in ages], [{"age": 0}, {"age": 1}, {"age": 0}], [{"age": 0}] * 3])
    options = PlayOptions(play_options(config).limits.replace(concurrent=1))
    with EpisodeStream(play, source, options, batches, n=1, seed=5, ahead=0) as stream:
        episodes = source_of(config)
        episodes.stream = stream
        collector = Collector(config, episodes)
        for age in range(3):
            collector.versions.pushed(10 - age, 6 - age)
        metrics = collector.collect(7, Clock()).metrics
    expected = (0, 1, 0) if dropped else ages
    assert metrics["samples_dropped"] == (3 if dropped else 0)
    assert (metrics["staleness_max"], metrics["staleness_mean"]) == (max(expected), sum(expected) / 3)
