"""A call that samples: what no engine could answer is refused, and the rest becomes requests."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from actors.rollout.config import RolloutConfig, SamplingConfig
from actors.rollout.group.adapters import GroupAdapters
from actors.rollout.group.calls import PendingSamples
from actors.rollout.group.engines import EngineSet
from actors.rollout.group.group import RolloutGroup
from actors.rollout.messages import AdapterVersion, PushedAdapter, Request, Response, VersionSpan, prompt_problem
from actors.wire.factors import PackedFactors
from rl_backend.contracts import BatchError, ConfigError

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


class Turns:
    """Keeps what is asked, and answers each request with its prompt and seed."""

    def __init__(self) -> None:
        self.asked: list[list[Request]] = []

    def ask(self, groups: Sequence[Sequence[Request]]) -> list[list[Future[Response]]]:
        self.asked += map(list, groups)
        return [[self._answer(request) for request in group] for group in groups]

    def _answer(self, request: Request) -> Future[Response]:
        future: Future[Response] = Future()
        tokens = [*request.prompt_ids, request.seed or 0]
        future.set_result(Response(tokens, [], "length", (VersionSpan(3, len(tokens)),), engine=2))
        return future


class Group(RolloutGroup):
    """No engines, and tenants that were pushed."""

    def __init__(self, *tenants: AdapterVersion) -> None:
        self.config = RolloutConfig(model_path="x", num_engines=4, max_adapters=2)
        self.engine_set = EngineSet(self.config)
        self.lora = GroupAdapters(self.engine_set)
        info: Any = SimpleNamespace(max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB_SIZE)
        self.engine_set.add({}, {0: info})
        self.turns = Turns()  # type: ignore[assignment]
        for adapter in tenants:
            self.lora.switch(PushedAdapter(adapter, PackedFactors.of({}, "float32"), ""))

    @property
    def asked(self) -> list[list[Request]]:
        turns: Any = self.turns
        return list(turns.asked)


POET, CLERK = AdapterVersion("poet", 3, 1, 8), AdapterVersion("clerk", 5, 2, 8)


@pytest.mark.parametrize("seeded", [True, False])
def test_each_request_has_the_seed_and_the_tenant_of_its_prompt_and_those_of_a_tenant_come_together(seeded: bool) -> None:
    group = Group(POET, CLERK)
    prompts, sampling = [[1], [2], [3], [4], [5]], SamplingConfig(n=2)
    seeds = list(range(10)) if seeded else None
    tenants = [POET, CLERK, POET, None, CLERK]
    names = [None if tenant is None else tenant.tenant for tenant in tenants]
    samples = group.submit(prompts, sampling, seeds=seeds, require_version=7, adapter=names).result()
    assert group.asked == [
        [
            Request(prompts[place], sampling, 2 * place + n if seeded else None, tenants[place], 7, waits=False)
            for n in range(2)
        ]
        for place in (0, 2, 1, 4, 3)
    ]
    expected = [[*prompts[number // 2], number if seeded else 0] for number in range(10)]
    assert [sample.response_ids for sample in samples] == expected
    assert [sample.prompt_ids for sample in samples] == [prompts[number // 2] for number in range(10)]
    assert {sample.engine for sample in samples} == {2}


def test_one_tenant_is_that_of_every_prompt() -> None:
    group = Group(POET)
    group.submit([[1], [2]], SamplingConfig(n=3), seeds=range(6), adapter="poet")
    assert [[(each.adapter, each.seed) for each in requests] for requests in group.asked] == [
        [(POET, 0), (POET, 1), (POET, 2)],
        [(POET, 3), (POET, 4), (POET, 5)],
    ]
    plain = Group()
    plain.submit([[1], [2]], SamplingConfig())
    assert plain.asked == [[Request([prompt], SamplingConfig(), waits=False)] for prompt in (1, 2)]


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
    group.config = group.config.replace(engine_args={"return_sampling_mask": True})
    with pytest.raises(ConfigError, match=r"SamplingConfig\.top_k=0: .* vLLM takes no request without it"):
        group.submit([[1]], SamplingConfig(top_p=0.5))
    assert not group.asked
    group.submit([[1]], SamplingConfig(top_k=5))
    assert len(group.asked) == 1


@pytest.mark.parametrize("interrupted", [False, True])
def test_what_nobody_waits_for_any_more_is_given_up(interrupted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    group, answers = Group(), [[Future[Response](), Future[Response]()]]
    answers[0][0].set_result(Response([1], [], "length", (VersionSpan(3, 1),)))
    monkeypatch.setattr(group.turns, "ask", lambda groups: answers)
    if interrupted:
        monkeypatch.setattr(PendingSamples, "result", raise_interrupt)
    with pytest.raises(KeyboardInterrupt if interrupted else TimeoutError):
        group.generate([[1]], SamplingConfig(n=2), timeout=0.01)
    assert [each.cancelled() for each in answers[0]] == [False, True]


def raise_interrupt(pending: PendingSamples, timeout: float | None) -> None:
    raise KeyboardInterrupt


def test_a_prompt_that_the_caller_changes_afterwards_is_asked_as_it_was() -> None:
    group, prompt = Group(), [1]
    pending = group.submit([prompt], SamplingConfig())
    prompt.append(2)
    assert [request.prompt_ids for (request,) in group.asked] == [each.prompt_ids for each in pending.result()] == [[1]]
