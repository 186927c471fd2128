"""What a stepped environment may answer, and what reaches its turns, its metrics and its reward function."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from rl_backend.contracts import BatchError, ConfigError
from rl_backend.data.examples import DataConfig
from rl_backend.data.prompts import encode_prompt
from rl_backend.data.rewards import LoadedReward, RewardScorer
from rl_backend.environment import Limits, Step, StepOptions, SteppedPlayer, Turn
from rl_backend.environment.reward_environment import answering
from rl_backend.environment.tool_call_parsers import Attempt, ParsedTurn
from tests.support.chat_templates import chat_tokenizer
from tests.unit.rl_backend.environment.test_stepping import CALL, END, TOKENIZER, TOOLS, Calculator, Guess, play, written


@pytest.fixture(autouse=True)
def _made() -> None:
    Guess.made = []


def stepping(*steps: Any) -> Any:
    """An environment that answers its turns with these."""

    class Answers(Guess):
        def step(self, turn: Turn) -> Any:
            self.seen.append(turn)
            return steps[len(self.seen) - 1]

    return Answers


USER = {"role": "user", "content": "on"}


@pytest.mark.parametrize(
    ("step", "problem"),
    [
        (Step(messages=[USER], token_ids=[1]), "step returned messages and token_ids; give one of"),
        (Step(messages=[USER], restart=[USER]), "step returned messages and restart; give one of"),
        (Step(token_ids=[1], restart=[USER]), "step returned token_ids and restart; give one of"),
        (Step(messages=[USER], token_ids=[1], restart=[USER]), "step returned messages and token_ids and restart"),
        (Step(), "step returned nothing to go on with; give one of messages, token_ids and restart, or done=True"),
        (Step(token_ids=[]), "step returned nothing to go on with"),
        ({"done": True}, "step returned dict; expected a Step"),
        (Step(reward=float("nan"), done=True), "a reward of nan: rewards must be finite numbers"),
    ],
)
def test_a_step_that_says_too_much_or_nothing_is_an_error(step: Any, problem: str) -> None:
    episode = play(stepping(step), written("a", "b"))
    assert episode.stop == "error" and problem in episode.error and len(episode.turns) == 1


def test_rewards_metrics_and_turns_left_out_are_of_their_own_turns() -> None:
    steps = [
        Step([USER], reward=0.5, metrics={"a": 1, "b": 2.5}),
        Step([USER], reward=-2.0, trained=False, metrics={"a": 3}),
        Step([USER], reward=4.0, done=True, stop="parse", metrics={"c": -1}),
    ]
    episode = play(stepping(*steps), written("x", "y", "z"))
    assert (episode.reward, episode.stop, episode.error) == (2.5, "parse", "")
    assert [(turn.reward, turn.trained) for turn in episode.turns] == [(0.5, True), (-2.0, False), (4.0, True)]
    assert [episode.metrics[name] for name in "abc"] == [4.0, 2.5, -1.0]
    (segment,) = episode.segments
    assert [value for value in segment.rewards if value] == [0.5, -2.0, 4.0] and sum(segment.sampled) == 4
    assert [list(turn.given) for turn in episode.turns] == [[{"role": "user", "content": "2+2?"}], [USER], [USER]]


def test_ids_and_restarts_have_their_own_messages_before_their_turns() -> None:
    anew = [{"role": "user", "content": "anew"}]
    episode = play(stepping(Step(token_ids=[1, 2]), Step(restart=anew), Step(done=True)), written("x", "y", "z"))
    assert [list(turn.given) for turn in episode.turns] == [[{"role": "user", "content": "2+2?"}], [], anew]
    assert len(episode.segments) == 3 and list(episode.segments[1].token_ids[:2]) == [1, 2]


def test_messages_come_behind_the_answers_of_tools() -> None:
    class Talks(Calculator):
        def step(self, turn: Turn) -> Any:
            self.seen.append(turn)
            return Step([USER]) if turn.calls else Step(done=True)

    source = written(CALL, "4")
    episode = play(Talks, source)
    assert [message["role"] for message in episode.turns[1].given] == ["tool", "user"]
    assert TOKENIZER.decode(source.prompts[1]).endswith(
        "tool\n4<|im_end|>\n<|im_start|>user\non<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("most", [1, 2, 3])
def test_calls_are_counted_over_turns(most: int) -> None:
    episode = play(Calculator, written(CALL, CALL + CALL, "4"), limits=Limits(tool_calls=most))
    statuses = [call.status for turn in episode.turns for call in turn.calls]
    assert statuses == ["ok"] * most + ["over_limit"] * (3 - most)
    assert episode.stop == ("done" if most == 3 else "tool_calls")
    assert episode.error == ("" if most == 3 else f"limits.tool_calls={most}")


def test_a_parser_of_ones_own_reads_turns_only_where_there_are_tools() -> None:
    seen: list[str] = []

    def parse(text: str) -> ParsedTurn:
        seen.append(text)
        return ParsedTurn("said", [Attempt("double", {"x": 8})] if text == "call" else [])

    episode = play(Calculator, written("call", "4"), tool_format=parse, limits=Limits(turns=2))
    assert seen == ["call", "4"] and [call.answer for call in episode.turns[0].calls] == ["16"]
    assert episode.turns[1].message == {"role": "assistant", "content": "said"}
    seen.clear()
    play(Guess, written("4"), tool_format=parse)
    assert seen == []
    with pytest.raises(ConfigError, match="tool_format='qwen'"):
        SteppedPlayer(Guess, TOKENIZER, StepOptions(tool_format="qwen"))


def test_options_of_the_template_reach_prompts_and_formats_are_made_once() -> None:
    tokenizer = chat_tokenizer("{{ mood }}" + TOOLS)
    source = written("4")
    play(Guess, source, tokenizer=tokenizer, chat_template_kwargs={"mood": "calm"}, stop_token_ids=[5])
    assert tokenizer.decode(source.prompts[0]).startswith("calm<|im_start|>user")
    player = SteppedPlayer(Guess, TOKENIZER, StepOptions(stop_token_ids=[5], other_end="keep"))
    first = player.format([])
    assert player.format([]) is first and first.stop_token_ids[-1] == 5 and first.other_end == "keep"
    tools = Calculator({}, 1).tools
    shown = player.format(tools)
    assert shown is not first and player.format(Calculator({}, 1).tools) is shown
    assert [tool["function"]["name"] for tool in shown.renderer.tools] == ["double"] and first.renderer.tools == ()


def test_an_environment_is_checked_with_its_seed_and_closed() -> None:
    class Twice(Calculator):
        @property
        def tools(self) -> Any:
            return (*super().tools, *super().tools)

    assert asyncio.run(SteppedPlayer(Calculator, TOKENIZER).check({"a": 1}, 9)).check.results_behind_text
    assert (Guess.made[0].seed, Guess.made[0].row, Guess.made[0].closed) == (9, {"a": 1}, 1)
    with pytest.raises(ConfigError, match=r"tools=\['double', 'double'\]: two have the same name"):
        asyncio.run(SteppedPlayer(Twice, TOKENIZER).check({}))
    with pytest.raises(BatchError, match="the row has add, and the environment gives double"):
        asyncio.run(SteppedPlayer(Calculator, TOKENIZER).check({"tools": [{"name": "add"}]}))
    asyncio.run(SteppedPlayer(Guess, TOKENIZER).check({"tools": [{"name": "add"}]}))
    assert [each.closed for each in Guess.made] == [1] * 4


def test_an_environment_needs_no_close_and_no_tools() -> None:
    class Bare:
        def __init__(self, row: Any, seed: int) -> None: ...

        def start(self) -> Any:
            return [USER]

        def step(self, turn: Turn) -> Step:
            return Step(reward=1.0, done=True)

    assert play(Bare, written("x")).reward == 1.0


@pytest.mark.parametrize("on_cut", ["continue", "end"])
@pytest.mark.parametrize("done", [False, True])
def test_a_turn_that_was_cut_is_asked_about_first(on_cut: Any, done: bool) -> None:
    episode = play(
        stepping(Step([USER], reward=0.5, done=done), Step(done=True)), written("x", "y", ended=False), on_cut=on_cut
    )
    ended = on_cut == "end" and not done
    assert (episode.stop, len(episode.turns)) == ("length" if ended else "done", 1 if ended or done else 2)
    assert episode.error == ("a turn was cut by its limit of tokens" if ended else "") and episode.reward == 0.5


def scored(
    function: Any, row: Any, *answers: str, data: DataConfig | None = None, tools: Sequence[Any] = (), **options: Any
) -> Any:
    source = written(*answers)
    with RewardScorer([LoadedReward(function, "m:f")], **options) as scorer:
        make = answering(scorer, TOKENIZER, data, tools)
        return play(make, source, row=row, stop_token_ids=[END]), source


def test_a_reward_function_is_given_all_of_the_row_and_the_text_without_its_end() -> None:
    given: list[dict[str, Any]] = []

    def score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any, prompt: Any) -> Any:
        names = ("data_source", "solution_str", "ground_truth", "extra_info", "prompt")
        given.append(dict(zip(names, (data_source, solution_str, ground_truth, extra_info, prompt), strict=True)))
        return {"score": 0.25, "length": 3, "why": "text"}

    row = {"prompt": [USER], "ground_truth": 0, "data_source": "sums", "extra_info": {"a": 1}}
    episode, _ = scored(score, row, "It is 4.")
    assert (episode.reward, episode.metrics["length"], "why" in episode.metrics) == (0.25, 3.0, False)
    scored(score, {"prompt": "2+2="}, "4")
    shared = {"solution_str": "It is 4.", "prompt": [USER]}
    assert given[0] == {"data_source": "sums", "ground_truth": 0, "extra_info": {"a": 1}, **shared}
    assert given[1] == {
        "data_source": "", "solution_str": "4", "ground_truth": None, "extra_info": None, "prompt": "2+2=",
    }  # fmt: skip


def test_columns_and_texts_are_those_of_the_runs_options() -> None:
    template = "{% if documents %}{{ documents[0].text }}{% endif %}" + TOOLS
    tokenizer = chat_tokenizer(template)
    data = DataConfig(tools_column="fs", documents_column="ds", system_prompt="s", text_prompts="message")
    row = {"prompt": "2+2?", "fs": [{"name": "f"}], "ds": [{"text": "d"}], "tools": 5}
    environment: Any = answering(None, tokenizer, data)(row, 0)  # type: ignore[arg-type]
    shown = {"tools": [{"name": "f"}], "documents": [{"text": "d"}]}
    assert environment.start() == encode_prompt("2+2?", tokenizer, data, **shown)  # type: ignore[arg-type]
    assert environment.close() is None and environment.tools == ()
    tools = Calculator({}, 1).tools
    with_tools: Any = answering(None, tokenizer, data, tools)({"prompt": "2+2?"}, 0)  # type: ignore[arg-type]
    assert with_tools.start() == [{"role": "system", "content": "s"}, {"role": "user", "content": "2+2?"}]
    assert with_tools.step(Turn(None, [1], [0.0], "stop", calls=[object()])) == Step()  # type: ignore[list-item]
    plain: Any = answering(None, tokenizer, None, tools)({"prompt": "2+2?"}, 0)  # type: ignore[arg-type]
    with pytest.raises(
        BatchError, match="a prompt of text, which is continued as it stands; with tools set text_prompts to"
    ):
        plain.start()


def test_a_dropped_score_ends_its_episode_with_what_went_wrong() -> None:
    def fails(**_: Any) -> float:
        raise ValueError("no")

    episode, _ = scored(fails, {"prompt": [USER]}, "4", on_failure="drop")
    assert episode.stop == "error" and "the reward function raised ValueError: no" in episode.error
    episode, _ = scored(fails, {"prompt": [USER]}, "4", on_failure="zero")
    assert (episode.stop, episode.reward) == ("done", 0.0)
