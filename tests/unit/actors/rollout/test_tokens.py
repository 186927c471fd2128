"""Turns of episodes over engines that are stand-ins."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from actors.rollout.config import RolloutConfig, SamplingConfig
from actors.rollout.messages import AdapterVersion, Request, Response, VersionSpan
from actors.rollout.tokens import RolloutTokens
from rl_backend.contracts import ConfigError, EngineDeadError, EngineDirtyError, RLBackendError, RolloutError
from rl_backend.environment.protocol import Generation, TokenSource


class Engines:
    """A rollout group as far as turns go: an answer has the engine's number, and its errors come first."""

    def __init__(self, engines: int = 2) -> None:
        self.config = RolloutConfig(model_path="x", num_engines=engines)
        self.infos = {number: SimpleNamespace(max_model_len=64, vocab_size=100) for number in range(engines)}
        self.engines = tuple(range(engines))
        self.busy = dict.fromkeys(self.engines, 0)
        self.errors: dict[int, list[RLBackendError]] = {}
        self.asked: list[tuple[int, Request]] = []
        self.adapters: dict[str, AdapterVersion] = {}
        self.pending: list[Future[Response]] = []
        self.answers = True

    @property
    def turns(self) -> Engines:
        return self

    lora = engine_set = turns

    def wait_for_engine(self, error: RLBackendError) -> None:
        """One is lost; another one takes over as long as there is any."""
        self.engines = tuple(engine for engine in self.engines if engine != self.asked[-1][0])
        if not self.engines:
            raise error

    @property
    def in_flight(self) -> dict[int, int]:
        return {engine: self.busy[engine] for engine in self.engines}

    def version_of(self, tenant: str | None) -> AdapterVersion | None:
        return None if tenant is None else self.adapters[tenant]

    def ask(self, engine: int, request: Request) -> Future[Response]:
        self.asked.append((engine, request))
        future: Future[Response] = Future()
        if self.errors.get(engine):
            future.set_exception(self.errors[engine].pop(0))
        elif self.answers:
            spans = (VersionSpan(3, 1), VersionSpan(4, 1))
            future.set_result(Response([engine, 9], [-1.0, -2.0], "stop", spans, len(request.prompt_ids) // 2))
        self.pending.append(future)
        return future


def ask(tokens: RolloutTokens, prompt: Sequence[int] = (1, 2)) -> Generation:
    return asyncio.run(tokens.generate(prompt, seed=5, stop_token_ids=(9,), max_tokens=7))


def source(engines: Engines, **options: Any) -> RolloutTokens:
    return RolloutTokens(engines, **options)  # type: ignore[arg-type]


def test_a_turn_is_a_generation_with_a_version_of_each_token() -> None:
    engines = Engines()
    tokens = source(engines, sampling=SamplingConfig(temperature=0.5), require_version=3)
    as_protocol: TokenSource = tokens
    assert (as_protocol.context_tokens, as_protocol.vocab_size) == (64, 100)
    assert ask(tokens) == Generation([0, 9], [-1.0, -2.0], "stop", [3, 4], None, 1)
    sampling = SamplingConfig(temperature=0.5, max_new_tokens=7, stop_token_ids=(9,))
    assert engines.asked == [(0, Request([1, 2], sampling, 5, None, 3))]
    ask(source(engines, sampling=SamplingConfig(stop_token_ids=(8, 9))))
    assert engines.asked[-1][1].sampling.stop_token_ids == (9, 8), "beside those of the turn"
    ask(tokens, [1, 2, 3, 4])
    assert (tokens.prompt_tokens, tokens.cached_tokens, tokens.cached_share) == (6, 3, 0.5)


def test_later_turns_go_to_the_engine_of_the_turns_before_and_first_ones_to_the_least_busy() -> None:
    engines = Engines(3)
    tokens = source(engines)
    engines.busy = {0: 4, 1: 2, 2: 3}
    first = ask(tokens, [1, 2])
    engines.busy = {0: 0, 1: 9, 2: 9}
    ask(tokens, [1, 2, *first.token_ids, 5, 6])
    ask(tokens, [1, 2, *first.token_ids])
    ask(tokens, [1, 2])
    ask(tokens, [1, 2, 3, *first.token_ids])
    assert [each[0] for each in engines.asked] == [1, 1, 1, 0, 0]
    engines.engines = (0, 2)
    ask(tokens, [1, 2, *first.token_ids])
    assert engines.asked[-1][0] == 0


@pytest.mark.parametrize("error", [EngineDeadError("engine 0 is dead"), EngineDirtyError("engine 0 is dirty")])
def test_a_turn_whose_engine_is_lost_is_asked_again_of_another(error: RLBackendError) -> None:
    engines = Engines()
    tokens = source(engines)
    engines.errors = {0: [error]}
    assert ask(tokens).token_ids == [1, 9]
    first, second = engines.asked
    assert (first[0], second[0]) == (0, 1) and first[1:] == second[1:]
    engines.errors = {1: [error]}
    with pytest.raises(type(error)):
        ask(tokens)


def test_other_errors_are_raised_at_once() -> None:
    engines = Engines()
    engines.errors = {0: [RolloutError("no weights")]}
    with pytest.raises(RolloutError, match="no weights"):
        ask(source(engines))
    assert len(engines.asked) == 1


def test_a_version_of_an_adapter_that_was_replaced_on_the_way_is_chosen_anew() -> None:
    engines = Engines()
    old, new = AdapterVersion("a", 1, 1, 8), AdapterVersion("a", 2, 2, 8)
    engines.adapters = {"a": old}
    engines.errors = {0: [RolloutError("engine 0 does not have a@1#1: push it")]}
    tokens = source(engines, adapter="a")
    ordinary = engines.ask

    def replaced(*args: Any, **kwargs: Any) -> Future[Response]:
        engines.adapters = {"a": new}
        return ordinary(*args, **kwargs)

    engines.ask = replaced  # type: ignore[method-assign]
    assert ask(tokens).token_ids == [0, 9]
    assert [each[1].adapter for each in engines.asked] == [old, new]
    engines.errors = {1: [RolloutError("engine 0 does not have a@2#2: push it")], 0: [RolloutError("does not have")]}
    with pytest.raises(RolloutError, match="does not have"):
        ask(tokens)


def test_a_cancelled_turn_is_given_up() -> None:
    engines = Engines()
    engines.answers = False
    tokens = source(engines)

    async def cancel() -> None:
        turn = asyncio.create_task(tokens.generate([1], seed=1, stop_token_ids=(), max_tokens=3))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn

    asyncio.run(cancel())
    assert engines.pending[0].cancelled()


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"max_new_tokens": 5}, r"SamplingConfig\.max_new_tokens=5: a turn is one response with log-probs and brings"),
        ({"n": 2}, r"SamplingConfig\.n=2: a turn is one response"),
        ({"log_probs": False}, r"SamplingConfig\.log_probs=False"),
        ({"stop_strings": ("a",)}, r"have no tokenizer; set RolloutConfig\.load_tokenizer"),
    ],
)
def test_what_a_turn_brings_itself_or_nobody_can_do_is_refused(sampling: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        source(Engines(), sampling=SamplingConfig(**sampling))


def test_turns_are_counted_one_by_one_and_go_to_no_engine_that_is_lost() -> None:
    engines = Engines(3)
    engines.busy = {0: 5, 1: 1, 2: 1}
    tokens = source(engines)
    for length in (4, 6, 2):
        ask(tokens, range(length))
    assert (tokens.prompt_tokens, tokens.cached_tokens, tokens.cached_share) == (12, 6, 0.5)
    assert source(engines).cached_share == 0.0
    engines.errors = {1: [EngineDeadError("engine 1 is dead")], 2: [EngineDirtyError("engine 2 is dirty")]}
    assert ask(tokens, [7, 7]).token_ids == [0, 9]
    assert [each[0] for each in engines.asked[-3:]] == [1, 2, 0]
