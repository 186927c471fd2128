"""Staged weights in an engine: mapped, verified, loaded once, and forgotten with their segment alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.rollout.config import RolloutConfig
from actors.rollout.engine import weights
from actors.rollout.engine.in_process import VllmInProcess
from actors.rollout.engine.weights import WeightReceiver
from actors.wire.segment import Segment, SharedSegment
from rl_backend.contracts import (
    RolloutError,
    TensorInfo,
    TensorPart,
    TensorTile,
    WeightCheckError,
    WeightManifest,
    WeightSyncError,
    WeightVersionError,
)
from rl_backend.weights.staging import ExpectedWeights, plan_layout, read_tensor, write_tensors
from tests.support.answering import serve

INFOS = (TensorInfo.of("a", (2, 3), torch.float32), TensorInfo.of("b", (4,), torch.float32))


class Vllm:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def collective_rpc(self, method: str, args: tuple[()]) -> None:
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
    vllm = VllmInProcess(RolloutConfig(model_path="x"), 0, "cpu")
    vllm.llm, vllm.expected = Vllm(), ExpectedWeights({info.name: info for info in INFOS})
    return WeightReceiver(vllm, lambda: None)


class Source:
    """A segment with weights."""

    def __init__(self) -> None:
        self.layout, nbytes = plan_layout(INFOS)
        self.memory = SharedSegment(nbytes)
        self.segment = Segment(str(self.memory.path), nbytes)

    def write(self, version: int, value: float = 1.0) -> WeightManifest:
        weights = [(info.name, torch.full(info.shape, value)) for info in INFOS]
        return WeightManifest(version=version, tensors=write_tensors(self.memory.buffer, self.layout, weights))


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
    assert engine._vllm.llm.told == told and engine._vllm.serving.version == 2
    engine.forget_segment(second.segment.path)
    engine.forget_segment(second.segment.path)
    assert engine._vllm.llm.told == [*told, "forget_staged"]


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
    assert engine._vllm.llm.told[:3] == [first.segment.path, "forget_staged", first.segment.path]


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


def test_an_engines_own_segment_is_kept_while_it_is_large_enough(engine: WeightReceiver) -> None:
    first = engine.make_segment(100)
    assert engine.make_segment(100) == engine.make_segment(60) == first and first.nbytes == 100
    engine._map(first)
    second = engine.make_segment(101)
    assert second.path != first.path and second.nbytes == 101
    assert not Path(first.path).exists() and engine._vllm.llm.told[-1] == "forget_staged"
    engine.leave_gloo("nobody's")
    assert not Path(second.path).exists()


def test_an_engine_receives_into_its_own_segment_in_the_group_of_one_sync(
    engine: WeightReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Any] = []

    class Group:
        def __init__(self, address: Any, rank: int) -> None:
            self.name = f"{address} {rank}"

        def close(self) -> None:
            done.append(f"close {self.name}")

        def broadcast(self, tensor: Any) -> None:
            if self.name == "b 2":
                raise RuntimeError("the sender left")
            done.append((self.name, tensor.nbytes))

    monkeypatch.setattr(weights, "GlooGroup", Group)
    layout = WeightManifest(version=1, tensors=plan_layout(INFOS)[0])
    joined: Any = lambda key, name, position: engine.join_gloo(key, {0: name}, position)  # noqa: E731
    joined("a", "a", 1)
    engine.make_segment(256)
    engine._verified = layout
    engine.receive("a", layout)
    assert done == [("a 1", info.nbytes) for info in layout.tensors] and engine._verified is None
    done.clear()
    joined("b", "b", 2)
    joined("a", "a", 3)
    assert done == ["close a 1"]
    with pytest.raises(WeightSyncError, match="engine 0: the gloo broadcast failed: the sender left"):
        engine.receive("b", layout)
    segment = engine.make_segment(1)
    engine.leave_gloo("b")
    assert done[-1] == "close b 2" and Path(segment.path).exists()
    engine.leave_gloo("a")
    assert done[-1] == "close a 3" and not Path(segment.path).exists()


def test_an_engine_receives_rectangles_of_all_ranks_at_one_time_into_one_tensor(
    engine: WeightReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = threading.Barrier(2)

    class Group:
        def __init__(self, address: Any, position: int) -> None:
            self.rank, self.sent = address, 0

        def close(self) -> None: ...

        def broadcast(self, tensor: Any) -> None:
            together.wait(10)
            self.sent += 1
            assert tensor.is_contiguous()
            tensor.copy_(10 * self.rank + self.sent + torch.arange(tensor.numel()).view(tensor.shape) / 16)

    monkeypatch.setattr(weights, "GlooGroup", Group)
    layout, nbytes = plan_layout(INFOS)
    edges = [("a", 3, (0, 1), (2, 2)), ("b", 3, (1,), (3,)), ("a", 5, (0, 0), (2, 1)), ("b", 5, (0,), (1,))]
    parts = tuple(
        TensorPart.of(name, shape, torch.float32, whole=info.shape, start=start, rank=rank).replace(offset=info.offset)
        for name, rank, start, shape in edges
        for info in layout
        if info.name == name
    )
    joined: Any = engine.join_gloo
    joined("key", {3: 3, 5: 5}, 1)
    segment = engine.make_segment(nbytes)
    engine.receive("key", WeightManifest(version=1, tensors=layout, parts=parts))
    buffer = engine._map(segment)
    a, b = (read_tensor(buffer, info).tolist() for info in layout)
    assert a == [[51.0, 31.0, 31.0625], [51.0625, 31.125, 31.1875]] and b == [52.0, 32.0, 32.0625, 32.125]


def test_half_of_the_cores_check_while_the_trainer_stages_and_all_when_it_waits(
    engine: WeightReceiver, sources: tuple[Source, Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[tuple[str, int, Any]] = []

    def find(buffer: Any, tensors: Any, *, threads: int) -> dict[str, Any]:
        used.append(("part", threads, None))
        return {tensors[0].name: tensors[0]}

    def check(buffer: Any, manifest: Any, *, engine: str, threads: int, intact: Any) -> None:
        used.append((engine, threads, list(intact)))

    monkeypatch.setattr(weights, "find_intact", find)
    monkeypatch.setattr(weights, "check_staged", check)
    first, _ = sources
    manifest = first.write(1)
    a, b = (WeightManifest(version=1, tensors=(info,)) for info in manifest.tensors)
    for cores in ((), (3,), (3, 4, 5, 6, 7)):
        engine._vllm.cores, push = cores, f"push {len(cores)}"
        engine.verify_part(f"{push} that was given up", a, first.segment)
        engine.verify_part(push, a, first.segment)
        engine.verify_part(push, b, first.segment)
        assert 0 <= engine.verify(manifest, first.segment, push) < 60
    checks = [(threads, intact) for name, threads, intact in used if name == "engine 0"]
    assert checks == [(1, ["a", "b"]), (1, ["a", "b"]), (5, ["a", "b"])]
    assert [threads for name, threads, _ in used if name == "part"] == [1, 1, 1, 1, 1, 1, 2, 2, 2]


def test_only_names_and_versions_are_checked_of_weights_that_are_streamed(engine: WeightReceiver) -> None:
    serve(engine._vllm.serving, 3)
    engine.check_manifest(WeightManifest(version=3, tensors=INFOS))
    with pytest.raises(WeightVersionError, match="serves weights of version 3 and refuses the older version 2") as older:
        engine.check_manifest(WeightManifest(version=2, tensors=INFOS))
    assert older.value.details == {"engine": "engine 0", "version": 3, "offered": 2}
    with pytest.raises(WeightCheckError, match="missing: b"):
        engine.check_manifest(WeightManifest(version=4, tensors=INFOS[:1]))
    engine._verified, engine._staged_in_workers = WeightManifest(version=4, tensors=INFOS), True
    told: list[Any] = []
    engine._vllm.llm = SimpleNamespace(init_weight_transfer_engine=told.append)
    engine.init_transfer({"kind": "nccl"})
    assert told == [{"init_info": {"kind": "nccl"}}] and not engine._staged_in_workers
    with pytest.raises(WeightCheckError, match="weights of version 4 were not verified"):
        engine.load(4)


def test_what_loaders_read_is_asked_once_of_all_that_an_engine_may_be_sent(engine: WeightReceiver) -> None:
    asked: list[Any] = []

    def answer(method: str, args: tuple[Any, ...]) -> list[str]:
        asked.append((method, *args))
        return ["of worker 0", "of worker 1"]

    engine._vllm.llm = SimpleNamespace(collective_rpc=answer)
    engine._vllm.expected = ExpectedWeights({"a": INFOS[0]}, {"b": INFOS[1]})
    engine._vllm.serving.sleep()
    with pytest.raises(RolloutError, match="engine 0 cannot take weights now: it is asleep"):
        engine.weight_reads()
    engine._vllm.serving.wake("all")
    for _ in range(2):
        assert engine.weight_reads() == ("of worker 0", "of worker 1")  # type: ignore[comparison-overlap]
    assert asked == [("weight_reads", list(INFOS))]


@pytest.mark.parametrize("tiled", [True, False])
def test_workers_are_told_of_tiles_or_of_whole_tensors_and_never_of_what_ranks_sent(
    engine: WeightReceiver, tiled: bool
) -> None:
    box = ((0, 1), (0, 3))
    tile = TensorTile.cut(INFOS[0], box, (0,)).replace(offset=0)
    part = TensorPart.of("a", (1, 3), torch.float32, whole=(2, 3), start=(0, 0), rank=1).replace(offset=0)
    tensors = plan_layout(INFOS)[0]
    engine._verified = WeightManifest(version=2, tensors=tensors, parts=(part,), tiles=(tile,) if tiled else ())
    told: list[WeightManifest] = []

    def update(message: dict[str, Any]) -> None:
        told.append(WeightManifest.model_validate_json(message["update_info"]["manifest"]))

    engine._vllm.llm.update_weights = update
    engine.load(2)
    (found,) = told
    assert (found.tensors, found.tiles, found.parts) == (((), (tile,), ()) if tiled else (tensors, (), ()))
