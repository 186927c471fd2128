"""Sampling ahead: order, bounds, and where a push comes between two batches."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors import Sample, SamplingConfig
from actors.collect.stream import SampledBatch, SampleStream
from actors.folder.checkpoints import StreamPosition, load_drawn, save_drawn
from actors.rollout.group.calls import PendingSamples
from actors.rollout.messages import Response, Routes, VersionSpan, sample_seeds
from rl_backend.contracts import CheckpointError, EngineDeadError
from rl_backend.data.examples import PromptExample
from rl_backend.data.prompts import Prompt
from tests.support.actors_in_process import until
from tests.support.submitted import Submitted


class Engines:
    """Stands for a rollout group: answers at once, or when it is let, with the version of the last push."""

    def __init__(self) -> None:
        self.version = 0
        self.begun: list[int] = []
        self.seeds: list[Sequence[int]] = []
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.idle = True
        self.error: Exception | None = None

    def submit(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingConfig, *, seeds: Sequence[int], adapter: str | None
    ) -> Submitted:
        return Submitted(len(prompts), partial(self._generate, self.version, prompts, sampling, seeds))

    def _generate(
        self, version: int, prompts: Sequence[Sequence[int]], sampling: SamplingConfig, seeds: Sequence[int]
    ) -> list[Sample]:
        self.idle = False
        self.begun.append(prompts[0][0])
        self.seeds.append(seeds)
        assert self.may_answer.wait(10)
        self.idle = True
        if self.error:
            raise self.error
        spans = (VersionSpan(version, 1),)
        return [
            Sample(prompt, sample, list(prompts[prompt]), [1], [0.0], "stop", spans, 0)
            for prompt in range(len(prompts))
            for sample in range(sampling.n)
        ]


def stream_of(engines: Any, ahead: int, start: StreamPosition | None = None) -> SampleStream:
    taken = start.taken if start else 0
    batches = ([Prompt(PromptExample("p", "a", "made"), [number])] for number in count(1 + taken))
    return SampleStream(engines, batches, SamplingConfig(n=2), seed=5, ahead=ahead, start=start)


def versions_used(ahead: int, steps: int) -> list[int]:
    """Staleness of each step's batch when every step ends with a push."""
    engines = Engines()
    ages = []
    with stream_of(engines, ahead) as stream:
        for step in range(steps):
            batch = stream.next(more=steps - step - 1)
            assert batch.number == step + 1
            assert [sample.prompt_ids for sample in batch.samples] == [[step + 1]] * 2
            ages.append(engines.version - batch.samples[0].version_spans[0].version)
            with stream.between_batches():
                engines.version += 1
    assert len(engines.begun) == steps
    return ages


def test_without_sampling_ahead_every_batch_has_the_weights_of_its_step() -> None:
    assert versions_used(ahead=0, steps=5) == [0] * 5


def test_one_batch_ahead_is_always_exactly_one_step_behind() -> None:
    for _ in range(20):
        assert versions_used(ahead=1, steps=6) == [0, 1, 1, 1, 1, 1]


def test_more_batches_ahead_are_never_further_behind_than_asked() -> None:
    for ahead in (2, 3):
        ages = versions_used(ahead, steps=12)
        assert max(ages) <= ahead
        assert max(ages) > 0


def test_samples_do_not_depend_on_sampling_ahead_but_for_the_weights() -> None:
    seeds = []
    for ahead in (0, 1, 3):
        engines = Engines()
        with stream_of(engines, ahead) as stream:
            for more in (3, 2, 1, 0):
                stream.next(more)
        seeds.append(engines.seeds)
    assert seeds[0] == seeds[1] == seeds[2]


def test_every_batch_has_seeds_of_its_own() -> None:
    engines = Engines()
    with stream_of(engines, ahead=0) as stream:
        for _ in range(3):
            stream.next()
    assert len({seed for seeds in engines.seeds for seed in seeds}) == 6


def numbers_and_versions(stream: SampleStream, engines: Engines, steps: range) -> list[tuple[int, int]]:
    """(number, weight version) of each step's batch, when every step ends with a push of its number."""
    found = []
    for step in steps:
        batch = stream.next(more=10)
        assert [prompt.token_ids for prompt in batch.prompts] == [sample.prompt_ids for sample in batch.samples]
        assert [sample.prompt_ids[0] for sample in batch.samples] == [batch.number] * 2
        found.append((batch.number, batch.samples[0].version_spans[0].version))
        with stream.between_batches():
            engines.version = step
    return found


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_stream_that_goes_on_draws_no_sample_again_and_gives_what_the_other_would_have(ahead: int, tmp_path: Path) -> None:
    engines, killed, resumed = Engines(), Engines(), Engines()
    with stream_of(engines, ahead) as stream:
        whole = numbers_and_versions(stream, engines, range(1, 7))
    with stream_of(killed, ahead) as stream:
        before = numbers_and_versions(stream, killed, range(1, 4))
        position = stream.position
    assert position.taken == 3 and len(position.drawn) == ahead
    save_drawn(position.drawn, tmp_path)
    resumed.version = 3
    with stream_of(resumed, ahead, StreamPosition(position.taken, load_drawn(tmp_path))) as stream:
        assert before + numbers_and_versions(stream, resumed, range(4, 7)) == whole
    assert resumed.begun[0] == 4 + ahead
    assert resumed.seeds[: 3 - ahead] == engines.seeds[3 + ahead : 6]


def test_a_batch_that_is_being_sampled_is_left_to_the_stream_that_goes_on() -> None:
    engines = Engines()
    with stream_of(engines, ahead=2) as stream:
        stream.next(more=0)
        engines.may_answer.clear()
        stream._begin()
        assert (stream.position.taken, stream.position.drawn) == (1, [])
        engines.may_answer.set()
        stream.next(more=0)
        assert stream.position.taken == 2


def test_samples_are_read_back_as_they_were_drawn(tmp_path: Path) -> None:
    spans = (VersionSpan(3, 1), VersionSpan(4, 1))
    experts = np.arange(12, dtype=np.uint16).reshape(3, 2, 2)
    experts.flags.writeable = False
    mask = np.array([[6, 7], [8, -1]], dtype=np.int32)
    mask.flags.writeable = False
    routed = Sample(1, 0, [5, 6], [7, 8], [-0.1, -1e-17], "length", spans, 2, Routes(experts, 4), mask)
    plain = Sample(0, 1, [5], [7], [], "stop", spans, 0)
    save_drawn([[routed], [plain, plain]], tmp_path)
    [found], others = load_drawn(tmp_path)
    assert found == routed and others == [plain, plain]
    assert found.routes is not None and found.routes.weight_version == 4
    np.testing.assert_array_equal(found.routes.experts, experts, strict=True)
    assert found.sampling_mask is not None and others[0].sampling_mask is None
    np.testing.assert_array_equal(found.sampling_mask, mask, strict=True)
    (tmp_path / "drawn_samples.pt").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=r"drawn_samples\.pt cannot be read"):
        load_drawn(tmp_path)


def test_a_push_waits_for_the_batch_that_is_being_sampled_and_holds_back_the_next() -> None:
    engines = Engines()
    with stream_of(engines, ahead=2) as stream:
        stream.next(more=0)
        engines.may_answer.clear()
        stream._begin()
        stream._begin()
        pushed = threading.Event()

        def push() -> None:
            with stream.between_batches():
                engines.version = 7
                pushed.set()

        thread = threading.Thread(target=push)
        thread.start()
        assert not pushed.wait(0.2)
        engines.may_answer.set()
        assert pushed.wait(10)
        thread.join()
        second, third, fourth = stream.next(), stream.next(), stream.next()
        assert second.samples[0].version_spans[0].version == 0
        assert third.samples[0].version_spans[0].version in (0, 7)
        assert fourth.samples[0].version_spans[0].version == 7


def test_a_push_waits_for_whichever_batch_is_being_sampled() -> None:
    engines = Engines()
    with stream_of(engines, ahead=2) as stream:
        stream.next()
        until(lambda: len(engines.begun) >= 3 and engines.idle)
        engines.may_answer.clear()
        stream.next()  # begins the fourth, while the third is ready for the next step
        until(lambda: len(engines.begun) >= 4)
        pushed = threading.Event()

        def push() -> None:
            with stream.between_batches():
                pushed.set()

        thread = threading.Thread(target=push)
        thread.start()
        assert not pushed.wait(0.2)
        engines.may_answer.set()
        assert pushed.wait(10)
        thread.join()


class Controlled:
    """Prompts are answered when they are told to be, each token with the version of the moment in which it was asked for."""

    def __init__(self) -> None:
        self.version = 0
        self.asked: dict[int, list[tuple[Future[Response], int, int]]] = {}

    def submit(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingConfig, *, seeds: Sequence[int], adapter: str | None
    ) -> PendingSamples:
        answers = [[Future[Response]() for _ in range(sampling.n)] for _ in prompts]
        for place, (prompt, futures) in enumerate(zip(prompts, answers, strict=True)):
            of_prompt = seeds[place * sampling.n :]
            self.asked[prompt[0]] = [(future, seed, self.version) for future, seed in zip(futures, of_prompt, strict=False)]
        return PendingSamples(prompts, answers)

    def answer(self, *prompts: int) -> None:
        for prompt in prompts:
            until(lambda: prompt in self.asked)  # noqa: B023 called at once
            for future, seed, version in self.asked[prompt]:
                future.set_result(Response([seed % 97], [0.0], "stop", (VersionSpan(version, 1),)))

    def has(self, *prompts: int) -> None:
        """Waits until these have been asked for, in this order, and no others."""
        until(lambda: list(self.asked) == list(prompts))


@pytest.mark.shows(
    "rollout: with several batches ahead prompts of the next begin as those before end; a push waits for these"
)
def test_engines_have_no_pause_between_batches_ahead_and_a_push_waits_for_prompts_alone() -> None:
    engines, pushed = Controlled(), threading.Event()
    batches = [
        [Prompt(PromptExample("p", "a", "made"), [number]) for number in range(start, start + 3)] for start in (1, 4, 7)
    ]
    rollout: Any = engines
    with (
        SampleStream(rollout, iter(batches), SamplingConfig(n=2), seed=5, ahead=2) as stream,
        ThreadPoolExecutor(1) as threads,
    ):
        first = threads.submit(stream.next, 2)
        engines.has(1, 2, 3)
        engines.answer(2)
        engines.has(1, 2, 3, 4)
        engines.answer(1, 3)
        engines.has(1, 2, 3, 4, 5, 6)
        assert first.result(10).number == 1
        engines.answer(5)
        engines.has(1, 2, 3, 4, 5, 6, 7)

        def push() -> None:
            with stream.between_batches():
                engines.version = 1
                pushed.set()

        pushing = threads.submit(push)
        engines.answer(4)
        engines.has(1, 2, 3, 4, 5, 6, 7, 8)
        assert not pushed.wait(0.05), "the next step's batch is not complete"
        engines.answer(7, 8)
        engines.has(1, 2, 3, 4, 5, 6, 7, 8, 9)
        engines.answer(6)
        assert not pushed.wait(0.05), "a prompt has begun"
        engines.answer(9)
        pushing.result(10)
        batches_left = [stream.next(more=0) for _ in range(2)]
    for batch in (first.result(), *batches_left):
        seeds = sample_seeds(5, batch.number, 3, 2)
        assert [sample.prompt_ids[0] for sample in batch.samples] == [prompt.token_ids[0] for prompt in batch.prompts]
        assert [prompt.token_ids[0] for prompt in batch.prompts] == [3 * batch.number - 2 + place // 2 for place in range(6)]
        assert [sample.response_ids for sample in batch.samples] == [[seed % 97] for seed in seeds]
        assert [(sample.prompt_index, sample.sample_index) for sample in batch.samples] == [divmod(n, 2) for n in range(6)]


def test_a_batch_says_how_long_it_was_sampled_and_not_how_long_it_waited() -> None:
    engines = Engines()
    engines.may_answer.clear()
    with stream_of(engines, ahead=1) as stream:
        stream._begin()
        threading.Timer(0.1, engines.may_answer.set).start()
        first, second = stream.next(), stream.next(more=0)
    assert first.seconds > 0.05 and 0 < second.seconds < 0.05
    drawn = StreamPosition(0, [first.samples])
    with stream_of(engines, ahead=1, start=drawn) as stream:
        assert stream.next(more=0).seconds == 0


def test_an_engine_that_dies_is_reported_by_the_step_that_needs_the_batch() -> None:
    engines = Engines()
    with stream_of(engines, ahead=1) as stream:
        engines.error = EngineDeadError("engine 0 is dead")
        with pytest.raises(EngineDeadError, match="engine 0 is dead"):
            stream.next()


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_batch_whose_sampling_fails_is_sampled_again_and_none_is_passed_over(ahead: int) -> None:
    engines = Engines()
    found: list[SampledBatch] = []
    with stream_of(engines, ahead) as stream:
        engines.error = EngineDeadError("engine 0 is dead")
        for _ in range(2):
            with pytest.raises(EngineDeadError):
                stream.next()
            assert stream.position == StreamPosition(0, [])
            with stream.between_batches():
                pass
        engines.error = None
        while len(found) < 5:
            # What was begun ahead in the meantime has failed as well.
            with suppress(EngineDeadError):
                found.append(stream.next())
    assert [batch.number for batch in found] == [1, 2, 3, 4, 5]
    assert [batch.samples[0].prompt_ids for batch in found] == [[1], [2], [3], [4], [5]]
    seeds = {(number, tuple(of_batch)) for number, of_batch in zip(engines.begun, engines.seeds, strict=True)}
    assert len(seeds) == len(set(engines.begun)) and engines.begun.count(1) == 3


def test_an_error_in_the_loop_does_not_wait_for_samples() -> None:
    engines = Engines()

    def loop() -> None:
        with stream_of(engines, ahead=1) as stream:
            first = stream.next(more=0)
            assert first.number == 1
            engines.may_answer.clear()
            stream._begin()
            raise ZeroDivisionError

    started = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        loop()
    assert time.monotonic() - started < 5
    engines.may_answer.set()
