"""Transports with stand-ins for ranks and engines: who is asked for what, in which order, and what a failure leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from actors.cluster.rendezvous import GlooAddress
from actors.sync import staged_transports as staged_module
from actors.sync.source import WeightSource
from actors.sync.staged_transports import (
    GlooTransport,
    PushPlan,
    SharedMemoryTransport,
    describe_export,
    from_source,
    make_plan,
)
from actors.wire.segment import Segment, SharedSegment, host_identity
from rl_backend.contracts import (
    ConfigError,
    TensorInfo,
    TensorPart,
    WeightCheckError,
    WeightManifest,
    WeightShard,
    WeightSyncError,
)
from rl_backend.weights.inspection import tensor_digest
from rl_backend.weights.staging import check_staged, plan_layout, read_tensor
from rl_backend.weights.tiles import Reads, plan_tiles

WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(5), "c": torch.full((7, 3), -2.0)}
INFOS = tuple(TensorInfo.of(name, tuple(tensor.shape), torch.float32) for name, tensor in WEIGHTS.items())
PLAN = PushPlan("key", None, "float32", None, 4, INFOS, "node", "host")
# Columns of one tensor, all of another on one rank, and rows of a third.
PARTS = tuple(
    TensorPart.of(name, shape, torch.float32, whole=tuple(WEIGHTS[name].shape), start=start, rank=rank)
    for name, rank, start, shape in (
        ("a", 0, (0, 0), (2, 1)),
        ("a", 2, (0, 1), (2, 2)),
        ("b", 1, (0,), (5,)),
        ("c", 0, (0, 0), (3, 3)),
        ("c", 2, (3, 0), (4, 3)),
    )
)
CUT = replace(PLAN, parts=PARTS)
SENT = (44, 20, 64)


class Rank:
    """A rank of a training group: its state, and how often it took part in an export."""

    def __init__(self, rank: int, weights: dict[str, Tensor] | None = None) -> None:
        self.rank, self.world_size = rank, 3
        self.state: dict[str, Any] = {}
        self.exports: list[tuple[Any, Any, Any, int]] = []
        self.weights = weights or WEIGHTS
        self.taken = 0
        self.runtime = self

    def handle(self, ref: Any) -> Any:
        return SimpleNamespace(weight_version=9, kept={"kept.b": (1,), "kept.a": (2,)}, ref=ref)

    def weight_infos(self, handle: Any, *, dtype: torch.dtype) -> tuple[TensorInfo, ...]:
        return tuple(TensorInfo.of(name, tuple(tensor.shape), dtype) for name, tensor in self.weights.items())

    def shard_infos(self, handle: Any, *, dtype: torch.dtype) -> tuple[TensorPart, ...]:
        return ()

    def export_shards(self, handle: Any, *, dtype: torch.dtype, held: bool) -> Iterator[WeightShard]:
        assert held
        for name, tensor in self.weights.items():
            for part in PARTS:
                if (part.name, part.rank) == (name, self.rank):
                    yield WeightShard(name, tuple(tensor.shape), part.start, tensor[part.region].clone())

    def export_weights(self, handle: Any, *, dtype: torch.dtype, byte_budget: int | None) -> Any:
        self.exports.append((handle.ref, dtype, byte_budget, self.rank))
        for each in self.weights.items():
            self.taken += 1
            yield each


class Ranks:
    """A training group of three ranks."""

    def __init__(self) -> None:
        self.ranks = [Rank(rank) for rank in range(3)]
        self.ran: list[str] = []
        self.errors: dict[str, BaseException] = {}

    def run_on_ranks(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        self.ran.append(function.__name__)
        if function.__name__ in self.errors:
            raise self.errors[function.__name__]
        return [function(rank, *args, **kwargs) for rank in self.ranks]


class Engines:
    """Engines 1 and 4, which answer as they are told to."""

    def __init__(self) -> None:
        self.engines: tuple[int, ...] = (1, 4)
        self.config = SimpleNamespace(call_timeout=77.5)
        self.infos = {
            engine: SimpleNamespace(pid=engine, node_ip=f"ip {engine}", name=f"engine {engine}", host="host")
            for engine in (1, 2, 4)
        }
        self.answers: dict[str, dict[int, Any]] = {}
        self.asked: list[tuple[Any, ...]] = []
        self.gathered: list[str] = []

    def call(self, method: str, *args: Any) -> dict[int, Any]:
        return self.gather(self.start_call(method, *args))

    def start_call(self, method: str, *args: Any, each: Any = None) -> dict[int, Any]:
        self.asked.append((method, *args, *([{engine: each(engine) for engine in self.engines}] if each else [])))
        return {engine: (method, self.answers.get(method, {}).get(engine)) for engine in self.engines}

    def gather(self, calls: dict[int, Any], timeout: float = 600.0) -> dict[int, Any]:
        self.gathered += {method for method, _ in calls.values()}
        return {engine: answer for engine, (_, answer) in calls.items()}

    def actors(self) -> list[Any]:
        return [SimpleNamespace(verify_part=SimpleNamespace(remote=lambda *of: self.asked.append(("part", *of))))]

    @property
    def methods(self) -> list[str]:
        return [each[0] for each in self.asked]


class Member:
    """Rank 0's place in the gloo group."""

    failures = 0

    def __init__(self, address: Any = None, rank: int = 0) -> None:
        self.address, self.rank = address, rank
        self.sent: list[Tensor] = []
        self.closed = 0

    def broadcast(self, tensor: Tensor) -> None:
        if Member.failures and len(self.sent) == 1:
            raise RuntimeError("engine 4 left")
        self.sent.append(tensor.clone())

    def close(self) -> None:
        self.closed += 1


class Point:
    """Where members meet."""

    def __init__(self, address: str, timeout: Any) -> None:
        self.rendezvous = f"rendezvous at {address}"
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def _members(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_module, "GlooGroup", Member)
    monkeypatch.setattr(staged_module, "RendezvousPoint", Point)
    monkeypatch.setattr(staged_module, "node_address", lambda: "ip 0")
    monkeypatch.setattr(Member, "failures", 0)


def segments() -> dict[int, Segment]:
    return {1: Segment("of 1", 400), 4: Segment("of 4", 400)}


@pytest.mark.usefixtures("_members")
def test_gloo_sends_what_all_ranks_export_to_a_segment_of_each_engine_over_one_group() -> None:
    transport, train, rollout = GlooTransport(), Ranks(), Engines()
    engines: Any = rollout
    rollout.answers = {"make_segment": dict(segments())}
    layout, nbytes = plan_layout(INFOS)
    for push in range(2):
        staged = transport.stage(PLAN, train, engines)
        assert staged.segments == segments() and staged.changed is None
        assert staged.manifest.version == 4
        assert [info.offset for info in staged.manifest.tensors] == [info.offset for info in layout]
        assert [info.digest for info in staged.manifest.tensors] == [tensor_digest(each) for each in WEIGHTS.values()]
        assert staged.sent == (128, 0, 0)
        address: Any = GlooAddress("rendezvous at ip 0", 3, 77.5)  # type: ignore[arg-type]
        join: list[Any] = [("join_gloo", "key", {0: address}, {1: (1,), 4: (2,)})] if push == 0 else []
        receive = ("receive", "key", WeightManifest(version=4, tensors=layout), False)
        assert rollout.asked == [("make_segment", nbytes), *join, receive]
        rollout.asked.clear()
    member = train.ranks[0].state["key"].group
    assert member.rank == 0 and [tensor.shape for tensor in member.sent] == [each.shape for each in WEIGHTS.values()] * 2
    assert [rank.taken for rank in train.ranks] == [6, 6, 6] and not train.ranks[1].state
    assert train.ranks[0].exports[0] == (None, torch.float32, None, 0)
    rollout.engines = (4,)
    transport.stage(PLAN, train, engines)
    address = GlooAddress("rendezvous at ip 0", 2, 77.5)  # type: ignore[arg-type]
    assert ("join_gloo", "key", {0: address}, {4: (1,)}) in rollout.asked, "the engines have changed"
    assert member.closed == 1
    rollout.asked.clear()
    transport.close(train, engines)
    assert rollout.asked == [("leave_gloo", "key")] and "leave_gloo" not in rollout.gathered
    assert train.ran[-1] == "disconnect" and not train.ranks[0].state
    transport.stage(PLAN, train, engines)
    assert "join_gloo" in rollout.methods, "they have left"
    rollout.engines, before = (), len(rollout.asked)
    transport.close(train, engines)
    assert len(rollout.asked) == before and not train.ranks[0].state


@pytest.mark.usefixtures("_members")
def test_over_gloo_each_rank_sends_its_rectangles_in_a_group_of_its_own() -> None:
    transport, train, rollout = GlooTransport(), Ranks(), Engines()
    rollout.answers = {"make_segment": dict(segments())}
    staged = transport.stage(CUT, train, rollout)  # type: ignore[arg-type]
    layout, nbytes = plan_layout(INFOS)
    place = {info.name: info.offset for info in layout}
    placed = tuple(part.replace(offset=place[part.name]) for part in PARTS)
    (_, made), (_, _, addresses, _), (*_, announced, is_patch) = rollout.asked
    assert made == nbytes and list(addresses) == [0, 1, 2]
    assert announced == WeightManifest(version=4, tensors=layout, parts=placed)
    assert not is_patch
    members = [rank.state["key"].group for rank in train.ranks]
    assert [member.rank for member in members] == [0, 0, 0] and not any(rank.taken for rank in train.ranks)
    for rank, member in enumerate(members):
        expected = [WEIGHTS[part.name][part.region] for part in PARTS if part.rank == rank]
        assert [tensor.tolist() for tensor in member.sent] == [tensor.tolist() for tensor in expected]
    assert staged.sent == SENT and staged.manifest.tensors == layout
    # An engine that received them finds the digests that the senders have.
    buffer = torch.zeros(nbytes, dtype=torch.uint8)
    for info in layout:
        read_tensor(buffer, info).copy_(WEIGHTS[info.name])
    check_staged(buffer, staged.manifest, engine="engine 1")


@pytest.mark.usefixtures("_members")
def test_the_rank_whose_broadcast_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    transport, train, rollout = GlooTransport(), Ranks(), Engines()
    rollout.answers = {"make_segment": dict(segments())}
    monkeypatch.setattr(Member, "failures", 1)
    failed = "the broadcast of rank 0 to .* engine 4 left; .* the broadcast of rank 2 to "
    with pytest.raises(WeightSyncError, match=failed):
        transport.stage(CUT, train, rollout)  # type: ignore[arg-type]
    assert ["key" in rank.state for rank in train.ranks] == [False, True, False], "rank 1 sends one tensor"


def test_a_transport_that_staged_nothing_closes_nothing() -> None:
    train, rollout = Ranks(), Engines()
    for transport in (GlooTransport(), SharedMemoryTransport()):
        transport.close(train, rollout)  # type: ignore[arg-type]
    assert not train.ran and not rollout.asked


@pytest.mark.usefixtures("_members")
@pytest.mark.parametrize("method", ["make_segment", "join_gloo", "receive"])
def test_an_engine_that_refuses_ends_a_push_over_gloo(method: str) -> None:
    transport, train, rollout = GlooTransport(), Ranks(), Engines()
    rollout.answers = {"make_segment": dict(segments())}
    rollout.answers[method] = {**rollout.answers.get(method, {}), 4: WeightSyncError(f"engine 4: {method} failed")}
    with pytest.raises(WeightSyncError, match=f"engine 4: {method} failed"):
        transport.stage(PLAN, train, rollout)  # type: ignore[arg-type]
    rollout.answers[method] = dict(segments()) if method == "make_segment" else {}
    rollout.asked.clear()
    transport.stage(PLAN, train, rollout)  # type: ignore[arg-type]
    assert "join_gloo" in rollout.methods, "the group is made anew"


@pytest.mark.usefixtures("_members")
def test_a_broadcast_that_fails_is_told_after_the_export_has_come_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    transport, train, rollout = GlooTransport(), Ranks(), Engines()
    rollout.answers = {"make_segment": dict(segments())}
    monkeypatch.setattr(Member, "failures", 1)
    with pytest.raises(
        WeightSyncError, match="transport='gloo': the broadcast of rank 0 to the engines failed: engine 4 left"
    ):
        transport.stage(PLAN, train, rollout)  # type: ignore[arg-type]
    assert [rank.taken for rank in train.ranks] == [3, 3, 3] and not train.ranks[0].state
    monkeypatch.setattr(Member, "failures", 0)
    transport.stage(PLAN, train, rollout)  # type: ignore[arg-type]
    assert rollout.methods.count("join_gloo") == 2


@pytest.mark.usefixtures("_members")
def test_a_trainer_that_fails_leaves_no_engine_waiting_for_weights() -> None:
    transport, train, rollout = GlooTransport(), Ranks(), Engines()
    rollout.answers = {"make_segment": dict(segments())}
    train.errors = {"broadcast_weights": KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        transport.stage(PLAN, train, rollout)  # type: ignore[arg-type]
    assert train.ran[-1] == "disconnect" and rollout.gathered[-1] == "receive" and not train.ranks[0].state
    train.errors["disconnect"] = WeightSyncError("the rank is dead")
    with pytest.raises(KeyboardInterrupt):
        transport.stage(PLAN, train, rollout)  # type: ignore[arg-type]
    train.errors.clear()
    transport.stage(PLAN, train, rollout)  # type: ignore[arg-type]
    assert rollout.methods.count("join_gloo") == 3


def test_an_engine_that_does_not_join_is_an_error_of_the_source_rank_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(address: Any, rank: int) -> None:
        raise RuntimeError("1 of 3 came")

    monkeypatch.setattr(staged_module, "GlooGroup", late)
    rank: Any = Rank(0)
    rank.state["key"] = staged_module._Connection(Point("x", None), GlooAddress("rendezvous", 3, 77.5))  # type: ignore[arg-type]
    error = staged_module.connect(rank, "key")
    assert isinstance(
        error, WeightSyncError
    ) and "did not join rank 0 in 77.5 s (RolloutConfig.call_timeout): 1 of 3 came" in str(error)
    other: Any = Rank(1)
    assert staged_module.connect(other, "key") is None
    assert staged_module.listen(other, "key", [0, 2], ["x"], 77.5) is None and not other.state


@pytest.fixture
def ranks() -> Any:
    made = Ranks()
    yield made
    for rank in made.ranks:
        staged_module.drop_segment(rank, "key")  # type: ignore[arg-type]


def test_shared_memory_holds_what_all_ranks_export_and_is_kept_for_the_next_push(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged_module, "PART_BYTES", 1)
    transport, rollout = SharedMemoryTransport(), Engines()
    engines: Any = rollout
    first = transport.stage(PLAN, ranks, engines)
    again = transport.stage(PLAN, ranks, engines)
    kept: SharedSegment = ranks.ranks[0].state["key"]
    assert first.segments == again.segments == dict.fromkeys((1, 4), Segment(str(kept.path), kept.nbytes))
    assert first.key != again.key and first.key and "forget_segment" not in rollout.methods
    for info in again.manifest.tensors:
        assert torch.equal(read_tensor(kept.buffer, info), WEIGHTS[info.name]) and info.digest
    assert again.manifest.version == 4 and [rank.taken for rank in ranks.ranks] == [6, 6, 6]
    told = [(key, [info.name for info in part.tensors], place) for _, key, part, place in rollout.asked]
    place = Segment(str(kept.path), kept.nbytes)
    # Of 128 bytes a fourth is more than those of "a"; nobody is told of the last part.
    assert told == [(staged.key, ["a", "b"], place) for staged in (first, again)]
    larger = replace(PLAN, infos=(*INFOS, TensorInfo.of("d", (100,), torch.float32)))
    for rank in ranks.ranks:
        rank.weights = {**WEIGHTS, "d": torch.zeros(100)}
    rollout.asked.clear()
    staged = transport.stage(larger, ranks, engines)
    assert not kept.path.exists() and rollout.asked[0] == ("forget_segment", str(kept.path))
    assert staged.segments[1].path != str(kept.path) and "forget_segment" in rollout.gathered
    newest = ranks.ranks[0].state["key"]
    rollout.asked.clear()
    rollout.gathered.clear()
    transport.close(ranks, engines)
    transport.close(ranks, engines)
    assert (
        rollout.asked == [("forget_segment", str(newest.path))] and not rollout.gathered and ranks.ran[-1] == "drop_segment"
    )
    assert not newest.path.exists() and not ranks.ranks[0].state
    transport.stage(larger, ranks, engines)
    rollout.engines = ()
    rollout.asked.clear()
    transport.close(ranks, engines)
    assert not rollout.asked and not ranks.ranks[0].state


def test_shared_memory_holds_the_rectangles_that_ranks_write_at_one_time(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged_module, "PART_BYTES", 1)
    transport, rollout = SharedMemoryTransport(), Engines()
    engines: Any = rollout
    mappings = []
    for _ in range(2):
        staged = transport.stage(CUT, ranks, engines)
        source: SharedSegment = ranks.ranks[0].state["key"]
        assert staged.sent == SENT and sum(SENT) == CUT.nbytes, "each byte once"
        assert [info.name for info in staged.manifest.tensors] == list(WEIGHTS)
        for info in staged.manifest.tensors:
            assert torch.equal(read_tensor(source.buffer, info), WEIGHTS[info.name])
        check_staged(source.buffer, staged.manifest, engine="engine 1")
        assert not any(rank.taken for rank in ranks.ranks), "nothing is gathered"
        mappings.append([rank.state["key"] for rank in ranks.ranks])
        source.buffer.zero_()
    assert all(one is other for one, other in zip(*mappings, strict=True))
    # A rank tells of a fourth of what it writes, but not of the last.
    assert [str(info) for info in rollout.asked[0][2].parts] == ["a[0:2, 1:3]"]
    apart = transport.stage(replace(CUT, on_one_host=False), ranks, engines)
    assert apart.sent == (128, 0, 0) and not apart.manifest.parts and ranks.ranks[1].taken == 3
    transport.close(ranks, engines)
    assert not any(rank.state for rank in ranks.ranks)


@pytest.mark.parametrize("plan", [CUT, PLAN], ids=["rectangles", "one source"])
def test_each_worker_has_its_rectangles_in_the_segment(ranks: Ranks, plan: PushPlan) -> None:
    # Columns of one tensor, all of another for both, and of the third nothing for the second worker.
    reads: list[Reads] = [
        {"a": [((0, 2), (0, 2))], "b": [((0, 5),)], "c": [((1, 6), (0, 3))]},
        {"a": [((0, 2), (2, 3))], "b": [((0, 5),)]},
    ]
    tiled = replace(plan, tiles=plan_tiles(INFOS, reads))
    transport, engines = SharedMemoryTransport(), cast(Any, Engines())
    staged = transport.stage(tiled, ranks, engines)
    buffer = ranks.ranks[0].state["key"].buffer
    check_staged(buffer, staged.manifest, engine="engine 1")
    assert [str(tile) for tile in staged.manifest.tiles] == ["a[0:2, 0:2]", "a[0:2, 2:3]", "b[0:5]", "c[1:6, 0:3]"]
    for tile in staged.manifest.tiles:
        assert torch.equal(read_tensor(buffer, tile), WEIGHTS[tile.tensor][tuple(slice(*edges) for edges in tile.box)])
    assert staged.received == (16 + 20 + 60, 8 + 20) and sum(staged.sent) == 16 + 8 + 20 + 60
    assert staged.sent == ((32, 20, 52) if plan.parts else (104, 0, 0))
    transport.close(ranks, engines)


def test_a_rank_that_sends_another_rectangle_than_planned_is_refused(ranks: Ranks) -> None:
    moved = tuple(part.replace(start=(4, 0)) if str(part) == "c[3:7, 0:3]" else part for part in PARTS)
    plan, rollout = replace(CUT, parts=moved), Engines()
    with pytest.raises(WeightCheckError, match=r"yielded \('c\[3:7, 0:3\]', .* but announced \('c\[4:8, 0:3\]'"):
        SharedMemoryTransport().stage(plan, ranks, rollout)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (PARTS[1:], r"^a: .* float32 \(2, 3\), every element once, and are a\[0:2, 1:3\] of rank 2; nothing was loaded"),
        ((*PARTS, PARTS[-1].replace(rank=1)), r"^c: .*c\[3:7, 0:3\] of rank 2, c\[3:7, 0:3\] of rank 1;"),
        ((*PARTS[:-1], PARTS[-1].replace(start=(2, 0))), r"^c: .* are c\[0:3, 0:3\] of rank 0, c\[2:6, 0:3\] of rank 2;"),
        (tuple(part for part in PARTS if part.name != "b"), r"^b: .* every element once, and are none;"),
        ((*PARTS, PARTS[2].replace(name="d")), "rectangles of tensors that are not pushed: d"),
        ((*PARTS[:-1], PARTS[-1].replace(whole=(7, 4))), "^c: "),
    ],
    ids=["missing", "twice", "wrong offset", "none", "strange", "another shape"],
)
def test_a_plan_that_is_not_every_tensor_once_is_refused_before_anything_is_sent(
    parts: tuple[TensorPart, ...], message: str
) -> None:
    with pytest.raises(WeightCheckError, match=message):
        make_plan([("", "host", replace(PLAN, parts=parts)), ("", "host", None), ("", "host", None)])


def test_parts_are_told_when_they_are_large_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_module, "PART_BYTES", 100)
    rollout: Any = Engines()
    infos = [TensorInfo.of(f"t{number}", (size,), torch.uint8) for number, size in enumerate((60, 50, 300, 99, 1, 80, 10))]
    plan = replace(PLAN, infos=tuple(infos), version=6)
    parts = staged_module._StagedParts(plan, infos, "push", Segment("x", 1), [*rollout.actors(), *rollout.actors()])
    for info in infos:
        parts.add(info)
    told = [(key, part.version, [info.name for info in part.tensors]) for _, key, part, _ in rollout.asked]
    # Of 600 bytes a fourth, 150, is more than the least; of the 190 left after the first part it is not.
    assert told[::2] == told[1::2] == [("push", 6, ["t0", "t1", "t2"]), ("push", 6, ["t3", "t4"])]


def test_a_segment_that_fits_exactly_is_kept_and_one_that_cannot_be_made_is_an_error(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    source: Any = ranks.ranks[0]
    first = staged_module.reserve_segment(source, PLAN)
    assert isinstance(first, Segment) and first.nbytes == plan_layout(INFOS)[1]
    assert staged_module.reserve_segment(source, PLAN) == first
    other: Any = ranks.ranks[1]
    assert staged_module.reserve_segment(other, PLAN) is None and not other.state

    def full(nbytes: int) -> None:
        raise WeightSyncError("/dev/shm is full")

    monkeypatch.setattr(staged_module, "SharedSegment", full)
    larger = replace(PLAN, infos=(*INFOS, TensorInfo.of("d", (1,), torch.float32)))
    rollout: Any = Engines()
    with pytest.raises(WeightSyncError, match="/dev/shm is full"):
        SharedMemoryTransport().stage(larger, ranks, rollout)
    assert not source.state and not rollout.asked
    staged_module.drop_segment(source, "key")


def test_engines_that_do_not_share_memory_with_the_trainer_are_named() -> None:
    rollout: Any = Engines()
    transport = SharedMemoryTransport()
    rollout.infos[2].host = "elsewhere"  # it is lost
    assert transport.problem(PLAN, rollout) == ""
    rollout.infos[1].host = rollout.infos[4].host = "elsewhere"
    problem = transport.problem(PLAN, rollout)
    assert problem.startswith("engine 1, engine 4 and the trainer's source rank do not share /dev/shm")


def test_a_push_is_described_by_the_source_rank_and_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    context_of_ray = SimpleNamespace(get_node_id=lambda: "node 3")
    monkeypatch.setattr("actors.sync.staged_transports.ray.get_runtime_context", lambda: context_of_ray)
    train = Ranks()
    results = train.run_on_ranks(describe_export, "key", "ref", "bfloat16", 42)
    assert [(host, plan is None) for _, host, plan in results] == [(host_identity(), rank > 0) for rank in range(3)]
    infos = tuple(TensorInfo.of(name, tuple(tensor.shape), torch.bfloat16) for name, tensor in WEIGHTS.items())
    expected = PushPlan("key", "ref", "bfloat16", 42, 9, infos, "node 3", host_identity(), kept=("kept.b", "kept.a"))
    assert make_plan(results) == expected and expected.nbytes == 2 * (6 + 5 + 21)
    assert expected.manifest == WeightManifest(version=9, tensors=infos, kept=("kept.b", "kept.a"))
    devices: Any = [(f"GPU-{rank}", host, plan) for rank, (_, host, plan) in enumerate(results)]
    assert make_plan(devices).device_ids == ("GPU-0", "GPU-1", "GPU-2") and make_plan(devices).on_one_host
    devices[2] = "", "elsewhere", None
    assert make_plan(devices).device_ids == () and not make_plan(devices).on_one_host
    monkeypatch.setattr(Rank, "shard_infos", lambda rank, handle, *, dtype: PARTS)
    assert make_plan(train.run_on_ranks(describe_export, "key", "ref", "float32", None)).parts == PARTS
    train.ranks[0].world_size = 1
    assert make_plan(train.run_on_ranks(describe_export, "key", "ref", "float32", None)).parts == ()
    for rank in range(3):
        context: Any = train.ranks[rank]
        with pytest.raises(ConfigError, match=r"byte_budget=41: must hold the largest tensor, c with 42 bytes"):
            describe_export(context, "key", "ref", "bfloat16", 41)
        context.weights = {}
        context.weight_infos = lambda handle, *, dtype: ()
        *_, plan = describe_export(context, "key", "ref", "bfloat16", 1)
        assert (plan is None) == (rank > 0)


def test_plain_tensors_are_a_source_of_one_rank() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    source = WeightSource({"a": parameter, "step": torch.tensor([7])}, 3)
    for dtype, of_a in ((torch.bfloat16, torch.bfloat16), (None, torch.float32)):
        found = dict(source.tensors(dtype))
        assert (found["a"].dtype, found["step"].dtype) == (of_a, torch.int64) and not found["a"].requires_grad
    ((infos, version, exported, kept),) = source.run_on_ranks(
        lambda context, dtype: (
            context.runtime.weight_infos(context.handle(None), dtype=dtype),
            context.handle(None).weight_version,
            list(context.runtime.export_weights(context.handle(None), dtype=dtype)),
            context.handle(None).kept,
        ),
        torch.float16,
    )
    assert [(info.name, info.dtype, info.shape) for info in infos] == [("a", "float16", (2,)), ("step", "int64", (1,))]
    assert version == 3 and [name for name, _ in exported] == ["a", "step"] and not kept
    assert exported[0][1].dtype == torch.float16
    source.version = 8
    assert source.run_on_ranks(lambda context: context.handle(None).weight_version) == [8]
    with pytest.raises(ConfigError, match="handle='policy': a WeightSource is one model; leave the handle out"):
        source.run_on_ranks(lambda context: context.handle("policy"))
    one, other = WeightSource({}), WeightSource({})
    one.run_on_ranks(lambda context: context.state.update(key=1))
    assert other.run_on_ranks(lambda context: context.state) == [{}]


def test_the_result_of_the_source_rank_is_raised_where_it_is_an_error() -> None:
    assert from_source(["mine", WeightSyncError("of another rank")]) == "mine"
    with pytest.raises(WeightSyncError, match="mine"):
        from_source([WeightSyncError("mine"), None])


def test_a_function_is_asked_for_its_tensors_at_every_export() -> None:
    made: list[int] = []

    def tensors() -> Iterator[tuple[str, Tensor]]:
        made.append(len(made) + 1)
        yield "a", torch.full((2,), float(made[-1]))
        yield "b", torch.full((1,), 7)

    source = WeightSource(tensors)
    found = [dict(source.tensors(torch.bfloat16)) for _ in range(2)]
    assert source.version == 0 and made == [1, 2]
    assert [{name: tensor.tolist() for name, tensor in each.items()} for each in found] == [
        {"a": [1.0, 1.0], "b": [7]},
        {"a": [2.0, 2.0], "b": [7]},
    ]
    assert [each["a"].dtype for each in found] == [torch.bfloat16] * 2
