from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rl_backend.contracts import BatchError, ConfigError, RewardError
from rl_backend.data.examples import DataConfig
from rl_backend.data.prompts import encode_prompt
from rl_backend.data.rewards import RewardConfig
from rl_backend.environment import Episode, play_episode
from rl_backend.environment.groups import GroupTask, PlayOptions, play_groups
from rl_backend.environment.protocol import load_environment, load_player, load_score
from rl_backend.environment.reward_environment import answering
from rl_backend.environment.stepping import StepOptions, SteppedPlayer
from rl_backend.environment.tools import ToolPool, tool_schema
from tests.unit.rl_backend.environment.test_stepping import CALL, END, TOKENIZER, written

REWARD = """
def score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "raise":
        raise ValueError("no number")
    return {"score": float(solution_str == ground_truth), "length": len(solution_str)}
"""
ROW = {"prompt": [{"role": "user", "content": "2+2?"}], "ground_truth": "4", "data_source": "sums"}


@pytest.fixture
def reward(tmp_path: Path) -> str:
    (tmp_path / "my_reward.py").write_text(REWARD)
    return f"{tmp_path / 'my_reward.py'}:score"


def play(source: Any, reward: str, *, tools: Any = (), row: Any = ROW, **options: Any) -> Episode:
    with RewardConfig(functions=reward, **options).load() as scorer:
        player = SteppedPlayer(answering(scorer, TOKENIZER, tools=tools), TOKENIZER, StepOptions(stop_token_ids=[END]))
        return asyncio.run(play_episode(player, row, source, sampling_seed=1, seed=1))


@pytest.mark.shows("environments: a reward function is the environment with one step, of the same ids as a single turn")
def test_a_reward_function_scores_the_only_turn(reward: str) -> None:
    for answer, score in (("4", 1.0), ("5", 0.0)):
        source = written(answer)
        episode = play(source, reward)
        assert (episode.reward, episode.stop, len(episode.turns)) == (score, "done", 1)
        assert episode.metrics["length"] == 1.0
        assert source.prompts == [encode_prompt(ROW["prompt"], TOKENIZER, DataConfig())]
    assert play(written("4"), reward, row={**ROW, "prompt": "2+2="}).reward == 1.0


ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def test_tools_of_the_row_are_shown_where_the_environment_has_none(reward: str) -> None:
    source = written("4")
    assert play(source, reward, row={**ROW, "tools": [ADD]}).reward == 1.0
    assert source.prompts == [encode_prompt(ROW["prompt"], TOKENIZER, DataConfig(), tools=[ADD])]
    assert source.prompts != [encode_prompt(ROW["prompt"], TOKENIZER, DataConfig())]
    refused = play(written("4"), reward, row={**ROW, "prompt": "2+2=", "tools": [ADD]})
    assert refused.stop == "error" and "field tools: the prompt is text" in refused.error


def test_tools_of_a_row_that_the_environment_does_not_give_are_refused(reward: str, tmp_path: Path) -> None:
    (tmp_path / "my_tools.py").write_text("def double(x: int) -> int:\n    return 2 * x\n")
    row = {**ROW, "tools": [ADD]}
    with ToolPool([f"{tmp_path / 'my_tools.py'}:double"]) as pool:
        refused = play(written("4"), reward, tools=pool.tools, row=row)
        assert refused.stop == "error"
        assert "field tools: the row has add, and the environment gives double" in refused.error
        with RewardConfig(functions=reward).load() as scorer:
            player = SteppedPlayer(answering(scorer, TOKENIZER, tools=pool.tools), TOKENIZER)
            with pytest.raises(BatchError, match="the row has add, and the environment gives double"):
                asyncio.run(player.check(row))
            asyncio.run(player.check({**ROW, "tools": [tool_schema(pool.tools[0])]}))


def test_functions_as_tools_and_a_reward_are_an_environment(reward: str, tmp_path: Path) -> None:
    (tmp_path / "my_tools.py").write_text("def double(x: int) -> int:\n    return 2 * x\n")
    with ToolPool([f"{tmp_path / 'my_tools.py'}:double"]) as pool:
        episode = play(written(CALL, "4"), reward, tools=pool.tools)
    assert episode.reward == 1.0 and [call.answer for call in episode.turns[0].calls] == ["4"]


def test_a_reward_function_that_fails_stops_the_run_or_drops_the_episode(reward: str) -> None:
    with pytest.raises(RewardError, match="ValueError: no number"):
        play(written("raise"), reward)
    dropped = play(written("raise"), reward, on_failure="drop")
    assert dropped.stop == "error" and "ValueError: no number" in dropped.error
    assert play(written("raise"), reward, on_failure="zero").reward == 0.0


def test_groups_of_answers_are_scored_one_by_one(reward: str) -> None:
    with RewardConfig(functions=reward).load() as scorer:
        player = SteppedPlayer(answering(scorer, TOKENIZER), TOKENIZER, StepOptions(stop_token_ids=[END]))
        source = written(*["4", "5"] * 20)
        tasks = [GroupTask(ROW, seed=0, sampling_seeds=range(40))]
        (group,) = asyncio.run(play_groups(player, tasks, source, PlayOptions()))
    assert sum(episode.reward for episode in group.episodes) == 20


def test_environments_players_and_scores_are_found_by_name(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "class Game:\n    def __init__(self, row, seed): self.seed = seed\ndef wrong(row): ...\ndef best(episodes): ...\n"
    )
    assert load_environment(f"{file}:Game")({}, 7).seed == 7  # type: ignore[attr-defined]
    assert load_player(f"{file}:Game") and load_score(f"{file}:best")
    for load, name, takes in ((load_environment, "wrong", "row, seed"), (load_player, "wrong", "row, sampler")):
        with pytest.raises(ConfigError, match=rf"must take \({takes}\): too many positional arguments"):
            load(f"{file}:{name}")
    with pytest.raises(ConfigError, match=r"environment=.*has no function 'gone'"):
        load_environment(f"{file}:gone")


@pytest.mark.shows("environments: what one episode does to its row, or a reward function to its arguments, reaches no other")
def test_a_reward_function_that_changes_the_truth_changes_it_for_its_own_episode(tmp_path: Path) -> None:
    file = tmp_path / "greedy.py"
    file.write_text(
        "def left(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    ground_truth.remove(solution_str)\n"
        "    return len(ground_truth)\n"
    )
    row = {**ROW, "ground_truth": ["4", "5"]}
    with RewardConfig(functions=f"{file}:left").load() as scorer:
        player = SteppedPlayer(answering(scorer, TOKENIZER), TOKENIZER, StepOptions(stop_token_ids=[END]))
        task = GroupTask(row, seed=1, sampling_seeds=[1, 2])
        (group,) = asyncio.run(play_groups(player, [task], written("4", "5")))
    assert [episode.reward for episode in group.episodes] == [1.0, 1.0] and row["ground_truth"] == ["4", "5"]


COUNTED = """
import threading
running, together = [], threading.Event()

def score(data_source, solution_str, ground_truth, extra_info):
    running.append(solution_str)
    most = len(running)
    if most > 1:
        together.set()
    together.wait(extra_info["patience"])
    running.pop()
    return most
"""


@pytest.mark.parametrize(("options", "patience"), [({}, 0.05), ({"workers": 8}, 2.0)], ids=["by itself", "of workers"])
def test_a_plain_function_is_called_by_one_episode_after_the_other_unless_it_has_workers(
    options: dict[str, Any], patience: float, tmp_path: Path
) -> None:
    (tmp_path / "counted.py").write_text(COUNTED)
    row = {**ROW, "extra_info": {"patience": patience}}
    with RewardConfig(functions=f"{tmp_path / 'counted.py'}:score", **options).load() as scorer:
        player = SteppedPlayer(answering(scorer, TOKENIZER), TOKENIZER, StepOptions(stop_token_ids=[END]))
        tasks = [GroupTask(row, seed=each, sampling_seeds=range(4)) for each in (0, 1)]
        groups = asyncio.run(play_groups(player, tasks, written(*["4"] * 8)))
    most = max(episode.reward for group in groups for episode in group.episodes)
    assert most > 1 if options else most == 1
