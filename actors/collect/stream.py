"""Sampled batches in order, made while earlier ones are trained on when that is allowed."""

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
from actors.rollout.group.calls import PendingSamples
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
class Begun[P, S]:
    number: int
    prompts: list[P]
    samples: Future[DrawnBatch[P, S]]


class BatchStream[P, S](ABC):
    """Batches of samples, in order. A kind of stream says how they are sampled, in :meth:`_submit`.

    Args:
        batches: those after ``start``.
        ahead: batches begun before :meth:`next` asks for them. At 0 a batch is begun by :meth:`next`, with the weights of
            that moment.
        start: the :attr:`position` that an earlier stream was at.
    """

    def __init__(
        self,
        batches: Iterator[list[P]],
        *,
        ahead: int,
        start: StreamPosition | None = None,
    ) -> None:
        self._batches = batches
        self._ahead = ahead
        self._taken = self._begun = 0
        self._one_at_a_time = ThreadPoolExecutor(1, thread_name_prefix="sample-stream")
        self._waiting: deque[Begun[P, S]] = deque()
        self._raised: Begun[P, S] | None = None
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
        self._taken = self._begun = position.taken

    def _begin(self) -> None:
        self._begun += 1
        self._waiting.append(self._submit(self._begun, next(self._batches)))

    @abstractmethod
    def _submit(self, number: int, prompts: list[P]) -> Begun[P, S]:
        """Begins a batch after those before it, and nothing while :meth:`between_batches` is open."""


class SampleStream(BatchStream[Prompt, Sample]):
    """Responses of engines to prompts. Seed and number of a batch fix every sample, apart from the weights.

    With more than one batch ahead engines have no pause between batches: prompts of the next begin as those before end, as
    many at one time as a batch has, and a push waits for those that have begun. With one ahead a batch is sampled at once
    and alone, so a run that is repeated has the same log-probs to the last bit.

    Args:
        on_sampled: called with each batch as soon as it is sampled, in a thread of the stream.
    """

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
        self._on_sampled = on_sampled
        self._answers = ThreadPoolExecutor(1, thread_name_prefix="sampled-batches")
        self._changed = threading.Condition()
        self._in_flight, self._ended = 0, 0.0
        super().__init__(batches, ahead=ahead, start=start)

    @contextmanager
    def between_batches(self) -> Iterator[None]:
        with super().between_batches():
            with self._changed:
                self._changed.wait_for(lambda: not self._in_flight)
            yield

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        super().__exit__(kind, error, traceback)
        self._answers.shutdown(wait=error is None, cancel_futures=True)

    def _submit(self, number: int, prompts: list[Prompt]) -> Begun[Prompt, Sample]:
        asked = self._one_at_a_time.submit(self._ask, number, prompts)
        return Begun(number, prompts, self._answers.submit(self._draw, number, prompts, asked))

    def _ask(self, number: int, prompts: list[Prompt]) -> tuple[float, list[PendingSamples]]:
        seeds, n = sample_seeds(self._seed, number, len(prompts), self._sampling.n), self._sampling.n
        began, asked, pending = 0.0, 0, list[PendingSamples]()
        others = len(prompts) - 1 if self._ahead > 1 else 0
        while asked < len(prompts):
            with self._changed:
                self._changed.wait_for(lambda: self._in_flight <= others)
                part = slice(asked, min(asked + len(prompts) - self._in_flight, len(prompts)))
            self._may_begin.wait()
            with self._sampling_now:
                began = began or time.perf_counter()
                ids = [prompt.token_ids for prompt in prompts[part]]
                of_part = seeds[part.start * n : part.stop * n]
                samples = self._rollout.submit(ids, self._sampling, seeds=of_part, adapter=self._adapter)
                with self._changed:
                    self._in_flight += len(ids)
            samples.when_answered(self._count_answered)
            pending.append(samples)
            asked = part.stop
        return began, pending

    def _count_answered(self) -> None:
        with self._changed:
            self._in_flight -= 1
            self._changed.notify_all()

    def _draw(self, number: int, prompts: list[Prompt], asked: Future[tuple[float, list[PendingSamples]]]) -> SampledBatch:
        began, pending = asked.result()
        parts, samples = [part.result() for part in pending], list[Sample]()
        for part in parts:
            first = len(samples) // self._sampling.n
            samples += [replace(sample, prompt_index=first + sample.prompt_index) for sample in part]
        # Time in which a batch before it was sampled as well counts once.
        began, self._ended = max(began, self._ended), time.perf_counter()
        batch = replace(_answered(number, prompts, samples), seconds=self._ended - began)
        self._on_sampled(batch)
        return batch

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
            self._waiting.append(Begun(self._begun, prompts, batch))


def _answered(number: int, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> SampledBatch:
    return SampledBatch(number, [prompts[sample.prompt_index] for sample in samples], list(samples))
