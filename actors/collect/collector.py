"""The collector: the batch of each training step, of samples that may be some steps behind."""

import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, Self

from actors.collect.held_out import HeldOutResult
from actors.collect.stream import BatchStream, DrawnBatch
from actors.options.sampled_config import SampledConfig
from actors.watch.metrics import Clock
from rl_backend.contracts import WeightVersionError

type Staleness = Callable[[Iterable[Iterable[int]]], dict[str, float]]
"""Metrics of the samples that a step trains on, by the weight versions of each; none where nothing is sampled ahead."""


class CollectedBatch(Protocol):
    @property
    def metrics(self) -> dict[str, float]: ...

    @property
    def failures(self) -> Sequence[str]: ...


class Draft[S, B: CollectedBatch](Protocol):
    def add(self, batch: DrawnBatch[Any, S], clock: Clock) -> bool:
        """Takes a batch of the stream; whether the step has all that it gets."""

    def finish(self, rate: dict[str, float], staleness: Staleness) -> B:
        """What the step trains on; ``rate`` has ``tokens_per_second/sample``, where engines were sampling."""


class Source[S, B: CollectedBatch](ABC):
    """Samples of a run: answers to prompts, or episodes. Use as a context manager, which ends the stream."""

    stream: BatchStream[Any, S]

    @abstractmethod
    def versions(self, batch: DrawnBatch[Any, S]) -> list[set[int]]:
        """Weight versions of each of the batch's samples."""

    @abstractmethod
    def count_tokens(self, batch: DrawnBatch[Any, S]) -> int:
        """Tokens that engines have sampled for a batch."""

    @abstractmethod
    def discard(self, batch: DrawnBatch[Any, S]) -> None: ...

    @abstractmethod
    def draft(self, step: int) -> Draft[S, B]: ...

    @abstractmethod
    def sampled_ids(self, batch: B) -> Iterable[Sequence[int]]: ...

    @abstractmethod
    def describe(self, batch: B) -> list[dict[str, Any]]:
        """Lines of ``samples.jsonl``."""

    @abstractmethod
    def failed(self, number: int) -> str:
        """So many of what a batch's ``failures`` are of, in words."""

    @abstractmethod
    def answer_held_out(self) -> list[HeldOutResult]:
        """Results of all held-out sets. Seeds are the same at every step, so that weights alone differ."""

    def __enter__(self) -> Self:
        self.stream.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.stream.__exit__(kind, error, traceback)


class WeightVersions:
    """Which training step made which weights, and how many steps samples are behind."""

    def __init__(self, ahead: int, earlier: Mapping[str, Any] | None = None) -> None:
        self._ahead = ahead
        self._step_of_version: dict[int, int] = dict((earlier or {}).get("step_of_version", []))

    @property
    def state(self) -> dict[str, Any]:
        # Pushes as far back as samples may be: a checkpoint must not grow with the run.
        oldest = max(self._step_of_version.values()) - self._ahead
        pushes = [[version, step] for version, step in self._step_of_version.items() if step >= oldest]
        return {"step_of_version": pushes}

    def pushed(self, version: int, step: int) -> None:
        """Engines sample with the weights that ``step`` made from now on; step 0 is the start."""
        self._step_of_version[version] = step

    def age(self, versions: Iterable[int], step: int) -> int:
        """Training steps between the oldest of a sample's weights and those that ``step`` begins with."""
        return step - 1 - min(self._step_of_version[version] for version in versions)

    def oldest(self, samples: Iterable[Iterable[int]], step: int) -> int:
        """Age of the oldest sample of a batch.

        Raises:
            WeightVersionError: sampling ahead does not explain that age.
        """
        age = max((self.age(versions, step) for versions in samples), default=0)
        if age > self._ahead:
            raise WeightVersionError(
                f"step {step}: a sample's weights are {age} steps old; sampling {self._ahead} batches ahead "
                "explains fewer: an engine missed a push",
                age=age,
            )
        return age


class Collector[B: CollectedBatch]:
    """Takes batches from a source until a step has enough to train on."""

    def __init__(self, config: SampledConfig, source: Source[Any, B], *, earlier: Mapping[str, Any] | None = None) -> None:
        self._config = config
        self._source = source
        self.versions = WeightVersions(config.batches_ahead, earlier)

    def collect(self, step: int, clock: Clock) -> B:
        """The batch of ``step``, counted from 1; the phase ``sample`` of the clock, and those of the source.

        Adds to the source's metrics ``tokens_per_second/sample``; when sampling ahead ``staleness_mean``, ``staleness_max``
        (training steps by which weights of the samples are behind) and ``samples_dropped`` for being too old.
        """
        config, source = self._config, self._source
        draft = source.draft(step)
        dropped = tokens = 0
        seconds = 0.0
        while True:
            batch = source.stream.next(more=config.steps - step)
            clock.lap("sample")
            if batch.seconds:
                seconds += batch.seconds
                tokens += source.count_tokens(batch)
            versions = source.versions(batch)
            age = self.versions.oldest(filter(None, versions), step)
            if age > config.max_staleness and config.stale_samples == "drop":
                dropped += len(versions)
                source.discard(batch)
            elif draft.add(batch, clock):
                break

        def staleness(samples: Iterable[Iterable[int]]) -> dict[str, float]:
            if not config.batches_ahead:
                return {}
            ages = [self.versions.age(each, step) for each in samples]
            return {"staleness_mean": statistics.fmean(ages), "staleness_max": max(ages), "samples_dropped": dropped}

        return draft.finish({"tokens_per_second/sample": tokens / seconds} if seconds else {}, staleness)
