"""Turns of LoRA tenants: each finishes on the version that it began with, and later ones have what was pushed since."""

from __future__ import annotations

import asyncio

import pytest

from actors.rollout.config import SamplingConfig
from actors.rollout.tokens import RolloutTokens
from rl_backend.contracts import RolloutError
from rl_backend.environment.protocol import Generation
from tests.support.served_tenants import LONG, PROMPTS, TOLERANCE, ServedTenants
from tests.support.turns import as_sample, ask, until, until_in_flight

TURN = 40


@pytest.mark.shows(
    "turns: of LoRA tenants beside each other: each finishes on its version, with the same tokens, whatever is pushed"
)
def test_turns_of_tenants_finish_on_their_versions_and_later_ones_have_the_new(served: ServedTenants) -> None:
    rollout, before = served.rollout, served.versions()
    names: list[str | None] = [*served.syncs, None]
    sources = {name: RolloutTokens(rollout, adapter=name) for name in names}
    options = SamplingConfig(max_new_tokens=TURN)
    expected = {
        name: rollout.generate([LONG] * 2, options, seeds=[index, index + 10], adapter=name)
        for index, name in enumerate(names)
    }

    async def play() -> dict[str | None, list[Generation]]:
        turns = {
            name: [asyncio.ensure_future(ask(source, LONG, seed, TURN)) for seed in (index, index + 10)]
            for index, (name, source) in enumerate(sources.items())
        }
        await until_in_flight(rollout, 8)
        served.step("narrow", 70)
        await asyncio.to_thread(served.syncs["narrow"].push)
        return {name: await asyncio.gather(*each) for name, each in turns.items()}

    turns = asyncio.run(play())
    for name, each in turns.items():
        assert [turn.token_ids for turn in each] == [sample.response_ids for sample in expected[name]], name
        for turn, sample in zip(each, expected[name], strict=True):
            assert list(turn.versions) == sample.weight_versions
            assert turn.log_probs == pytest.approx(sample.log_probs, abs=TOLERANCE)
    after = asyncio.run(ask(sources["narrow"], LONG, 0, TURN))
    assert set(after.versions) == {served.versions()["narrow"]} != {before["narrow"]}
    assert after.log_probs != pytest.approx(turns["narrow"][0].log_probs, abs=TOLERANCE)
    assert served.gap(served.tenants["narrow"], [as_sample(LONG, after)]) < TOLERANCE

    async def only_present_versions_are_loaded() -> None:
        numbers = {adapter.number for adapter in rollout.adapters.values()}
        await until(lambda: all(slots <= numbers for slots, _ in rollout.engine_set.call("slots").values()))

    asyncio.run(only_present_versions_are_loaded())
    with pytest.raises(RolloutError, match="adapter='nobody' has not been pushed"):
        asyncio.run(ask(RolloutTokens(rollout, adapter="nobody"), [5], 1, 1))


@pytest.mark.shows("turns: one that has to wait has the version that it was asked of, whatever is pushed meanwhile")
def test_a_turn_that_waits_has_its_version_after_many_pushes(served: ServedTenants) -> None:
    rollout, version = served.rollout, served.versions()["narrow"]
    source, options = RolloutTokens(rollout, adapter="narrow"), SamplingConfig(max_new_tokens=TURN)
    expected = rollout.generate([LONG], options, seeds=[3], adapter="narrow")

    async def play() -> list[Generation]:
        waiting = [asyncio.ensure_future(ask(source, LONG, 3, TURN)) for _ in range(2)]
        await until_in_flight(rollout, 2)
        for step in range(4):
            served.step("narrow", 75 + step)
            await asyncio.to_thread(served.syncs["narrow"].push)
        assert not any(turn.done() for turn in waiting)
        rollout.engine_set.call("resume_turns")
        return await asyncio.gather(*waiting)

    rollout.engine_set.call("pause_turns")
    for turn in asyncio.run(play()):
        assert turn.token_ids == expected[0].response_ids and set(turn.versions) == {version}
        assert turn.log_probs == pytest.approx(expected[0].log_probs, abs=TOLERANCE)
    served.assert_served(["narrow"] * len(PROMPTS), served.versions())


def test_a_push_of_the_base_waits_for_the_turns_of_tenants(served: ServedTenants) -> None:
    source = RolloutTokens(served.rollout, adapter="wide")
    expected = served.rollout.generate([LONG], SamplingConfig(max_new_tokens=TURN), seeds=[1], adapter="wide")

    async def play() -> Generation:
        turn = asyncio.ensure_future(ask(source, LONG, 1, TURN))
        await until_in_flight(served.rollout, 1)
        await asyncio.to_thread(served.push_base)
        assert turn.done()
        return await turn

    assert asyncio.run(play()).token_ids == expected[0].response_ids
    assert asyncio.run(ask(source, LONG, 1, TURN)).token_ids == expected[0].response_ids
