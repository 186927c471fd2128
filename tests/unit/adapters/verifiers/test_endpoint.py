from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from adapters.verifiers.child import TOKEN_HEADER
from adapters.verifiers.player import Session, TokenEndpoint
from rl_backend.environment import Limits
from rl_backend.environment.sampler import RecordingSampler
from tests.support.token_sources import RandomSource

type Ask = Callable[..., Awaitable[tuple[int, Any]]]


def opened(use: Callable[[Ask, Session, str], Awaitable[None]], **limits: int) -> None:
    async def run() -> None:
        endpoint = TokenEndpoint(64, stop_token_ids=[7])
        await endpoint.open()
        sampler = RecordingSampler(RandomSource(), sampling_seed=1, seed=1, limits=Limits(**limits))
        try:
            with endpoint.session(sampler) as (token, session):
                root = endpoint.url.removesuffix("/v1")

                async def ask(body: Any, token: str = token, path: str = "/inference/v1/generate") -> tuple[int, Any]:
                    async with aiohttp.ClientSession(headers={TOKEN_HEADER: token}) as http:
                        method = "GET" if body is None else "POST"
                        async with http.request(method, f"{root}{path}", json=body) as answer:
                            return answer.status, await answer.json(content_type=None) if answer.status != 403 else None

                await use(ask, session, token)
        finally:
            await endpoint.close()

    asyncio.run(run())


def test_a_turn_has_the_ids_and_log_probs_of_the_record() -> None:
    async def use(ask: Ask, session: Session, token: str) -> None:
        status, answer = await ask({"token_ids": [1, 2], "sampling_params": {"max_tokens": 3, "logprobs": 1}})
        assert status == 200
        (choice,) = answer["choices"]
        ((prompt, turn),) = session.turns
        assert prompt == [1, 2] and choice["token_ids"] == list(turn.token_ids) and len(turn.token_ids) <= 3
        assert choice["logprobs"]["content"] == [
            {"token": f"token_id:{each}", "logprob": log_prob}
            for each, log_prob in zip(turn.token_ids, turn.log_probs, strict=True)
        ]
        assert await ask(None, path="/v1/models") == (
            200,
            {"object": "list", "data": [{"id": "policy", "max_model_len": 64}]},
        )

    opened(use)


@pytest.mark.shows("adapters: the endpoint of verifiers answers nobody without the token of an episode that is being played")
def test_nobody_without_the_token_of_an_episode_is_answered() -> None:
    async def use(ask: Ask, session: Session, token: str) -> None:
        for wrong in ("", token[:-1], token.swapcase()):
            assert (await ask({"token_ids": [1]}, token=wrong))[0] == 403
            assert (await ask(None, token=wrong, path="/v1/models"))[0] == 403
        assert not session.turns

    opened(use)


@pytest.mark.shows("adapters: an episode of verifiers that ends gives up the turn that it was waiting for")
def test_a_turn_in_flight_is_given_up_with_its_episode() -> None:
    async def run() -> list[str]:
        begun, seen = asyncio.Event(), list[str]()

        class Hangs(RandomSource):
            async def generate(self, token_ids: Any, **options: Any) -> Any:
                begun.set()
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    seen.append("given up")
                    raise

        endpoint = TokenEndpoint(64)
        await endpoint.open()
        sampler = RecordingSampler(Hangs(), sampling_seed=1, seed=1, limits=Limits())
        url = endpoint.url.removesuffix("/v1") + "/inference/v1/generate"

        async def ask(token: str) -> str:
            async with (
                aiohttp.ClientSession(headers={TOKEN_HEADER: token}) as http,
                http.post(url, json={"token_ids": [1]}) as answer,
            ):
                return str((await answer.json())["error"]["message"])

        try:
            with endpoint.session(sampler) as (token, _):
                asked = asyncio.create_task(ask(token))
                await begun.wait()
            seen.append(await asyncio.wait_for(asked, 30))
        finally:
            await endpoint.close()
        return seen

    assert sorted(asyncio.run(run())) == ["given up", "the episode has ended"]


def test_what_would_be_ignored_or_ends_the_episode_is_refused() -> None:
    async def use(ask: Ask, session: Session, token: str) -> None:
        status, answer = await ask({"token_ids": [1], "sampling_params": {"temperature": 0.3, "top_p": None}})
        assert (
            status == 400 and answer["error"]["message"] == "verifiers asked for temperature: set by the run, leave it out"
        )
        assert session.failed is not None
        assert (await ask({"token_ids": [10**6]}))[0] == 400
        assert (await ask({"token_ids": [1]}))[0] == 200
        status, answer = await ask({"token_ids": [1]})
        assert (status, answer["error"]["message"]) == (400, "limits.turns=1")
        assert session.ended is not None and session.ended.details["stop"] == "turns" and len(session.turns) == 1

    opened(use, turns=1)
