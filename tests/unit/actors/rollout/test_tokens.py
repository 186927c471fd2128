"""Turns of episodes over engines that are stand-ins."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from actors.rollout.config import RolloutConfig, SamplingConfig
from actors.rollout.messages import AdapterVersion, Request, Response, VersionSpan
from actors.rollout.tokens import RolloutTokens
from rl_backend.contracts import ConfigError, EngineDeadError, RLBackendError, RolloutError
from rl_backend.environment.protocol import Generation, TokenSource


class Engines:
    """A rollout group as far as turns go: what it has no error for is answered with token 0."""

    def __init__(self) -> None:
        self.config = RolloutConfig(model_path="x", num_engines=2)
        self.infos = dict.fromkeys(range(2), SimpleNamespace(max_model_len=64, vocab_size=100))
        self.errors: list[RLBackendError] = []
        self.asked: list[Request] = []
        self.adapters: dict[str, AdapterVersion] = {}
        self.pending: list[Future[Response]] = []
        self.answers = True
        self.given_up = 0

    @property
    def turns(self) -> Engines:
        return self

    lora = turns

    def version_of(self, tenant: str | None) -> AdapterVersion | None:
        return None if tenant is None else self.adapters[tenant]

    def ask(self, groups: Sequence[Sequence[Request]]) -> list[list[Future[Response]]]:
        ((request,),) = groups
        self.asked.append(request)
        future: Future[Response] = Future()
        if self.errors:
            future.set_exception(self.errors.pop(0))
        elif self.answers:
            spans = (VersionSpan(3, 1), VersionSpan(4, 1))
            cached = len(request.prompt_ids) // 2
            mask = np.array([[0, 9], [9, -1]], dtype=np.int32) if self.config.returns_masks else None
            future.set_result(Response([0, 9], [-1.0, -2.0], "stop", spans, cached, sampling_mask=mask))
        self.pending.append(future)
        return [[future]]

    def give_up(self) -> None:
        self.given_up += 1


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
    assert engines.asked == [Request([1, 2], sampling, 5, None, 3)]
    ask(source(engines, sampling=SamplingConfig(stop_token_ids=(8, 9))))
    assert engines.asked[-1].sampling.stop_token_ids == (9, 8), "beside those of the turn"
    ask(tokens, [1, 2, 3, 4])
    assert (tokens.prompt_tokens, tokens.cached_tokens, tokens.cached_share) == (6, 3, 0.5)
    assert source(engines).cached_share == 0.0
    tokens.give_up()
    assert engines.given_up == 1


def test_errors_are_raised_at_once() -> None:
    engines = Engines()
    for error in (RolloutError("no weights"), EngineDeadError("no engine is left")):
        engines.errors = [error]
        with pytest.raises(type(error), match=str(error)):
            ask(source(engines))
    assert len(engines.asked) == 2


def test_a_version_of_an_adapter_that_was_replaced_on_the_way_is_chosen_anew() -> None:
    engines = Engines()
    old, new = AdapterVersion("a", 1, 1, 8), AdapterVersion("a", 2, 2, 8)
    engines.adapters = {"a": old}
    engines.errors = [RolloutError("engine 0 does not have a@1#1: push it")]
    tokens = source(engines, adapter="a")
    ordinary = engines.ask

    def replaced(groups: Sequence[Sequence[Request]]) -> list[list[Future[Response]]]:
        engines.adapters = {"a": new}
        return ordinary(groups)

    engines.ask = replaced  # type: ignore[method-assign]
    assert ask(tokens).token_ids == [0, 9]
    assert [each.adapter for each in engines.asked] == [old, new]
    engines.errors = [RolloutError("engine 0 does not have a@2#2: push it")]
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


def test_a_turn_has_the_mask_of_its_tokens_where_engines_return_masks() -> None:
    engines = Engines()
    engines.config = RolloutConfig(model_path="x", num_engines=2, engine_args={"return_sampling_mask": True})
    with pytest.raises(ConfigError, match=r"SamplingConfig\.top_k=0"):
        source(engines)
    mask = ask(source(engines, sampling=SamplingConfig(top_k=2))).sampling_mask
    assert mask is not None and mask.tolist() == [[0, 9], [9, -1]]


def test_a_turn_has_the_routes_of_its_tokens_and_ends_as_its_engine_says() -> None:
    engines = Engines()
    routes = np.arange(6, dtype=np.uint8).reshape(3, 1, 2)
    for reason in ("length", "abort", "stop"):
        engines.answers = False
        tokens = source(engines)

        async def answered(reason: Any = reason, tokens: RolloutTokens = tokens) -> Generation:
            turn = asyncio.create_task(tokens.generate([1, 2], seed=1, stop_token_ids=(), max_tokens=3))
            await asyncio.sleep(0)
            spans = (VersionSpan(3, 2), VersionSpan(5, 1))
            engines.pending[-1].set_result(Response([4, 5, 6], [-1.0, -2.0, 0.0], reason, spans, 1, routes))
            return await turn

        found = asyncio.run(answered())
        assert (found.finish, found.versions, found.sampling_mask) == (reason, [3, 3, 5], None)
        assert found.routes is routes and found.cached_tokens == 1
        assert engines.asked[-1].sampling.stop_token_ids == ()


def test_the_weights_alone_are_asked_once_and_an_adapter_that_was_removed_is_not_asked_for_again() -> None:
    engines = Engines()
    engines.adapters = {"a": AdapterVersion("a", 1, 1, 8), "": AdapterVersion("", 1, 2, 8)}
    engines.errors = [RolloutError("engine 0 failed")]
    with pytest.raises(RolloutError, match="engine 0 failed"):
        ask(source(engines))
    engines.errors = [RolloutError("engine 0 does not have a@1#1: push it")]
    ordinary = engines.ask

    def removed(groups: Sequence[Sequence[Request]]) -> list[list[Future[Response]]]:
        engines.adapters = {}
        return ordinary(groups)

    engines.ask = removed  # type: ignore[method-assign]
    with pytest.raises(RolloutError, match="does not have a@1#1"):
        ask(source(engines, adapter="a"))
    assert len(engines.asked) == 2
