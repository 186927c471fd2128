from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from rl_backend.contracts import ConfigError
from rl_backend.environment import Environment, Episode, Limits, Step, Turn, play_episode
from rl_backend.environment.sampler import RecordingSampler
from rl_backend.environment.stepping import StepOptions, SteppedPlayer
from tests.support.chat_templates import THINKING, chat_tokenizer
from tests.support.token_sources import WrittenSource

TOOLS = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOKENIZER = chat_tokenizer(TOOLS)
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")


class Guess(Environment):
    """The model is to write 4."""

    made: list[Guess]

    def __init__(self, row: Mapping[str, Any], seed: int) -> None:
        self.row, self.seed, self.closed = row, seed, 0
        self.seen: list[Turn] = []
        self.threads: set[threading.Thread] = set()
        Guess.made.append(self)

    def start(self) -> Any:
        self.threads.add(threading.current_thread())
        return [{"role": "user", "content": "2+2?"}]

    def step(self, turn: Turn) -> Any:
        self.seen.append(turn)
        self.threads.add(threading.current_thread())
        done = turn.message is not None and turn.message["content"] == "4"
        return Step([{"role": "user", "content": "no"}], reward=float(done), done=done, metrics={"guesses": 1})

    def close(self) -> None:
        self.closed += 1


@pytest.fixture(autouse=True)
def _made() -> None:
    Guess.made = []


def written(*turns: str, ended: bool = True) -> WrittenSource:
    """Writes one after the other."""
    left = list(turns)
    return WrittenSource(lambda prompt: [*TOKENIZER.encode(left.pop(0), add_special_tokens=False), *[END] * ended])


def play(make: Any, source: Any, row: Any = None, seed: int = 5, tokenizer: Any = TOKENIZER, **options: Any) -> Episode:
    player = SteppedPlayer(make, tokenizer, StepOptions(**options))
    limits = options.get("limits", Limits())
    return asyncio.run(play_episode(player, row or {}, source, sampling_seed=1, seed=seed, limits=limits))


def test_an_environment_is_stepped_until_it_is_done() -> None:
    source = written("3", "4")
    episode = play(Guess, source)
    (made,) = Guess.made
    assert (episode.stop, episode.reward, episode.metrics["guesses"], made.closed, made.seed) == ("done", 1.0, 2.0, 1, 5)
    assert [turn.message["content"] for turn in episode.turns if turn.message] == ["3", "4"]
    assert [turn.given[0]["content"] for turn in episode.turns] == ["2+2?", "no"]
    (segment,) = episode.segments
    text = TOKENIZER.decode(list(segment.token_ids))
    assert text.replace("<|im_start|>", "").split("<|im_end|>\n") == [
        "user\n2+2?", "assistant\n3", "user\nno", "assistant\n4<|im_end|>",
    ]  # fmt: skip
    trained = [token for token, sampled in zip(segment.token_ids, segment.sampled, strict=True) if sampled]
    assert TOKENIZER.decode(trained) == "3<|im_end|>4<|im_end|>" and segment.rewards[-1] == 1.0
    assert threading.main_thread() not in made.threads, "plain methods run in threads"


def test_asynchronous_environments_run_in_the_loop() -> None:
    class Waits(Guess):
        async def step(self, turn: Turn) -> Step:
            await asyncio.sleep(0)
            return super().step(turn)  # type: ignore[no-any-return]

        async def close(self) -> None:  # type: ignore[override]
            self.closed += 1

    assert play(Waits, written("4")).reward == 1.0
    assert threading.main_thread() in Guess.made[0].threads and Guess.made[0].closed == 1


@pytest.mark.shows("environments: close always runs: after an error, a limit of time, and when the run is interrupted")
@pytest.mark.parametrize("how", ["raises", "hangs", "hangs in a thread", "exits", "ids", "nothing", "no step"])
def test_what_an_environment_does_wrong_ends_its_episode_and_closes_it(how: str) -> None:
    class Wrong(Guess):
        def step(self, turn: Turn) -> Any:
            if how == "raises":
                raise ValueError("no such door")
            if how == "hangs":
                return asyncio.sleep(60)
            if how == "hangs in a thread":
                time.sleep(60)
            if how == "exits":
                raise SystemExit(3)
            return {"ids": Step(token_ids=[10**9]), "nothing": Step(), "no step": None}[how]

    episode = play(Wrong, written("3", "4"), limits=Limits(step_seconds=0.2))
    stop, problem = {
        "raises": ("error", "ValueError: no such door"),
        "hangs": ("timeout", "limits.step_seconds"),
        "hangs in a thread": ("timeout", "limits.step_seconds"),
        "exits": ("error", "SystemExit"),
        "ids": ("error", "ids from 1000000000 to 1000000000; expected 0 to"),
        "nothing": ("error", "step returned nothing to go on with"),
        "no step": ("error", "step returned NoneType; expected a Step"),
    }[how]
    assert episode.stop == stop and problem in episode.error
    assert len(episode.turns) == 1 and len(episode.segments) == 1 and Guess.made[0].closed == 1


@pytest.mark.parametrize("blocks", [False, True])
def test_closing_outlasts_a_cancellation(blocks: bool) -> None:
    class Slow(Guess):
        async def step(self, turn: Turn) -> Any:
            await asyncio.sleep(60)

        async def close(self) -> None:  # type: ignore[override]
            await asyncio.sleep(60 if blocks else 0.05)
            self.closed += 1

    async def interrupted() -> None:
        player = SteppedPlayer(Slow, TOKENIZER, StepOptions(limits=Limits(step_seconds=0.3)))
        task = asyncio.ensure_future(play_episode(player, {}, written("3"), sampling_seed=1, seed=1))
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.sleep(0.01)
        task.cancel()  # Ctrl-C twice
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(interrupted())
    assert Guess.made[0].closed == (not blocks)


def test_closing_outlasts_those_who_cancel_the_player_again() -> None:
    class Slow(Guess):
        async def step(self, turn: Turn) -> Any:
            await asyncio.sleep(60)

        async def close(self) -> None:  # type: ignore[override]
            await asyncio.sleep(0.05)
            self.closed += 1

    async def interrupted() -> None:
        sampler = RecordingSampler(written("3"), sampling_seed=1, seed=1, limits=Limits())
        task = asyncio.ensure_future(SteppedPlayer(Slow, TOKENIZER)({}, sampler))
        for _ in range(3):
            await asyncio.sleep(0.01 if Guess.made and Guess.made[0].threads else 0.1)
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(interrupted())
    assert Guess.made[0].closed == 1


@pytest.mark.parametrize("close", ["waits", "fails", "waits in a thread"])
def test_an_episode_that_is_cancelled_while_it_closes_is_cancelled(close: str) -> None:
    closing, let_go = threading.Event(), threading.Event()

    class Slow(Guess):
        def close(self) -> Any:
            closing.set()
            if close != "waits in a thread":
                return self.closed_later()
            let_go.wait(5.0)
            self.closed += 1
            return None

        async def closed_later(self) -> None:
            while not let_go.is_set():
                await asyncio.sleep(0.001)
            self.closed += 1
            if close == "fails":
                raise OSError("jammed")

    async def cancelled_late() -> None:
        sampler = RecordingSampler(written("4"), sampling_seed=1, seed=1, limits=Limits())
        task = asyncio.ensure_future(SteppedPlayer(Slow, TOKENIZER)({}, sampler))
        while not closing.is_set():
            await asyncio.sleep(0.001)
        assert sampler.turns[-1].reward == 1.0, "it had ended by itself"
        task.cancel()
        await asyncio.sleep(0.01)
        assert not task.done(), "it waits until it has closed"
        let_go.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled_late())
    assert Guess.made[0].closed == 1


def test_a_close_that_fails_is_told_of() -> None:
    class Jams(Guess):
        def close(self) -> None:
            raise OSError("jammed")

    episode = play(Jams, written("4"))
    assert episode.stop == "done" and episode.reward == 1.0 and "close failed: OSError: jammed" in episode.error


class Calculator(Guess):
    @property
    def tools(self) -> Any:
        class Double:
            name, description = "double", "Doubles."
            parameters: Mapping[str, Any] = {"type": "object", "properties": {"x": {"type": "integer"}}}

            async def __call__(self, arguments: Mapping[str, Any]) -> str:
                return str(2 * arguments["x"])

        return (Double(),)

    def step(self, turn: Turn) -> Any:
        self.seen.append(turn)
        return Step() if turn.calls else super().step(turn)


CALL = '<tool_call>\n{"name": "double", "arguments": {"x": 2}}\n</tool_call>'
BROKEN = "<tool_call>oh</tool_call>"


def test_tools_are_called_and_answered_before_the_step() -> None:
    source = written(f"I double.{CALL}{BROKEN}", "4")
    episode = play(Calculator, source)
    first, second = episode.turns
    assert [(call.status, call.answer[:20]) for call in first.calls] == [
        ("ok", "4"),
        ("invalid_json", "Error: it is not JSO"),
    ]
    assert first.message is not None and first.message["content"] == "I double."
    assert [message["role"] for message in second.given] == ["tool", "tool"] and second.given[0]["content"] == "4"
    assert episode.reward == 1.0 and episode.metrics["tool_calls"] == 2 and episode.metrics["failed_tool_calls"] == 1
    assert len(episode.segments) == 1 and "<|im_start|>tool\n4<|im_end|>" in TOKENIZER.decode(source.prompts[1])
    assert '"name": "double"' in TOKENIZER.decode(source.prompts[0]), "the model is told of the tool"


def test_calls_of_later_turns_have_ids_that_no_earlier_call_has() -> None:
    episode = play(Calculator, written(CALL + CALL, CALL, f"{BROKEN}{CALL}", "4"))
    turns = [turn.message["tool_calls"] for turn in episode.turns[:3] if turn.message is not None]
    ids = [[call["id"] for call in calls] for calls in turns]
    assert [len(each) for each in ids] == [2, 1, 2] and len({each for calls in ids for each in calls}) == 5
    answered = [[message["tool_call_id"] for message in turn.given] for turn in episode.turns[1:]]
    assert answered == ids, "each answer names the call that it is for"


def test_a_tool_that_changes_its_arguments_leaves_what_the_model_wrote() -> None:
    class Emptying(Guess):
        @property
        def tools(self) -> Any:
            class Double:
                name, description, parameters = "double", "Doubles.", {"type": "object"}

                async def __call__(self, arguments: Any) -> str:
                    return str(2 * arguments.pop("x") + len(arguments["more"]) - len(arguments["more"].pop()))

            return (Double(),)

        def step(self, turn: Turn) -> Any:
            return Step() if turn.calls else super().step(turn)

    written_call = '<tool_call>{"name": "double", "arguments": {"x": 2, "more": ["y"]}}</tool_call>'
    call = play(Emptying, written(written_call, "4")).turns[0].calls[0]
    assert (call.answer, call.arguments) == ("4", {"x": 2, "more": ["y"]})


def test_calls_beyond_the_limit_are_not_run_and_end_the_episode() -> None:
    episode = play(Calculator, written(CALL, CALL + CALL, "4"), limits=Limits(tool_calls=2))
    assert (episode.stop, episode.error) == ("tool_calls", "limits.tool_calls=2")
    assert [call.status for turn in episode.turns for call in turn.calls] == ["ok", "ok", "over_limit"]


def test_a_turn_that_was_cut_ends_the_episode_if_asked() -> None:
    cut = written("3", "4", ended=False)
    assert play(Guess, cut).stop == "done"
    ended = play(Guess, written("3", ended=False), on_cut="end")
    assert (ended.stop, len(ended.turns), len(Guess.made[1].seen)) == ("length", 1, 1)


def test_ids_restarts_and_turns_that_are_left_out() -> None:
    class Ids(Guess):
        def start(self) -> Any:
            return [1, 2]

        def step(self, turn: Turn) -> Any:
            self.seen.append(turn)
            return [
                Step(token_ids=[1, 2, *turn.token_ids, 3], trained=False),
                Step(restart=[{"role": "user", "content": "anew"}], reward=0.5),
                Step(done=True, reward=0.25, stop="parse"),
            ][len(self.seen) - 1]

    episode = play(Ids, written("a", "b", "c"))
    assert episode.stop == "parse" and episode.reward == 0.75
    first, second = episode.segments
    assert sum(first.sampled) == 2 and first.token_ids[:2] == (1, 2) and sum(second.sampled) == 2
    assert "anew" in TOKENIZER.decode(list(second.token_ids))


def test_ids_need_no_chat_template() -> None:
    class Ids(Guess):
        def start(self) -> Any:
            return [1, 2]

    plain = chat_tokenizer(None)
    assert play(Ids, written("4"), tokenizer=plain, stop_token_ids=[END]).reward == 1.0
    with pytest.raises(ConfigError, match="has no chat template"):
        play(Guess, written("4"), tokenizer=plain)


def test_a_template_that_changes_the_past_is_refused_when_the_run_starts() -> None:
    tokenizer = chat_tokenizer(THINKING)
    with pytest.raises(ConfigError, match=r"history=None: .*an answer with thinking.*Set keep .* or branch"):
        asyncio.run(SteppedPlayer(Guess, tokenizer).check({}))
    assert Guess.made[0].closed == 1
    format = asyncio.run(SteppedPlayer(Guess, tokenizer, StepOptions(history="keep")).check({}))
    assert format.history == "keep" and END in format.stop_token_ids


def test_prompts_that_overflow_the_context_end_the_episode_with_what_it_has() -> None:
    source = written("3", "4")
    source.context_tokens = 24
    episode = play(Guess, source)
    assert episode.stop == "context" and len(episode.turns) == 1 and episode.error.endswith("the context of 24 tokens")


@pytest.mark.shows("environments: at a limit of turns, tokens or a step an episode keeps the metrics that it has so far")
@pytest.mark.parametrize(
    ("limits", "stop"),
    [({"turns": 2}, "turns"), ({"sampled_tokens": 4}, "tokens"), ({"step_seconds": 0.3}, "timeout")],
)
def test_metrics_outlast_a_limit(limits: dict[str, float], stop: str) -> None:
    class Slows(Guess):
        def step(self, turn: Turn) -> Any:
            return asyncio.sleep(60) if len(self.seen) == 2 else super().step(turn)

    episode = play(Slows, written("3", "3", "3"), limits=Limits.model_validate(limits))
    assert (episode.stop, episode.metrics["guesses"], len(episode.turns)) == (stop, 2.0, 2 + (stop == "timeout"))


@pytest.mark.parametrize("start", [[], [1, {"role": "user"}], ["text"]])
def test_a_start_that_is_no_prompt_is_an_error(start: Sequence[Any]) -> None:
    class Odd(Guess):
        def start(self) -> Any:
            return start

    assert "start returned" in play(Odd, written("4")).error
