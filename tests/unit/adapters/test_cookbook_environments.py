from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from adapters.cookbook import CookbookPlayer
from rl_backend.environment import Episode, Limits, play_episode
from tests.support.chat_templates import CHATML, chat_tokenizer
from tests.support.libraries import cookbook
from tests.support.token_sources import RandomSource, WrittenSource

TOKENIZER = chat_tokenizer(CHATML)
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")


@dataclass
class Ids:
    ids: list[int]

    def to_ints(self) -> list[int]:
        return self.ids


@dataclass
class StepResult:
    reward: float
    episode_done: bool
    next_observation: Ids
    next_stop_condition: Any
    metrics: dict[str, float] = field(default_factory=dict)


class Counting:
    """Ends after as many turns as its row says."""

    def __init__(self, row: Mapping[str, Any], seed: int) -> None:
        self.row, self.ids, self.turns = row, [seed], 0
        self.extras: list[Any] = []

    async def initial_observation(self) -> Any:
        if self.row.get("long"):
            return StepResult(-0.5, True, Ids([]), [], {"stop/max_tokens": 1.0})
        return Ids(self.ids), self.row.get("stop", [7])

    async def step(self, action: list[int], *, extra: Any = None) -> StepResult:
        self.turns += 1
        self.ids = [*(self.ids if self.row.get("keeps", True) else [9]), *action, 3]
        done = self.turns == self.row["turns"]
        metrics = {"parse_error_masked": float(self.turns == 1), **({"stop/max_turns": 1.0} if done else {})}
        assert extra == {"stop_reason": "stop" if action[-1] == 7 else "length"}
        return StepResult(0.25, done, Ids(self.ids if not self.row.get("empty") else []), [7], metrics)


def play(row: dict[str, Any], source: Any = None, **limits: Any) -> Episode:
    player, source = CookbookPlayer(Counting, TOKENIZER), source or RandomSource(context_tokens=4096)
    return asyncio.run(play_episode(player, row, source, sampling_seed=1, seed=5, limits=Limits(**limits)))


def test_observations_that_continue_are_one_segment_and_masked_turns_are_not_trained() -> None:
    episode = play({"turns": 3})
    assert (episode.stop, episode.reward, len(episode.turns), episode.metrics["parse_error_masked"]) == (
        "turns",
        0.75,
        3,
        1.0,
    )
    (segment,) = episode.segments
    first, *others = episode.turns
    assert sum(segment.sampled) == sum(len(turn.token_ids) for turn in others)
    assert not any(segment.sampled[: 1 + len(first.token_ids)])
    assert len(play({"turns": 3, "keeps": False}).segments) == 3


def test_an_episode_that_a_limit_ends_has_the_metrics_of_its_turns() -> None:
    episode = play({"turns": 9}, turns=2)
    assert (episode.stop, len(episode.turns), episode.error) == ("turns", 2, "limits.turns=2")
    assert episode.metrics["parse_error_masked"] == 1.0 and episode.reward == 0.5


def test_a_prompt_that_is_too_long_ends_the_episode_with_its_reward() -> None:
    episode = play({"turns": 1, "long": True})
    assert (episode.stop, episode.reward, episode.segments) == ("length", -0.5, ())


def test_stop_conditions_of_one_token_may_be_texts() -> None:
    source = WrittenSource(lambda prompt: [7])
    with pytest.raises(Exception, match=r"stop condition='User:': is \d tokens"):
        play({"turns": 1, "stop": ["User:"]}, source)
    stops: list[Sequence[int]] = []

    class Watched(RandomSource):
        async def generate(self, token_ids: Sequence[int], **asked: Any) -> Any:
            stops.append(asked["stop_token_ids"])
            return await super().generate(token_ids, **{**asked, "stop_token_ids": [7]})

    play({"turns": 1, "stop": ["<|im_end|>"]}, Watched(context_tokens=4096))
    assert stops == [[END]]


def test_an_empty_observation_in_mid_episode_is_an_error() -> None:
    assert "empty observation" in play({"turns": 2, "empty": True}).error


@pytest.mark.shows("adapters: tinker-cookbook's own guess_number is played as it is, and what it masks or breaks is seen")
def test_the_cookbooks_own_guess_number_is_played_as_it_is() -> None:
    cookbook()
    from tinker_cookbook.recipes.multiplayer_rl.guess_number.env import GuessNumberEnv
    from tinker_cookbook.renderers import get_renderer

    renderer = get_renderer("qwen3", TOKENIZER)
    guesses = ["Guess: 512", "what?", "Guess: 700"]
    left = list(guesses)
    source = WrittenSource(lambda prompt: [*TOKENIZER.encode(left.pop(0), add_special_tokens=False), END])
    player = CookbookPlayer(lambda row, seed: GuessNumberEnv(row["answer"], renderer), TOKENIZER)
    episode = asyncio.run(play_episode(player, {"answer": 700}, source, sampling_seed=1, seed=1))
    assert (episode.stop, episode.reward, episode.error) == ("done", 0.0, "")  # -1 for the second, 1 for the third
    assert [turn.reward for turn in episode.turns] == [0.0, -1.0, 1.0]
    assert "Too low" in TOKENIZER.decode(source.prompts[1]) and "Failed to parse" in TOKENIZER.decode(source.prompts[2])
    # It writes the model's turns under the role `player`, so no observation continues the one before.
    assert len(episode.segments) == 3
    trained = [
        [token for token, sampled in zip(each.token_ids, each.sampled, strict=True) if sampled] for each in episode.segments
    ]
    assert [TOKENIZER.decode(each) for each in trained] == [f"{guess}<|im_end|>" for guess in guesses]


def test_a_message_environment_of_the_cookbook_is_one_segment() -> None:
    cookbook()
    from tinker_cookbook.renderers import get_renderer
    from tinker_cookbook.rl.message_env import (
        EnvFromMessageEnv,
        MessageEnv,
        MessageStepResult,
    )

    class Echo(MessageEnv):
        def __init__(self) -> None:
            self.messages: list[Any] = [{"role": "user", "content": "say it"}]

        async def initial_observation(self) -> list[Any]:
            return self.messages

        async def step(self, message: Any) -> Any:
            self.messages = [*self.messages, message, {"role": "user", "content": "again"}]
            return MessageStepResult(1.0, len(self.messages) > 6, self.messages)

    renderer = get_renderer("qwen3", TOKENIZER)
    source = WrittenSource(lambda prompt: [*TOKENIZER.encode("it", add_special_tokens=False), END])
    player = CookbookPlayer(lambda row, seed: EnvFromMessageEnv(renderer, Echo()), TOKENIZER)
    episode = asyncio.run(play_episode(player, {}, source, sampling_seed=1, seed=1))
    assert (episode.stop, episode.reward, len(episode.turns), len(episode.segments)) == ("done", 3.0, 3, 1)
