"""A call that samples: what no engine could answer is refused, and the rest is divided over the engines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from actors.rollout.config import RolloutConfig, SamplingConfig
from actors.rollout.group.adapters import GroupAdapters
from actors.rollout.group.engines import EngineSet
from actors.rollout.group.group import RolloutGroup
from actors.rollout.messages import AdapterVersion, PushedAdapter, Request, prompt_problem
from actors.wire.factors import PackedFactors
from rl_backend.contracts import BatchError, ConfigError, EngineDeadError

VOCAB_SIZE, MAX_MODEL_LEN = 10, 6


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ([], "has 0 tokens; expected 1 to 5 (max_model_len=6 holds prompt and response)"),
        ([0], ""),
        ([9] * 5, ""),
        ([9] * 6, "has 6 tokens; expected 1 to 5 (max_model_len=6 holds prompt and response)"),
        ([3, 10], "has token ids from 3 to 10; expected 0 to 9"),
        ([3, -1], "has token ids from -1 to 3; expected 0 to 9"),
    ],
)
def test_a_prompt_leaves_room_for_a_response_and_has_tokens_of_the_vocabulary(prompt: list[int], problem: str) -> None:
    assert prompt_problem(prompt, MAX_MODEL_LEN, VOCAB_SIZE) == problem


class Engine:
    """Keeps what it is asked to sample."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.generate = SimpleNamespace(remote=self._ask)

    def _ask(self, *call: Any) -> tuple[int, int]:
        self.asked.append(call)
        return id(self), len(self.asked)


class Group(RolloutGroup):
    """Engines 0, 1 and 3 without Ray, of which 1 is dead."""

    def __init__(self) -> None:
        self.config = RolloutConfig(model_path="x", num_engines=4, max_adapters=2)
        self.engine_set = EngineSet(self.config)
        self.lora = GroupAdapters(self.engine_set)
        info: Any = SimpleNamespace(max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB_SIZE)
        self.made = {number: Engine() for number in (0, 1, 3)}
        self.engine_set.add(self.made, dict.fromkeys(self.made, info))
        self.engine_set._lost[1] = EngineDeadError("engine 1 is dead")
        self.noted: list[tuple[int, Any]] = []
        sampling: Any = SimpleNamespace(add=lambda engine, call: self.noted.append((engine, call)))
        self.engine_set.sampling = sampling

    def asked(self, engine: int) -> list[Request]:
        ((requests,),) = self.made[engine].asked
        return list(requests)


@pytest.mark.parametrize("seeded", [True, False])
def test_each_request_has_the_seed_and_the_tenant_of_its_own_prompt_whichever_engine_samples_it(seeded: bool) -> None:
    group = Group()
    poet, clerk = AdapterVersion("poet", 3, 1, 8), AdapterVersion("clerk", 5, 2, 8)
    for adapter in (poet, clerk):
        group.lora.switch(PushedAdapter(adapter, PackedFactors.of({}, "float32"), ""))
    prompts, sampling = [[1], [2], [3], [4], [5]], SamplingConfig(n=2)
    seeds = list(range(10)) if seeded else None
    chosen = ["poet", "poet", "clerk", None, "poet"]
    group.submit(prompts, sampling, seeds=seeds, require_version=7, adapter=chosen)
    found = [*group.asked(0), *group.asked(3)]
    tenants = [poet, poet, clerk, None, poet]
    assert found == [
        Request(prompts[place // 2], sampling, place if seeded else None, tenants[place // 2], 7) for place in range(10)
    ]
    assert len(group.asked(0)) == 4
    assert [engine for engine, _ in group.noted] == [0, 3]
    assert not group.made[1].asked


def test_an_engine_without_a_share_is_not_asked_and_one_tenant_is_that_of_every_prompt() -> None:
    group = Group()
    poet = AdapterVersion("poet", 3, 1, 8)
    group.lora.switch(PushedAdapter(poet, PackedFactors.of({}, "float32"), ""))
    group.submit([[1]], SamplingConfig(n=3), seeds=[4, 5, 6], adapter="poet")
    assert [(each.adapter, each.seed) for each in group.asked(3)] == [(poet, 4), (poet, 5), (poet, 6)]
    assert not group.made[0].asked
    plain = Group()
    plain.submit([[1], [2]], SamplingConfig())
    assert plain.asked(0) == [Request([1], SamplingConfig())] and plain.asked(3) == [Request([2], SamplingConfig())]


def test_what_no_engine_could_answer_is_asked_of_none() -> None:
    group = Group()
    for prompts, sampling, seeds, error, message in (
        ([[1], [9] * 6], SamplingConfig(), None, BatchError, "prompt 1 has 6 tokens; expected 1 to 5"),
        ([[1], [2]], SamplingConfig(n=2), [1, 2, 3], BatchError, "3 seeds for 2 prompts with n=2; expected 4"),
        (
            [[1]],
            SamplingConfig(stop_strings=("x",)),
            None,
            ConfigError,
            "have no tokenizer; set RolloutConfig.load_tokenizer",
        ),
    ):
        with pytest.raises(error, match=message):
            group.submit(prompts, sampling, seeds=seeds)
    assert not group.noted


def test_what_a_lost_engine_was_asked_goes_to_those_that_live_with_its_own_seeds() -> None:
    group = Group()
    sampling, dead = SamplingConfig(n=2), EngineDeadError("engine 3 died")
    pending = group.submit([[1], [2], [3], [4], [5]], sampling, seeds=range(10))
    lost = group.asked(3)
    pending._again(range(2, 5), dead)
    assert pending._error is dead, "where nothing is replaced"
    pending._error, group.engine_set.heals = None, True
    group.engine_set._lost[3] = dead
    pending._again(range(2, 5), dead)
    assert list(group.made[0].asked[1][0]) == lost and len(group.made[3].asked) == 1 and pending._error is None
    assert [engine for engine, _ in group.noted] == [0, 3, 0]
    group.lora.base_changed("")
    pending._again(range(2, 5), dead)
    assert pending._error is dead and len(group.made[0].asked) == 2, "the others are of older weights"
