"""Streams whose batches have several prompts, and their edges: seeds, tenants, positions, errors between two batches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from actors.collect.stream import DrawnBatch, SampledBatch, SampleStream
from actors.folder.checkpoints import StreamPosition, load_drawn, save_drawn
from actors.rollout.config import SamplingConfig
from actors.rollout.messages import Sample, VersionSpan, sample_seed
from rl_backend.contracts import CheckpointError, RunFolderError
from rl_backend.data.examples import PromptExample
from rl_backend.data.prompts import Prompt
from tests.support.submitted import Submitted

BATCHES = [
    [Prompt(PromptExample(f"{batch} {place}", "", "made"), [10 * batch + place]) for place in range(2 + batch % 2)]
    for batch in range(1, 6)
]
"""Of 3, 2, 3, 2 and 3 prompts."""


class Engines:
    """Answers at once; a sample's response is its seed's last digits."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def submit(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingConfig, *, seeds: Sequence[int], adapter: str | None
    ) -> Submitted:
        self.asked.append((prompts, sampling, list(seeds), adapter))
        spans = (VersionSpan(0, 1),)
        samples = [
            Sample(prompt, n, list(prompts[prompt]), [seeds[prompt * sampling.n + n] % 97], [0.0], "stop", spans, 0)
            for prompt in range(len(prompts))
            for n in range(sampling.n)
        ]
        return Submitted(len(prompts), lambda: samples)


def stream_of(engines: Engines, **options: Any) -> SampleStream:
    given: dict[str, Any] = {"seed": 5, "ahead": 0, **options}
    left = iter(BATCHES[given["start"].taken if "start" in given else 0 :])
    return SampleStream(engines, left, SamplingConfig(n=2), **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("adapter", [None, "poet"])
def test_every_sample_has_its_own_prompt_and_seed(adapter: str | None) -> None:
    engines, told = Engines(), list[SampledBatch]()
    with stream_of(engines, adapter=adapter, on_sampled=told.append) as stream:
        batches = [stream.next() for _ in range(3)]
    assert [batch.number for batch in batches] == [1, 2, 3] and all(
        one is other for one, other in zip(told, batches, strict=True)
    )
    for batch, prompts, asked in zip(batches, BATCHES, engines.asked, strict=False):
        assert batch.prompts == [prompt for prompt in prompts for _ in range(2)]
        assert [sample.prompt_ids for sample in batch.samples] == [prompt.token_ids for prompt in batch.prompts]
        seeds = [sample_seed(5, batch.number, prompt, n) for prompt in range(len(prompts)) for n in range(2)]
        assert asked == ([prompt.token_ids for prompt in prompts], SamplingConfig(n=2), seeds, adapter)
        assert [sample.response_ids for sample in batch.samples] == [[seed % 97] for seed in seeds]


def test_a_stream_goes_on_where_an_earlier_one_was_with_what_that_had_drawn() -> None:
    engines, before = Engines(), Engines()
    with stream_of(before, ahead=2) as stream:
        first = stream.next()
        for begun in stream._waiting:
            begun.samples.result(10)
        position = stream.position
    assert position.taken == 1 and [len(samples) for samples in position.drawn] == [4, 6]
    told: list[SampledBatch] = []
    with stream_of(engines, start=position, on_sampled=told.append) as stream:
        assert stream.position == position
        batches = [stream.next() for _ in range(4)]
        assert stream.position == StreamPosition(5, [])
        with pytest.raises(StopIteration):
            stream.next()
    assert [batch.number for batch in batches] == [2, 3, 4, 5] and first.number == 1
    assert [batch.number for batch in told] == [4, 5], "only what was sampled here"
    assert [asked[0][0][0] for asked in engines.asked] == [40, 50]
    for batch in batches:
        assert batch.prompts == [prompt for prompt in BATCHES[batch.number - 1] for _ in range(2)]


def test_no_more_is_begun_than_is_wanted_or_may_be_ahead() -> None:
    for ahead, more, begun in ((2, None, 3), (2, 1, 2), (2, 9, 3), (0, 9, 1), (3, 0, 1)):
        engines = Engines()
        with stream_of(engines, ahead=ahead) as stream:
            stream.next(more)
            for batch in stream._waiting:
                batch.samples.result(10)
        assert len(engines.asked) == begun, (ahead, more)


def test_sampling_goes_on_after_an_error_between_two_batches() -> None:
    engines = Engines()
    with stream_of(engines, ahead=1) as stream:
        stream.next()

        def push() -> None:
            with stream.between_batches():
                assert not stream._may_begin.is_set()
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            push()
        assert [stream.next().number for _ in range(3)] == [2, 3, 4]


def test_a_batch_that_cannot_be_told_of_is_no_batch() -> None:
    errors = [ValueError("full"), None, None]

    def told(batch: DrawnBatch[Any, Any]) -> None:
        if error := errors.pop(0):
            raise error

    engines = Engines()
    with stream_of(engines, on_sampled=told) as stream:
        with pytest.raises(ValueError, match="full"):
            stream.next()
        assert stream.position == StreamPosition(0, [])
        assert [stream.next().number for _ in range(2)] == [1, 2]
    assert engines.asked[0] == engines.asked[1]


def test_samples_that_cannot_be_written_or_read_are_told_with_their_file(tmp_path: Path) -> None:
    missing = tmp_path / "none"
    with pytest.raises(RunFolderError, match=rf"{missing}/drawn_samples\.pt cannot be written: .*No such file") as unwritten:
        save_drawn([], missing)
    assert unwritten.value.details["path"] == f"{missing}/drawn_samples.pt"
    with pytest.raises(CheckpointError, match=rf"{missing}/drawn_samples\.pt cannot be read: ") as unread:
        load_drawn(missing)
    assert unread.value.details == {"path": f"{missing}/drawn_samples.pt"}
    save_drawn([[], []], tmp_path)
    assert load_drawn(tmp_path) == [[], []]
