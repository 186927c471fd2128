"""Sampled batches in order, made while earlier ones are trained on when that is allowed."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Self

from actors.folder.checkpoints import StreamPosition
from actors.rollout.config import SamplingConfig
from actors.rollout.group.group import RolloutGroup
from actors.rollout.messages import Sample, sample_seeds
from rl_backend.data.prompts import Prompt


@dataclass(frozen=True)
class DrawnBatch[P, S]:
    """Samples, prompt by prompt; ``prompts`` has one entry for each sample. The first ``number`` is 1."""

    number: int
    prompts: list[P]
    samples: list[S]
    seconds: float = 0.0


SampledBatch = DrawnBatch[Prompt, Sample]


@dataclass(frozen=True, eq=False)
class _Begun[P, S]:
    number: int
    prompts: list[P]
    samples: Future[DrawnBatch[P, S]]


class BatchStream[P, S](ABC):
    """Samples one batch of prompts after the other. A kind of stream says how, in :meth:`_draw`.

    Args:
        ahead: batches begun before :meth:`next` asks for them. At 0 a batch is begun by :meth:`next`, with the weights of
            that moment.
        on_sampled: called with each batch as soon as it is sampled, in the thread that samples.
        start: the :attr:`position` that an earlier stream was at. Prompts up to there are passed over.
    """

    def __init__(
        self,
        batches: Iterator[list[P]],
        *,
        ahead: int,
        start: StreamPosition | None = None,
        on_sampled: Callable[[DrawnBatch[P, S]], None] = lambda _: None,
    ) -> None:
        self._batches = batches
        self._ahead = ahead
        self._on_sampled = on_sampled
        self._taken = self._begun = 0
        # One at a time: what the next step waits for does not share the engines with batches after it.
        self._one_at_a_time = ThreadPoolExecutor(1, thread_name_prefix="sample-stream")
        self._waiting: deque[_Begun[P, S]] = deque()
        self._raised: _Begun[P, S] | None = None
        self._may_begin = threading.Event()
        self._may_begin.set()
        self._sampling_now = threading.Lock()
        if start is not None:
            self._go_to(start)

    def next(self, more: int | None = None) -> DrawnBatch[P, S]:
        """The next batch; waits for it, and raises what sampling raises. The next call then samples the same batch again.

        Args:
            more: batches that will certainly be asked for after this one, where that is less than ``ahead``.
        """
        if not self._waiting:
            self._begin()
        elif self._waiting[0] is self._raised:
            self._waiting[0] = self._submit(self._raised.number, self._raised.prompts)
        ahead = self._ahead if more is None else min(self._ahead, more)
        while len(self._waiting) <= ahead:
            self._begin()
        batch = self._waiting[0]
        try:
            sampled = batch.samples.result()
        except Exception:
            self._raised = batch
            raise
        self._waiting.popleft()
        self._taken = sampled.number
        return sampled

    @property
    def position(self) -> StreamPosition:
        """For a stream that continues from here."""
        return StreamPosition(self._taken)

    @contextmanager
    def between_batches(self) -> Iterator[None]:
        """Waits for the batch that :meth:`next` will return, if it is begun, and samples nothing inside."""
        if self._waiting:
            # The next batch is then of the weights before: with ``ahead=1`` it is certain which weights a batch is of.
            wait([self._waiting[0].samples])
        try:
            self._may_begin.clear()
            with self._sampling_now:
                yield
        finally:
            self._may_begin.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._may_begin.set()
        # After an error nobody waits for samples that may take long: the engines are closed next.
        self._one_at_a_time.shutdown(wait=error is None, cancel_futures=True)
        self._waiting.clear()

    def _go_to(self, position: StreamPosition) -> None:
        for _ in range(position.taken):
            next(self._batches)
        self._taken = self._begun = position.taken

    def _begin(self) -> None:
        self._begun += 1
        self._waiting.append(self._submit(self._begun, next(self._batches)))

    def _submit(self, number: int, prompts: list[P]) -> _Begun[P, S]:
        return _Begun(number, prompts, self._one_at_a_time.submit(self._sample, number, prompts))

    def _sample(self, number: int, prompts: list[P]) -> DrawnBatch[P, S]:
        self._may_begin.wait()
        with self._sampling_now:
            started = time.perf_counter()
            batch = self._draw(number, prompts)
            batch = replace(batch, seconds=time.perf_counter() - started)
        self._on_sampled(batch)
        return batch

    @abstractmethod
    def _draw(self, number: int, prompts: list[P]) -> DrawnBatch[P, S]: ...


class SampleStream(BatchStream[Prompt, Sample]):
    """Responses of engines to prompts. Seed and number of a batch fix every sample, apart from the weights."""

    def __init__(
        self,
        rollout: RolloutGroup,
        batches: Iterator[list[Prompt]],
        sampling: SamplingConfig,
        *,
        seed: int,
        ahead: int,
        adapter: str | None = None,
        start: StreamPosition | None = None,
        on_sampled: Callable[[SampledBatch], None] = lambda _: None,
    ) -> None:
        self._rollout = rollout
        self._sampling = sampling
        self._seed = seed
        self._adapter = adapter
        super().__init__(batches, ahead=ahead, start=start, on_sampled=on_sampled)

    def _draw(self, number: int, prompts: list[Prompt]) -> SampledBatch:
        samples = self._rollout.generate(
            [prompt.token_ids for prompt in prompts],
            self._sampling,
            seeds=sample_seeds(self._seed, number, len(prompts), self._sampling.n),
            adapter=self._adapter,
        )
        return _answered(number, prompts, samples)

    @property
    def position(self) -> StreamPosition:
        """With the batches that are complete; what is being sampled now is sampled again."""
        drawn: list[list[Sample]] = []
        for batch in self._waiting:
            if not batch.samples.done() or batch.samples.exception() is not None:
                break
            drawn.append(batch.samples.result().samples)
        return StreamPosition(self._taken, drawn)

    def _go_to(self, position: StreamPosition) -> None:
        super()._go_to(position)
        # Drawn again, they would be of newer weights than those of the run that was interrupted.
        for samples in position.drawn:
            self._begun += 1
            batch: Future[SampledBatch] = Future()
            prompts = next(self._batches)
            batch.set_result(_answered(self._begun, prompts, samples))
            self._waiting.append(_Begun(self._begun, prompts, batch))


def _answered(number: int, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> SampledBatch:
    return SampledBatch(number, [prompts[sample.prompt_index] for sample in samples], list(samples))
