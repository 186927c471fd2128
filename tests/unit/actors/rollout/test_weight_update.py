"""Staged weights in an engine: mapped, verified, loaded once, and forgotten with their segment alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from actors.rollout.config import RolloutConfig
from actors.rollout.weight_update import WeightReceiver
from actors.wire.segment import Segment, SharedSegment
from rl_backend.contracts import TensorInfo, WeightCheckError, WeightManifest, WeightVersionError
from rl_backend.weights.compare import ExpectedWeights
from rl_backend.weights.staging import plan_layout, write_tensors

INFOS = (TensorInfo.of("a", (2, 3), torch.float32), TensorInfo.of("b", (4,), torch.float32))


class Vllm:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def collective_rpc(self, method: str) -> None:
        self.told.append(method)

    def init_weight_transfer_engine(self, message: dict[str, Any]) -> None:
        self.told.append(message["init_info"]["path"])

    def reset_prefix_cache(self) -> bool:
        self.told.append("reset_prefix_cache")
        return True

    def start_weight_update(self) -> None:
        self.told.append("start")

    def update_weights(self, message: dict[str, Any]) -> None:
        self.told.append(WeightManifest.model_validate_json(message["update_info"]["manifest"]).version)

    def finish_weight_update(self, version: str) -> None:
        self.told.append(f"finish {version}")


@pytest.fixture
def engine() -> WeightReceiver:
    receiver = WeightReceiver(RolloutConfig(model_path="x"), 0, "cpu")
    receiver._llm = Vllm()
    receiver._expected = ExpectedWeights({info.name: info for info in INFOS})
    return receiver


class Source:
    """A segment with weights."""

    def __init__(self) -> None:
        self.layout, nbytes = plan_layout(INFOS)
        self.memory = SharedSegment(nbytes)
        self.segment = Segment(str(self.memory.path), nbytes)

    def write(self, version: int, value: float = 1.0) -> WeightManifest:
        weights = [(info.name, torch.full(info.shape, value)) for info in INFOS]
        return write_tensors(self.memory.buffer, self.layout, weights, version=version)


@pytest.fixture
def sources() -> Iterator[tuple[Source, Source]]:
    made = Source(), Source()
    yield made
    for each in made:
        each.memory.close()


def test_another_pushs_segment_is_forgotten_without_what_was_verified_since(
    engine: WeightReceiver, sources: tuple[Source, Source]
) -> None:
    first, second = sources
    engine.verify(first.write(1), first.segment)
    engine.load(1)
    engine.resume()
    engine.verify(second.write(2), second.segment)
    engine.forget_segment(first.segment.path)
    engine.load(2)
    engine.resume()
    update = ["reset_prefix_cache", "start"]
    told = [first.segment.path, *update, 1, "finish 1", second.segment.path, *update, 2, "finish 2"]
    assert engine._llm.told == told and engine._version == 2
    engine.forget_segment(second.segment.path)
    engine.forget_segment(second.segment.path)
    assert engine._llm.told == [*told, "forget_staged"]


def test_a_segment_that_is_forgotten_takes_along_what_was_verified_in_it(
    engine: WeightReceiver, sources: tuple[Source, Source]
) -> None:
    first, _ = sources
    manifest = first.write(1)
    engine.verify(manifest, first.segment)
    engine.forget_segment(first.segment.path)
    with pytest.raises(WeightCheckError, match="engine 0: weights of version 1 were not verified"):
        engine.load(1)
    engine.verify(manifest, first.segment)  # maps it again
    engine.load(1)
    assert engine._llm.told[:3] == [first.segment.path, "forget_staged", first.segment.path]


def test_what_was_verified_is_loaded_once_and_at_its_version(engine: WeightReceiver, sources: tuple[Source, Source]) -> None:
    first, _ = sources
    engine.verify(first.write(3), first.segment)
    with pytest.raises(WeightCheckError, match="weights of version 2 were not verified"):
        engine.load(2)
    engine.verify(first.write(3), first.segment)
    engine.load(3)
    engine.resume()
    with pytest.raises(WeightCheckError, match="weights of version 3 were not verified"):
        engine.load(3)
    with pytest.raises(WeightVersionError, match="serves weights of version 3 and refuses the older version 2"):
        engine.verify(first.write(2), first.segment)


def test_parts_that_were_checked_already_are_read_once_if_they_are_the_pushs_own(
    engine: WeightReceiver, sources: tuple[Source, Source]
) -> None:
    first, second = sources
    manifest = first.write(1)
    for info in manifest.tensors:
        engine.verify_part("push", WeightManifest(version=1, tensors=(info,)), first.segment)
    assert engine._intact == {info.name: info for info in manifest.tensors}
    # Of another push nothing counts: what it says was checked is read again.
    first.memory.buffer.zero_()
    with pytest.raises(WeightCheckError, match="staged bytes differ from the manifest's digests"):
        engine.verify(manifest, first.segment, "another")
    engine.verify_part("late", WeightManifest(version=1, tensors=manifest.tensors), first.segment)
    assert engine._intact == {}, "what differs is not intact"
    engine.verify(second.write(1), second.segment, "late")
    engine.verify_part("late", WeightManifest(version=1, tensors=manifest.tensors), first.segment)
    engine.load(1)
