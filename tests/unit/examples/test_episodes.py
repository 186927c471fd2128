"""The environments of ``examples/episodes.py``, played by scripted models with a byte-pair tokenizer."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from actors.collect.transcripts import describe_episodes, transcript
from benchmarks.environment_tasks import CALL, HIGH, TURNS, bpe_tokenizer
from examples.episodes import Calculator, EpisodesConfig, GuessingGame
from rl_backend.algorithm import episode_sequences
from rl_backend.contracts import ConfigError
from rl_backend.environment import Episode, Limits, StepOptions, SteppedPlayer, play_episode
from tests.support.token_sources import WrittenSource

TOKENIZER = bpe_tokenizer()
END = TOKENIZER.eos_token_id


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


def digit_by_digit(text: str) -> list[int]:
    """As a model may sample it, and no encoding of the text does."""
    return [token for character in text for token in ids(character)]


def play(make: Any, row: dict[str, Any], write: Callable[[list[int]], Sequence[int]], seed: int = 3) -> Episode:
    limits = Limits(episode_tokens=120, turn_tokens=24)
    player = SteppedPlayer(make, TOKENIZER, StepOptions(limits=limits))
    return asyncio.run(play_episode(player, row, WrittenSource(write), sampling_seed=1, seed=seed, limits=limits))


def bisect(prompt: list[int]) -> list[int]:
    text = TOKENIZER.decode(prompt)
    low, high, guess = 0, HIGH, 0
    for turn in text.split("<|user|>")[2:]:
        guess = (low + high) // 2
        low, high = (guess + 1, high) if turn.startswith(">") else (low, guess - 1)
    guess = (low + high) // 2
    return [*digit_by_digit(f"{guess:02d}"), END]


def trained(episode: Episode) -> list[int]:
    return [
        token
        for each in episode_sequences([episode])
        for token in each.input_ids[1:][each.token_fields["loss_mask"][:-1] != 0].tolist()
    ]


@pytest.mark.shows("episodes: with a tokenizer whose decoding and encoding differ, the tokens trained are those sampled")
def test_a_game_is_won_by_bisection_and_trained_as_it_was_sampled() -> None:
    assert (
        digit_by_digit("07") != ids("07") and TOKENIZER.decode(digit_by_digit("07")) == TOKENIZER.decode(ids("07")) == "07"
    )
    episodes = [play(GuessingGame, {"high": HIGH, "turns": TURNS}, bisect, seed) for seed in range(40)]
    won = [episode for episode in episodes if episode.reward == 1]
    assert len(won) >= 33 and all(1 <= len(episode.turns) <= TURNS for episode in episodes)
    for episode in episodes:
        assert len(episode.segments) == 1 and episode.stop == "done"
        assert trained(episode) == [token for turn in episode.turns for token in turn.token_ids]


def test_what_is_no_number_ends_the_game() -> None:
    episode = play(GuessingGame, {"high": HIGH, "turns": TURNS}, lambda _: [*ids("?"), END])
    assert (episode.reward, len(episode.turns), episode.metrics["no_number"]) == (0.0, 1, 1.0)


@pytest.mark.shows("episodes: the calculator's calls are parsed from sampled tokens, executed and answered to the model")
def test_the_calculator_is_called_and_answers() -> None:
    def write(prompt: list[int]) -> list[int]:
        text = TOKENIZER.decode(prompt)
        if "<|tool|>" not in text:
            return [*ids(f"{CALL[0]}60*17{CALL[1]}"), END]
        return [*digit_by_digit(text.rpartition("<|tool|>")[2].partition("<|end|>")[0]), END]

    row = {"prompt": "60*17?", "answer": "1020"}
    episode = play(Calculator, row, write)
    assert (episode.reward, len(episode.turns), episode.stop) == (1.0, 2, "done")
    (call,) = episode.turns[0].calls
    assert (call.name, dict(call.arguments), call.status, call.answer) == (
        "calculate",
        {"expression": "60*17"},
        "ok",
        "1020",
    )
    assert len(episode.segments) == 1 and trained(episode) == [*episode.turns[0].token_ids, *episode.turns[1].token_ids]
    assert "calculate({'expression': '60*17'}) -> ok: 1020" in transcript(episode, TOKENIZER)
    (line,) = describe_episodes([episode], TOKENIZER)
    assert [trained for _, trained in line["segments"][0]] == [False, True, False, True]


def test_a_call_that_the_calculator_refuses_is_answered_with_the_reason() -> None:
    def write(prompt: list[int]) -> list[int]:
        called = "<|tool|>" in TOKENIZER.decode(prompt)
        return [*(ids("1") if called else ids(f"{CALL[0]}60-17{CALL[1]}")), END]

    episode = play(Calculator, {"prompt": "60*17?", "answer": "1020"}, write)
    (call,) = episode.turns[0].calls
    assert call.status == "raised" and "expected two whole numbers" in call.answer
    assert episode.reward == 0 and episode.metrics["failed_tool_calls"] == 1


def test_the_environments_of_the_page_are_played() -> None:
    page = (Path(__file__).parents[3] / "docs" / "environments.md").read_text()
    names: dict[str, Any] = {"__name__": "my_environment"}
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(code, names)
    row = {"prompt": "60*17?", "answer": "1020"}
    wrong, right = [*ids("1"), END], [*ids("1020"), END]

    def after_a_hint(prompt: list[int]) -> list[int]:
        return right if TOKENIZER.decode(prompt).count("<|assistant|>") > 1 else wrong

    assert play(names["OneAnswer"], row, lambda _: right).reward == 1
    assert play(names["OneAnswer"], row, after_a_hint).reward == 0
    again = play(names["TwoTries"], row, after_a_hint)
    assert (again.reward, len(again.turns), again.metrics["tries"]) == (1.0, 2, 2.0)
    assert play(names["WithTool"], row, lambda _: right).reward == 1
    names["POOL"].close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"critic_lr": 1e-3}, "only algorithm='ppo' has a critic"),
        ({"algorithm": "ppo", "advantage": "rloo"}, "algorithm='ppo' has the advantages of its critic"),
        ({"samples_per_prompt": 1, "least_episodes": 1}, "advantage='grpo' compares at least 2 episodes"),
    ],
)
def test_options_without_effect_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EpisodesConfig(**{"model": "nowhere", "dataset": "x.jsonl", "environment": "m:make", **options})
