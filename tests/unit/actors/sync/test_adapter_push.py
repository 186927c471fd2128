"""Pushes of a tenant, with stand-ins for ranks and engines: where its factors go, who gets them, and what is let go of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.rollout.messages import AdapterVersion, PushedAdapter, Response
from actors.sync import adapter_push
from actors.sync.adapter_push import (
    AdapterPush,
    Canary,
    StagedAdapter,
    describe_source,
    push_directory,
    send_canary,
    stage_adapter,
)
from actors.train.context import HandleRef
from actors.train.outcome import Apart
from actors.wire.factors import PackedFactors, SharedFactors
from actors.wire.segment import Segment
from rl_backend.contracts import EngineDeadError, EngineDirtyError, RolloutError, WeightCheckError, WeightSyncError

TENANT = HandleRef("group", 3, "poet", False, (0,), (0,), lora_id=0)
STAGED = StagedAdapter(5, 8, "digest", 96)
STORED: Any = object()
"""A reference of Ray's."""


class Memory:
    """The driver's shared memory."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.discarded: list[str] = []
        self.error: Exception | None = None

    def take(self, nbytes: int) -> Segment:
        if self.error:
            raise self.error
        self.taken.append(nbytes)
        return Segment(f"memory {len(self.taken)}", nbytes)

    def discard(self, path: str) -> None:
        self.discarded.append(path)


class Group:
    """A rollout group and its engines 0, 2 and 5 at one time."""

    def __init__(self) -> None:
        self.config = SimpleNamespace(max_adapters=2, dtype="float32", returns_masks=False)
        self.memory = Memory()
        self.infos = {
            engine: SimpleNamespace(pid=engine, name=f"engine {engine}", vocab_size=40, max_model_len=9)
            for engine in (0, 2, 5)
        }
        self.lost_engines: dict[int, Any] = {}
        self.answers: dict[str, dict[int, Any]] = {}
        self.asked: list[tuple[Any, ...]] = []
        self.served: PushedAdapter | None = None
        self.freed: list[tuple[Any, list[Any]]] = []
        self.on_node = True
        self.base_pushes = 0
        self.refuses: dict[str, Exception] = {}
        self.is_changing = False
        self.released: list[Any] = []

    @property
    def engines(self) -> tuple[int, ...]:
        return tuple(engine for engine in self.infos if engine not in self.lost_engines)

    @property
    def engine_set(self) -> Group:
        return self

    lora = engine_set

    def fixed(self) -> Group:
        return self

    def is_on_node(self, node_id: str, host: str) -> bool:
        assert (node_id, host) == ("node", "host")
        return self.on_node

    @property
    @contextmanager
    def changing(self) -> Iterator[None]:
        self.is_changing = True
        yield
        self.is_changing = False

    def _may(self, what: str, *args: Any) -> None:
        self.asked.append((what, *args))
        if what in self.refuses:
            raise self.refuses[what]

    def require_plain_base(self, tenant: str) -> None:
        self._may("require_plain_base", tenant)

    def require_same_tenant(self, name: str, tenant: Any, pusher: Any) -> None:
        self._may("require_same_tenant", name, tenant, pusher)

    def require_pushable(self, adapter: AdapterVersion) -> None:
        self._may("require_pushable", adapter)

    def sent_to(self, pushed: PushedAdapter, info: Any) -> PushedAdapter:
        return pushed._replace(digest=f"{pushed.digest} for {info.name}")

    def call(self, method: str, *args: Any, each: Any = None) -> dict[int, Any]:
        assert self.is_changing
        self.asked.append((method, *args, *([{engine: each(engine) for engine in self.engines}] if each else [])))
        found = {engine: self.answers.get(method, {}).get(engine) for engine in self.engines}
        self.lost_engines |= {number: each for number, each in found.items() if isinstance(each, EngineDeadError)}
        return found

    def start_call(self, method: str, *args: Any) -> dict[int, Any]:
        self.asked.append((method, *args))
        return {engine: f"{method} on {engine}" for engine in self.engines}

    def wait_for_calls(self) -> None:
        self._may("wait_for_calls")

    def switch(self, pushed: PushedAdapter) -> PushedAdapter | None:
        assert self.is_changing
        before, self.served = self.served, pushed
        return before

    def free(self, pushed: PushedAdapter, calls: Any) -> None:
        self.freed.append((pushed, list(calls)))

    def release_name(self, name: str, pusher: Any) -> None:
        self.released.append((name, pusher))


class Ranks:
    """Ranks that stage where they are told to, or in Ray's object store."""

    def __init__(self) -> None:
        self.staged = STAGED
        self.ran: list[tuple[Any, ...]] = []
        self.in_segment = True
        self.error: BaseException | None = None

    def run_on_ranks(self, function: Any, *args: Any) -> list[Any]:
        self.ran.append((function, *args))
        if function is describe_source:
            return [adapter_push._Source(96, "node", "host"), None]
        if self.error:
            raise self.error
        place = args[2]
        if isinstance(place, Segment):
            answer = Apart(self.staged._replace(layout=b"layout"), None) if self.in_segment else Apart(self.staged, STORED)
        elif place is None:
            answer = Apart(self.staged, STORED)
        else:
            answer = Apart(self.staged._replace(directory=f"{place[0]}/version-{place[1]}"), None)
        return [answer, None]


class Made:
    def __init__(self, directory: str | None = None, given: Canary | None = None) -> None:
        self.train, self.group = Ranks(), Group()
        self.push = AdapterPush(self.train, self.group, TENANT, directory=directory, canary=given)  # type: ignore[arg-type]

    def places(self) -> list[Any]:
        return [args[2] for function, *args in self.train.ran if function is stage_adapter]


def test_a_tenant_goes_to_every_engine_in_memory_that_all_share() -> None:
    made = Made()
    first, second = made.push.push(), made.push.push()
    assert (first.version, first.nbytes, first.transport, first.engines, first.skipped) == (
        5,
        96,
        "shared_memory",
        (0, 2, 5),
        (),
    )
    assert list(first.seconds) == ["stage", "load", "probe", "switch", "total"]
    assert made.places() == [Segment("memory 1", 96), Segment("memory 2", 96)]
    assert [function for function, *_ in made.train.ran] == [describe_source, stage_adapter, stage_adapter], "once described"
    assert all(args == [TENANT, "float32"] for _, *args in [each[:3] for each in made.train.ran])
    (_, pushed_first), (_, pushed) = [each for each in made.group.asked if each[0] == "push_adapter"]
    assert {engine: each.digest for engine, each in pushed.items()} == {
        engine: f"digest for engine {engine}" for engine in (0, 2, 5)
    }
    served = made.group.served
    assert served is not None and served.factors == SharedFactors(Segment("memory 2", 96), b"layout") == pushed[0].factors
    old, new = pushed_first[0].adapter, served.adapter
    assert (new.tenant, new.version, new.rank) == ("poet", 5, 8) and new.number > old.number
    ((before, calls),) = made.group.freed
    assert before.adapter == old and calls == [f"drop_adapter on {engine}" for engine in (0, 2, 5)]
    assert not made.group.memory.discarded and second.version == 5
    required = [each for each in made.group.asked if each[0] == "require_same_tenant"]
    assert required == [("require_same_tenant", "poet", ("group", 3), made.push)] * 2
    made.push.close()
    assert made.group.released == [("poet", made.push)] and not made.push.is_over


@pytest.mark.parametrize("why", ["elsewhere", "no room", "no file", "gone"])
def test_factors_go_through_rays_store_where_there_is_no_memory_for_them(why: str) -> None:
    made = Made()
    made.group.on_node = why != "elsewhere"
    made.train.in_segment = why != "gone"
    made.group.memory.error = {"no room": WeightSyncError("full"), "no file": OSError("no")}.get(why)
    report = made.push.push()
    assert report.transport == "object_store"
    assert made.group.served is not None and made.group.served.factors is STORED
    assert made.places() == [Segment("memory 1", 96) if why == "gone" else None]
    assert made.group.memory.discarded == (["memory 1"] if why == "gone" else [])


def test_factors_go_through_a_directory_that_is_given_a_new_one_for_each_version(tmp_path: Path) -> None:
    made = Made(directory=str(tmp_path))
    assert [made.push.push().transport for _ in range(2)] == ["directory"] * 2
    (root, one), (_, other) = made.places()
    assert root == tmp_path and one != other and made.group.served is not None
    assert made.group.served.factors == f"{tmp_path}/version-{other}"
    assert not made.group.memory.taken


def test_memory_of_a_push_that_fails_while_it_is_staged_is_not_used_again() -> None:
    made = Made()
    made.train.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        made.push.push()
    assert made.group.memory.discarded == ["memory 1"] and made.group.served is None


DEAD, DIRTY = EngineDeadError("engine 0 died"), EngineDirtyError("engine 2 is dirty")
DEAD_TOO = EngineDeadError("engine 5 died")


@pytest.mark.parametrize(
    ("refuses", "answers", "error"),
    [
        ({"require_same_tenant": RolloutError("another tenant")}, {}, "another tenant"),
        ({"require_pushable": RolloutError("an older one")}, {}, "an older one"),
        ({}, {0: DEAD, 2: DIRTY}, "engine 2 is dirty"),
        ({}, {0: DEAD, 2: DEAD_TOO, 5: DEAD_TOO}, "engine 0 died"),
    ],
)
def test_a_version_that_an_engine_refuses_is_dropped_everywhere(
    refuses: dict[str, Exception], answers: dict[int, Any], error: str
) -> None:
    made = Made()
    made.push.push()
    before = made.group.served
    made.group.refuses, made.group.answers = refuses, {"push_adapter": answers}
    with pytest.raises(RolloutError, match=error):
        made.push.push()
    assert made.group.served is before
    pushed, calls = made.group.freed[-1]
    assert pushed.factors == SharedFactors(Segment("memory 2", 96), b"layout")
    living = [engine for engine in (0, 2, 5) if not isinstance(answers.get(engine), EngineDeadError)]
    assert calls == [f"drop_adapter on {engine}" for engine in living]


def test_an_engine_that_dies_on_the_way_is_told_and_the_others_serve_the_version() -> None:
    made = Made()
    made.group.lost_engines = {2: DIRTY}
    made.group.answers = {"push_adapter": {5: DEAD_TOO}}
    with pytest.raises(EngineDeadError, match="engine 5 died"):
        made.push.push()
    assert made.group.served is not None and not made.group.freed
    made.group.answers = {}
    report = made.push.push()
    assert report.engines == (0,) and report.skipped == (2, 5)


def test_nothing_is_staged_beside_weights_with_an_adapter_merged_into_them() -> None:
    made = Made()
    made.group.refuses = {"require_plain_base": RolloutError("merged")}
    with pytest.raises(RolloutError, match="merged"):
        made.push.push()
    assert not made.train.ran


def test_a_canary_is_sent_where_an_engine_or_its_weights_are_new(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    proven: list[tuple[int, ...]] = [(0, 2, 5)]

    def send(given: Canary, train: Any, engines: Any, tenant: HandleRef, adapter: AdapterVersion) -> tuple[int, ...]:
        sent.append((given, train, engines, tenant))
        return proven[0]

    monkeypatch.setattr(adapter_push, "send_canary", send)
    given = Canary((1, 2))
    made = Made(given=given)
    for _ in range(2):
        made.push.push()
    assert sent == [(given, made.train, made.group, TENANT)]
    made.group.base_pushes += 1
    proven[0] = (0, 5)
    for _ in range(2):
        made.push.push()
    assert len(sent) == 3, "engine 2 has not had one"
    proven[0] = (0, 2, 5)
    made.push.push()
    made.group.infos[5].pid = 99
    made.push.push()
    assert len(sent) == 5
    without = Made()
    without.push.push()
    assert len(sent) == 5


class Judged:
    """A trainer with known log-probs of any sequence: with the adapter they are 0.5 less."""

    def __init__(self, *, moved: bool = False) -> None:
        self.asked: list[Any] = []
        self.moved = moved

    def run_on_ranks(self, function: Any, tenant: HandleRef, version: int, sequences: Any) -> list[Any]:
        self.asked.append((function, version, sequences))
        found = {ids: tuple(torch.arange(len(ids)) * -0.01 - less for less in (0.0, 0.5)) for ids in sequences}
        return [None, None] if self.moved else [{}, found]  # another rank has no outputs


def answer(ids: list[int], start: int, less: float) -> Response:
    return Response(ids, [-(start + place - 1) * 0.01 - less for place in range(len(ids))], "length")


def canary_group(*apply: float | Exception | None) -> Group:
    """Engines that apply so much of the adapter, are lost, or have no weights."""
    group = Group()
    group.is_changing = True
    group.answers = {
        "probe_adapter": {
            engine: [answer([7, engine], 8, 0.0), answer([8, 8], 8, each)] if isinstance(each, float) else each
            for engine, each in zip((0, 2, 5), apply, strict=True)
        }
    }
    return group


ADAPTER = AdapterVersion("poet", 5, 1, 8)
OF_RANK_1 = HandleRef("group", 3, "poet", False, (1,), (1,), lora_id=0)


def test_a_canary_names_the_engines_that_visibly_apply_the_adapter() -> None:
    group, train = canary_group(0.5, None, 0.5), Judged()
    assert send_canary(Canary(), train, group, OF_RANK_1, ADAPTER) == (0, 5)  # type: ignore[arg-type]
    ((method, request),) = group.asked
    assert (method, request.adapter, request.seed) == ("probe_adapter", ADAPTER, 0)
    assert request.prompt_ids == [5 + place * 5 for place in range(7)] + [0] and request.sampling.max_new_tokens == 8
    prompt = tuple(request.prompt_ids)
    ((function, version, sequences),) = train.asked
    assert function is adapter_push.log_probs_of_trainer and version == 5
    assert sequences == [(*prompt, 7, 0), (*prompt, 8, 8), (*prompt, 7, 5)], "each once"
    assert not request.sampling.cuts
    group.config.returns_masks = True
    send_canary(Canary(), train, group, OF_RANK_1, ADAPTER)  # type: ignore[arg-type]
    assert group.asked[-1][1].sampling.top_k == 40, "all words"


@pytest.mark.parametrize("tolerance", [None, 0.1, 0.3])
def test_a_canary_has_the_tolerance_of_the_engines_dtype_or_its_own(tolerance: float | None) -> None:
    group = canary_group(0.5, 0.5, 0.3)
    given = Canary((3, 45), tolerance)
    group.answers["probe_adapter"] = {
        engine: [answer([7, engine], 2, 0.0), answer([8, 8], 2, each)] for engine, each in ((0, 0.5), (2, 0.5), (5, 0.3))
    }
    for dtype, own in (("float32", 1e-4), ("float16", 0.05), ("bfloat16", 0.2)):
        group.config.dtype = dtype
        used = own if tolerance is None else tolerance
        if used < 0.2:
            with pytest.raises(
                WeightCheckError, match=r"engine 5: poet@5#1: log-probs are 2\.0e-01 .*: it is applied wrongly"
            ):
                send_canary(given, Judged(), group, OF_RANK_1, ADAPTER)  # type: ignore[arg-type]
        else:
            found = send_canary(given, Judged(), group, OF_RANK_1, ADAPTER)  # type: ignore[arg-type]
            assert found == (() if used == 0.3 else (0, 2)), "visible is what is more than twice the tolerance"
    assert group.asked[0][1].prompt_ids == [3, 5], "ids of the vocabulary"


def test_a_canary_proves_nothing_where_nobody_answers_or_the_trainer_has_moved_on() -> None:
    train = Judged()
    assert send_canary(Canary(), train, canary_group(None, DEAD, None), OF_RANK_1, ADAPTER) == ()  # type: ignore[arg-type]
    assert not train.asked
    moved = Judged(moved=True)
    assert send_canary(Canary(), moved, canary_group(0.5, 0.5, 0.5), OF_RANK_1, ADAPTER) == ()  # type: ignore[arg-type]
    with pytest.raises(EngineDirtyError, match="engine 2 is dirty"):
        send_canary(Canary(), train, canary_group(0.5, DIRTY, DEAD), OF_RANK_1, ADAPTER)  # type: ignore[arg-type]
    assert not train.asked


@pytest.mark.parametrize(
    "error", [None, WeightSyncError("gone"), PermissionError(13, "denied"), RuntimeError("unable to open file, mode 0600")]
)
def test_a_segment_that_this_rank_may_not_open_is_no_error_of_one_rank(error: Exception | None) -> None:
    def at(place: Segment) -> str:
        if error is not None:
            raise error
        return f"memory of {place.path}"

    memories: Any = SimpleNamespace(at=at)
    assert adapter_push._mapped(memories, Segment("here", 8)) == (None if error else "memory of here")
    assert adapter_push._mapped(memories, None) is None


def test_ranks_that_took_the_place_of_others_are_asked_anew_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    present, gauges = [Ranks(), Ranks()], list[tuple[Any, ...]]()
    monkeypatch.setattr(adapter_push, "pinned", lambda train: present[0])
    monkeypatch.setattr("actors.cluster.prometheus.set_gauge", lambda name, value, **tags: gauges.append((value, tags)))
    made = Made()
    made.push.push()
    before = present.pop(0)
    asked = len(before.ran)
    present[0].staged = STAGED._replace(version=6)
    for _ in range(2):
        assert made.push.push().version == 6
    assert [function for function, *_ in present[0].ran] == [describe_source, stage_adapter, stage_adapter]
    assert len(before.ran) == asked
    assert gauges == [(version, {"tenant": "poet"}) for version in (5, 6, 6)]


def test_a_push_is_over_when_its_training_group_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ended(Ranks):
        ended = False

    monkeypatch.setattr(adapter_push, "TrainGroup", Ended)
    monkeypatch.setattr(adapter_push, "pinned", lambda train: train)
    made: Any = Made()
    assert not made.push.is_over
    made.push._train = Ended()
    assert not made.push.is_over
    made.push._train.ended = True
    assert made.push.is_over


PEFT = "base_model.model.m"
OF_A_DIRECTORY = PackedFactors.of(
    {
        f"{PEFT}.up.lora_A.weight": (torch.ones(4, 3), 1.0),
        f"{PEFT}.up.lora_B.weight": (torch.ones(50, 4), 1.0),
        f"{PEFT}.words.lora_embedding_A": (torch.ones(6, 70), 1.0),
        f"{PEFT}.words.lora_embedding_B": (torch.ones(20, 6), 1.0),
    },
    "float32",
)


class Serving(Group):
    """Also what it serves by name."""

    def __init__(self) -> None:
        super().__init__()
        self.adapters: dict[str, AdapterVersion] = {}


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Directories that were read, each with :data:`OF_A_DIRECTORY`; or with what is put before."""
    found: list[Any] = []

    def of(directory: Any, dtype: str) -> PackedFactors:
        given = found.pop() if found and isinstance(found[-1], PackedFactors) else OF_A_DIRECTORY
        found.append((directory, dtype))
        return given

    monkeypatch.setattr(PackedFactors, "read", of)
    monkeypatch.setattr(adapter_push.ray, "put", lambda packed: ("stored", packed))
    return found


def test_a_directory_is_served_under_its_name_with_its_largest_rank(read: list[Any]) -> None:
    group: Any = Serving()
    first, second = push_directory(group, "mine", "there"), push_directory(group, "other", Path("here"))
    assert read == [("there", "float32"), (Path("here"), "float32")]
    assert (first.tenant, first.version, first.rank) == ("mine", 0, 6) and second.number > first.number
    assert group.served == PushedAdapter(second, ("stored", OF_A_DIRECTORY), OF_A_DIRECTORY.digest)
    pushed = [each for each in group.asked if each[0] == "push_adapter"]
    assert pushed[0] == ("push_adapter", first, ("stored", OF_A_DIRECTORY), OF_A_DIRECTORY.digest)
    assert [each[1] for each in group.asked if each[0] == "require_pushable"] == [first, second]
    assert not group.is_changing and not any(each[0] == "drop_adapter" for each in group.asked)


def test_a_directory_that_cannot_be_served_leaves_nothing_in_engines(read: list[Any]) -> None:
    group: Any = Serving()
    group.adapters = {"mine": ADAPTER}
    with pytest.raises(RolloutError, match="adapter='mine' is served already; choose another name"):
        push_directory(group, "mine", "there")
    infinite = PackedFactors.of({f"{PEFT}.up.lora_A.weight": (torch.full((1, 2), torch.inf), 1.0)}, "float32")
    read.append(infinite)
    with pytest.raises(WeightCheckError, match=r"^there: base_model\.model\.m\.up\.lora_A\.weight has values that are not"):
        push_directory(group, "other", "there")
    assert not group.asked
    group.refuses = {"require_pushable": RolloutError("merged")}
    with pytest.raises(RolloutError, match="merged"):
        push_directory(group, "other", "there")
    assert not any(each[0] == "push_adapter" for each in group.asked)
    group.refuses, group.answers = {}, {"push_adapter": {2: WeightCheckError("rank 6 is more than the 4")}}
    with pytest.raises(WeightCheckError, match="rank 6 is more"):
        push_directory(group, "other", "there")
    (dropped,) = [each[1] for each in group.asked if each[0] == "drop_adapter"]
    assert (dropped.tenant, group.served) == ("other", None)
    group.answers = {"push_adapter": {0: DEAD}}
    assert push_directory(group, "other", "there").tenant == "other", "the others serve it"
    group.answers = {"push_adapter": {2: EngineDeadError("engine 2 died"), 5: DEAD_TOO}}
    with pytest.raises(EngineDeadError, match="engine 2 died"):
        push_directory(group, "third", "there")
    assert group.served.adapter.tenant == "other" and group.asked[-1][0] == "push_adapter", "nobody is left to drop it"
