"""verifiers' own OpenEnv taskset, unmodified, against a game on loopback; skipped without a Python that has verifiers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from adapters.verifiers import VerifiersPlayer, VerifiersSettings
from adapters.verifiers.player import _result
from rl_backend.contracts import ConfigError
from rl_backend.environment import Episode, Group, GroupTask, Limits, PlayOptions, play_groups
from tests.support.chat_templates import CHATML, chat_tokenizer
from tests.support.libraries import verifiers
from tests.support.openenv_game import served_game
from tests.support.token_sources import WrittenSource

TOKENIZER = chat_tokenizer(CHATML)
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
CONTEXT = 2048


@pytest.fixture(scope="module")
def game() -> Iterator[str]:
    with served_game() as url:
        yield url


@pytest.fixture(scope="module")
def settings(game: str, tmp_path_factory: pytest.TempPathFactory) -> VerifiersSettings:
    folder = tmp_path_factory.mktemp("tokenizer")
    TOKENIZER.save_pretrained(folder)
    return VerifiersSettings(
        python=str(verifiers()),
        environment={"taskset": {"id": "openenv", "base_url": game, "resets": [{"number": 5}, {"number": 2}]}},
        roles=("player",),
        tokenizer=str(folder),
        stop_token_ids=(END,),
    )


def guesses(*written: str) -> WrittenSource:
    """The same guesses in every episode, by the number of answers in its prompt."""

    def write(prompt: list[int]) -> list[int]:
        turn = TOKENIZER.decode(prompt).count('"text"') - 1
        return [*TOKENIZER.encode(written[turn], add_special_tokens=False), END]

    return WrittenSource(write, context_tokens=CONTEXT, vocab_size=len(TOKENIZER))


def played(settings: VerifiersSettings, source: Any, size: int = 3, **options: Any) -> list[Group]:
    """Each task in an event loop of its own, as a run has one for each batch."""
    with VerifiersPlayer(settings, context_tokens=CONTEXT) as player:
        assert len(player.tasks) == 2
        batches = [[GroupTask({"task": task}, task, range(size))] for task in (0, 1)]
        return [asyncio.run(play_groups(player, batch, source, PlayOptions(**options)))[0] for batch in batches]


def trained(episode: Episode) -> list[str]:
    return [
        TOKENIZER.decode([token for token, sampled in zip(each.token_ids, each.sampled, strict=True) if sampled])
        for each in episode.segments
    ]


@pytest.mark.shows(
    "adapters: verifiers' own OpenEnv taskset is played as it is, and its branches have the ids that we recorded"
)
def test_the_openenv_taskset_of_verifiers_is_played_as_it_is(settings: VerifiersSettings) -> None:
    source = guesses('{"guess": 4}', '{"guess": 5}', '{"guess": 6}')
    first, second = played(settings, source, limits=Limits(episode_seconds=120))
    assert [(each.stop, each.error, each.reward, len(each.turns)) for each in first.episodes] == [("done", "", 1.0, 2)] * 3
    assert [(each.stop, each.error, each.reward, len(each.turns)) for each in second.episodes] == [("done", "", 0.0, 3)] * 3
    for episode in (*first.episodes, *second.episodes):
        assert sum(sum(each.sampled) for each in episode.segments) == sum(len(turn.token_ids) for turn in episode.turns)
        assert "".join(trained(episode)).startswith('{"guess": 4}<|im_end|>{"guess": 5}<|im_end|>')
    assert '"action_schema"' in TOKENIZER.decode(source.prompts[0]).replace("\\", "")


@pytest.mark.long
def test_episodes_end_alone(settings: VerifiersSettings) -> None:
    source = guesses('{"guess": 2}', "what?")
    first, second = played(settings, source, size=2, on_failure="zero", limits=Limits(turns=2, episode_seconds=120))
    assert [each.stop for each in second.episodes] == ["done", "done"] and second.episodes[0].reward == 1.0
    assert [each.stop for each in first.episodes] == ["error", "error"] and len(first.episodes[0].turns) == 2
    limited = played(settings, guesses('{"guess": 7}', '{"guess": 7}'), size=1, limits=Limits(turns=1, episode_seconds=120))
    assert [each.stop for group in limited for each in group.episodes] == ["turns", "turns"]


def test_an_environment_that_cannot_be_loaded_is_refused(settings: VerifiersSettings) -> None:
    with pytest.raises(ConfigError, match=r"verifiers cannot load it: ModuleNotFoundError: taskset 'nothing' not found"):
        VerifiersPlayer(settings.replace(environment={"taskset": {"id": "nothing"}}), context_tokens=CONTEXT).open()
    with pytest.raises(ConfigError, match=r"python='/no/python': cannot be run"):
        VerifiersPlayer(settings.replace(python="/no/python"), context_tokens=CONTEXT).open()


@pytest.mark.parametrize(
    ("condition", "stop"),
    [
        (None, "done"),
        ("agent_completed", "done"),
        ("max_turns", "turns"),
        ("max_total_tokens", "tokens"),
        ("agent_timeout", "timeout"),
        ("compaction_failed", "context"),
    ],
)
def test_where_verifiers_cuts_an_episode_it_is_cut(condition: str | None, stop: str) -> None:
    trace = {"agent": "a", "reward": 0.5, "metrics": {"won": 1}, "stop": condition, "branches": []}
    session: Any = SimpleNamespace(failed=None, ended=None, turns=[])
    result = _result({"errors": [], "traces": [trace]}, session)
    assert (result.stop, result.reward, result.metrics) == (stop, 0.5, {"won": 1.0})
    assert (condition or "") in result.error if stop != "done" else not result.error


def test_settings_travel_as_json(settings: VerifiersSettings) -> None:
    assert VerifiersSettings.model_validate_json(settings.model_dump_json()) == settings
    player = json.loads(json.dumps(settings.configured()))["player"]
    assert player == {"harness": {"id": "rl_backend_chat"}, "runtime": {"type": "subprocess"}}
