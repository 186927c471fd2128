"""A weight sync from its options to its end: plans, transports that are chosen and closed, reports and traces."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from actors.sync import gpu_transports
from actors.sync import push as push_module
from actors.sync.gpu_transports import CudaIpcTransport, EngineClient, NcclTransport, StreamingTransport
from actors.sync.push import WeightSync, choose_transport, make_transport
from actors.sync.report import PushClock, PushReport
from actors.sync.staged_transports import PushPlan, StagedTransport
from actors.train.context import HandleRef
from rl_backend.contracts import (
    ConfigError,
    EngineDeadError,
    EngineDirtyError,
    RLBackendError,
    TensorInfo,
    UnsupportedError,
    WeightSyncError,
)
from rl_backend.trace.recorder import recorder

INFOS = (TensorInfo.of("a", (2, 3), torch.float32), TensorInfo.of("b", (5,), torch.float32))
PLAN = PushPlan("key", None, "float32", None, 4, INFOS, "node", "host")


class Engines:
    """Engines by number, each with its GPUs, on one node."""

    def __init__(self, *gpus: tuple[str, ...], node_id: str = "node") -> None:
        self.engines = tuple(range(len(gpus)))
        self.infos = {
            number: SimpleNamespace(
                name=f"engine {number}",
                device="cuda" if devices else "cpu",
                device_ids=devices,
                node_id=node_id,
                host="host",
                pid=100 + number,
            )
            for number, devices in enumerate(gpus)
        }
        self.lost_engines: dict[int, RLBackendError] = {}
        self.config = SimpleNamespace(dtype="float32", tensor_parallel=2, py_executable=None)
        self.answers: dict[str, dict[int, Any]] = {}
        self.asked: list[tuple[Any, ...]] = []
        self.attached = 0
        self.last_sync = ""
        self.heals, self.pushing, self.require_hope = False, nullcontext(), lambda: None

    @property
    def engine_set(self) -> Engines:
        return self

    def fixed(self) -> Engines:
        return self

    def attach_weight_sync(self) -> None:
        self.attached += 1

    def call(self, method: str, *args: Any) -> dict[int, Any]:
        self.asked.append((method, *args))
        return {engine: self.answers.get(method, {}).get(engine) for engine in self.engines}

    def abandon(self, engines: Any, reason: str, *, kill: bool) -> dict[int, Any]:
        self.asked.append(("abandon", list(engines), reason, kill))
        return {engine: EngineDirtyError(f"engine {engine} is dirty") for engine in engines}

    def actors(self) -> list[Any]:
        return [f"actor {engine}" for engine in self.engines]


@pytest.mark.parametrize(
    ("trainer", "engines", "node", "expected"),
    [
        (("A", "B"), [("A",), ("B",)], "node", "cuda_ipc"),
        (("A", "B"), [("A",), ("C",)], "node", "shared_memory"),  # two members on GPU A
        (("A", "B"), [("A",), ("C",)], "other", "gloo"),
        (("A",), [("B",), ("C", "D")], "other", "nccl"),
        (("A",), [("B",), ("B",)], "node", "shared_memory"),
        ((), [("B",)], "node", "shared_memory"),
        (("A",), [("B",), ()], "node", "shared_memory"),
        (("A", "B"), [("B",), ("C",)], "other", "nccl"),  # rank 0 alone sends
    ],
)
def test_weights_move_between_gpus_where_every_member_has_one(
    trainer: tuple[str, ...], engines: list[tuple[str, ...]], node: str, expected: str
) -> None:
    plan = PushPlan("key", None, "float32", None, 0, (), "node", "host", trainer)
    made: Any = Engines(*engines, node_id=node)
    assert choose_transport(plan, made).name == expected
    made.engines = made.engines[:1]
    made.infos[9] = SimpleNamespace(device="cpu", device_ids=(), node_id="far away", host="")
    assert choose_transport(plan, made).name, "of those that live alone"


@pytest.mark.parametrize("transport", [NcclTransport, CudaIpcTransport])
def test_transports_between_gpus_refuse_a_side_without_one(transport: type[NcclTransport | CudaIpcTransport]) -> None:
    mixed: Any = Engines(("B",), (), ())
    assert "but the training group, engine 1, engine 2 has none; use transport=" in transport().problem(PLAN, mixed)
    plan = PushPlan("key", None, "float32", None, 0, (), "node", "host", ("A",))
    assert "but engine 1, engine 2 has none" in transport().problem(plan, mixed)


def test_gpus_that_a_transport_cannot_share_or_must_share_are_named() -> None:
    plan = PushPlan("key", None, "float32", None, 0, (), "node", "host", ("A", "B"))
    shared: Any = Engines(("B", "C"), ("C",))
    assert "engine 0 and engine 1 share the GPU C, which members" in NcclTransport().problem(plan, shared)
    with_source: Any = Engines(("B",), ("A",))
    assert "rank 0 of the training group and engine 1 share the GPU A" in NcclTransport().problem(plan, with_source)
    assert not NcclTransport().problem(plan, Engines(("B", "C"), ("D",)))  # type: ignore[arg-type]
    assert not CudaIpcTransport().problem(plan, Engines(("A",), ("A", "B")))  # type: ignore[arg-type]
    problem = CudaIpcTransport().problem(plan, Engines(("B",), ("D", "A", "C")))  # type: ignore[arg-type]
    assert problem == "engine 1 uses GPUs without a training rank (C, D); use transport='nccl'"


def test_transports_of_vllms_own_are_not_for_engines_of_another_environment() -> None:
    plan = PushPlan("key", None, "float32", None, 0, (), "node", "host", ("A", "B"))
    for transport, engines in ((NcclTransport(), Engines(("C",))), (CudaIpcTransport(), Engines(("A",)))):
        assert choose_transport(plan, engines).name == transport.name  # type: ignore[arg-type]
        assert not transport.problem(plan, engines)  # type: ignore[arg-type]
        engines.config.py_executable = "/engines/bin/python"
        assert choose_transport(plan, engines).name == "shared_memory"  # type: ignore[arg-type]
        assert "RolloutConfig.py_executable gives engines another environment" in transport.problem(plan, engines)  # type: ignore[arg-type]


def test_a_transport_is_made_by_its_name() -> None:
    for name in ("shared_memory", "gloo", "nccl", "cuda_ipc"):
        assert make_transport(name).name == name
    with pytest.raises(ConfigError, match="transport='ssh': expected auto or one of shared_memory, gloo, nccl, cuda_ipc"):
        WeightSync(None, Engines(()), transport="ssh")  # type: ignore[arg-type]


class Staged(StagedTransport):
    """Keeps what becomes of it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.closed: list[Any] = []
        self.checked: list[PushPlan] = []
        self.error: Exception | None = None

    def problem(self, plan: PushPlan, rollout: Any) -> str:
        self.checked.append(plan)
        if self.error:
            raise self.error
        return ""

    def stage(self, plan: PushPlan, train: Any, rollout: Any) -> Any:
        raise NotImplementedError

    def close(self, train: Any, rollout: Any) -> None:
        self.closed.append((train, rollout))
        if self.error:
            raise self.error


def test_auto_chooses_again_when_the_engines_change_and_closes_the_transport_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Staged] = []
    names = iter(["gloo", "gloo", "shared_memory"])

    def choose(plan: PushPlan, rollout: Any) -> Staged:
        made.append(Staged(next(names)))
        return made[-1]

    monkeypatch.setattr(push_module, "choose_transport", choose)
    train, engines = object(), Engines((), ())
    sync: Any = WeightSync(train, engines)  # type: ignore[arg-type]
    assert sync._choose(PLAN, engines) is sync._choose(PLAN, engines) is made[0]
    engines.infos[1].pid += 1
    assert sync._choose(PLAN, engines) is made[0] and len(made) == 2 and not made[0].closed, "of the same kind"
    assert sync._choose(PLAN, engines) is made[0] and len(made) == 2
    engines.engines = (0,)
    assert sync._choose(PLAN, engines) is made[2] and made[0].closed == [(train, engines)] and not made[1].closed
    sync.close()
    sync.close()
    assert made[2].closed == [(train, engines)]
    monkeypatch.setattr(push_module, "choose_transport", lambda plan, rollout: Staged("new"))
    assert sync._choose(PLAN, engines).name == "new"


def test_a_transport_that_was_asked_for_is_kept_and_made_anew_after_a_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(push_module._TRANSPORTS, "gloo", lambda: Staged("gloo"))
    engines: Any = Engines(())
    sync: Any = WeightSync(None, engines, transport="gloo")  # type: ignore[arg-type]
    first = sync._choose(PLAN, engines)
    engines.infos[0].pid += 1
    assert sync._choose(PLAN, engines) is first
    sync.close()
    assert len(first.closed) == 1 and sync._choose(PLAN, engines) is not first
    assert engines.attached == 1


@pytest.mark.parametrize("fails", [False, True])
def test_an_error_on_closing_is_beside_the_error_that_ended_the_context(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    monkeypatch.setitem(push_module._TRANSPORTS, "gloo", lambda: Staged("gloo"))
    sync: Any = WeightSync(None, Engines(()), transport="gloo")  # type: ignore[arg-type]
    sync._transport.error = WeightSyncError("cannot close")

    def body() -> None:
        with sync as entered:
            assert entered is sync
            if fails:
                raise ZeroDivisionError

    if fails:
        with pytest.raises(ZeroDivisionError) as raised:
            body()
        assert raised.value.__notes__ == ["WeightSync.close() failed as well: cannot close"]
    else:
        with pytest.raises(WeightSyncError, match="cannot close"):
            body()


def test_what_cannot_be_pushed_is_refused_when_a_sync_is_made() -> None:
    engines: Any = Engines(())
    critic = HandleRef("group", 0, "value", False, (0,), (0,), head="values")
    with pytest.raises(UnsupportedError, match="model 'value' has head='values': an engine samples from log-probs"):
        WeightSync(engines, engines, critic)
    for options in ({"merged": True}, {"directory": ""}):
        with pytest.raises(ConfigError, match=f"WeightSync.{next(iter(options))}"):
            WeightSync(engines, engines, **options)
    assert not engines.attached
    tenant = HandleRef("group", 0, "poet", False, (0,), (0,), lora_id=0)
    assert WeightSync(engines, engines, tenant, merged=True)._merged == "poet" and engines.attached == 1
    assert WeightSync(engines, engines, HandleRef("group", 0, "policy", False, (0,), (0,)))._merged == ""


def test_a_push_says_what_it_did_and_is_traced_and_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    exported: list[tuple[Any, ...]] = []
    for name in ("observe", "count"):
        monkeypatch.setattr(
            f"actors.cluster.prometheus.{name}",
            lambda metric, value, name=name, **tags: exported.append(
                (name, metric.removeprefix("rl_backend_push"), value, tags)
            ),
        )
    engines: Any = Engines((), ())
    engines.lost_engines = {7: EngineDeadError("dead before")}
    monkeypatch.setitem(push_module._TRANSPORTS, "gloo", lambda: Staged("gloo"))
    asked: list[Any] = []
    plans = [PLAN, PushPlan("key", None, "float32", None, 4, (), "node", "host")]

    def run(function: Any, *args: Any) -> list[Any]:
        asked.append((function.__name__, *args))
        return [("", "host", plans[0]), ("", "elsewhere", None)]

    train: Any = SimpleNamespace(run_on_ranks=run)
    sync: Any = WeightSync(train, engines, "ref", transport="gloo", byte_budget=64)

    def staged(transport: Any, plan: Any, rollout: Any, clock: PushClock) -> tuple[int, ...]:
        clock.sent = (30, 14)
        return 0, 1

    monkeypatch.setattr(sync, "_push_staged", staged)
    recorder.start()
    report = sync.push()
    events = {event.name: event.arguments for event in recorder.take_batch(stop=True).events}
    assert asked == [("describe_export", sync._key, "ref", "float32", 64)]
    assert (report.version, report.nbytes, report.transport) == (4, 44, "gloo")
    assert (report.engines, report.skipped, list(report.seconds)) == ((0, 1), (7,), ["plan", "total"])
    assert events["push"] == {"weight_version": 4, "nbytes": 44, "transport": "gloo"}
    assert events["plan"] == {"weight_version": 4} and engines.last_sync == sync._key
    assert sync._transport.checked == [replace(PLAN, on_one_host=False)]
    assert [(kind, metric, tags.get("phase")) for kind, metric, _, tags in exported] == [
        ("observe", "_seconds", "plan"),
        ("observe", "_seconds", "total"),
        ("count", "es_total", None),
        ("count", "_bytes_total", None),
        ("count", "_rank_bytes_total", None),
        ("count", "_rank_bytes_total", None),
    ]
    assert [value for *_, value, _ in exported[2:]] == [1, 44, 30, 14]
    assert all(tags["transport"] == "gloo" for *_, tags in exported) and report.sent == (30, 14)
    assert [tags["rank"] for *_, tags in exported[4:]] == ["0", "1"]
    plans[0] = plans[1]
    with pytest.raises(WeightSyncError, match="the trainer has no weights to export"):
        sync.push()
    plans[0], sync._transport.error = PLAN, UnsupportedError("cannot serve them")
    engines.last_sync = "another"
    with pytest.raises(UnsupportedError, match="cannot serve them"):
        sync.push()
    assert engines.last_sync == "another", "nothing was pushed"


def test_a_clock_has_the_seconds_of_each_phase_one_that_fails_too(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([100.0, 101.0, 103.0, 110.0, 114.0, 120.0])
    monkeypatch.setattr("actors.sync.report.time.perf_counter", lambda: next(now))
    clock = PushClock()
    with clock.phase("stage"):
        pass
    with pytest.raises(ZeroDivisionError), clock.phase("load"):
        raise ZeroDivisionError
    assert clock.seconds() == {"stage": 2.0, "load": 4.0, "total": 20.0}
    assert PushReport(1, 2, {}, "gloo", (), ()).skipped == ()


class Streams(StreamingTransport):
    name = "streams"

    def __init__(self, error: BaseException | None = None) -> None:
        self.error, self.done = error, list[str]()

    def problem_of_gpus(self, plan: PushPlan, rollout: Any) -> str:
        return ""

    problem = problem_of_gpus

    def connect(self, plan: PushPlan, train: Any, rollout: Any) -> None:
        self.done.append("connect")

    def reconnect(self) -> None: ...

    def send(self, plan: PushPlan, train: Any, rollout: Any) -> dict[str, Any]:
        self.done.append("send")
        if self.error:
            raise self.error
        return {"checksums": 1}


@pytest.mark.parametrize("kills", [True, False])
def test_engines_whose_update_cannot_end_are_abandoned(monkeypatch: pytest.MonkeyPatch, kills: bool) -> None:
    monkeypatch.setattr(Streams, "kills_abandoned", kills)
    engines: Any = Engines(("A",), ("B",), ("C",))
    refused = EngineDirtyError("engine 1 was dirty")
    engines.answers = {"begin_update": {1: refused}}
    outcomes = Streams().stream(PLAN, None, engines)  # type: ignore[arg-type]
    assert outcomes[1] is refused and {str(outcomes[engine]) for engine in (0, 2)} == {
        "engine 0 is dirty",
        "engine 2 is dirty",
    }
    assert engines.asked[1:] == [("abandon", [0, 2], "another engine could not begin: engine 1 was dirty", False)]
    engines.answers, engines.asked = {}, []
    with pytest.raises(KeyboardInterrupt):
        Streams(KeyboardInterrupt("Ctrl-C")).stream(PLAN, None, engines)  # type: ignore[arg-type]
    assert engines.asked[1:] == [("abandon", [0, 1, 2], "the trainer failed: KeyboardInterrupt: Ctrl-C", kills)]


def test_a_streamed_push_has_each_engines_first_error() -> None:
    engines: Any = Engines(("A",), ("B",), ("C",))
    first, second, third = (EngineDirtyError(text) for text in ("changed bytes", "not finished", "follows"))
    engines.answers = {"update": {0: first}, "finish_update": {0: third, 2: second}}
    transport = Streams()
    assert transport.stream(PLAN, None, engines) == {0: first, 1: None, 2: second}  # type: ignore[arg-type]
    assert transport.done == ["connect", "send"]
    assert engines.asked == [("begin_update",), ("update", {"checksums": 1}), ("finish_update", 4)]


def test_each_engine_joins_behind_the_workers_of_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    hanging: list[Any] = []
    monkeypatch.setattr(
        gpu_transports,
        "ray",
        SimpleNamespace(wait=lambda calls, **options: (calls, hanging), get=lambda done: told.append(len(done))),
    )
    actors = [SimpleNamespace(init_transfer=SimpleNamespace(remote=told.append)) for _ in range(3)]
    client = EngineClient("nccl", actors, workers=2)
    message = {"rank_offset": 1, "port": 5}
    client.init_weight_transfer_engine(message)
    assert told == [*({"kind": "nccl", "rank_offset": offset, "port": 5} for offset in (1, 3, 5)), 3]
    assert message == {"rank_offset": 1, "port": 5}
    told.clear()
    EngineClient("cuda_ipc", actors[:1], workers=2).init_weight_transfer_engine({"packed": True})
    assert told == [{"kind": "cuda_ipc", "packed": True}, 1]
    hanging.append("one")
    with pytest.raises(
        WeightSyncError, match="'nccl': 1 engines have not joined the transfer for 600 s; restart them"
    ) as late:
        client.init_weight_transfer_engine({})
    assert late.value.details == {"transport": "nccl"}


@pytest.mark.parametrize("kind", ["nccl", "cuda_ipc"])
@pytest.mark.parametrize(("byte_budget", "bucket"), [(None, 2**30), (30, 30), (8, 24)])
def test_a_rank_opens_its_side_of_the_transfer_in_place_of_the_one_before(
    monkeypatch: pytest.MonkeyPatch, kind: str, byte_budget: int | None, bucket: int
) -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    ended: Any = []
    made: list[Any] = []

    def init(info: Any, *, client: Any, source: Any) -> Any:
        made.append((info, client, source))
        group = SimpleNamespace(destroy=lambda: ended.append("new"))
        return SimpleNamespace(model_update_group=group, source=source)

    monkeypatch.setattr(WeightTransferTrainerFactory, "trainer_init", init)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "10.0.0.9")
    monkeypatch.setattr(gpu_transports, "with_free_port", lambda host, make: ended.append(host) or make(7777))
    old = SimpleNamespace(model_update_group=None, shutdown=lambda: ended.append("old"))
    before: Any = None
    context: Any = SimpleNamespace(state={"key": gpu_transports.Stream(old, before)}, rank=3)
    client = EngineClient(kind, ["a", "b", "c"], workers=2)
    plan = PushPlan("key", None, "float32", byte_budget, 4, INFOS, "node", "host")
    gpu_transports.open_stream(context, plan, client)
    ((info, given, source),) = made
    assert given is client and source.plan is plan and source.context is context
    assert info.packed_buffer_size_bytes == bucket and info.rank == 3 and context.state["key"].source is source
    if kind == "nccl":
        assert (info.master_address, info.master_port, info.world_size) == ("10.0.0.9", 7777, 7)
        assert ended == ["old", "10.0.0.9"] and client.stop_sending is not None
        client.stop_sending()
        assert ended[-1] == "new"
    else:
        assert info.packed and client.stop_sending is None and ended == ["old"]


def test_a_rank_sends_the_plan_of_this_push_and_answers_with_its_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: done.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    source = SimpleNamespace(plan="of the push before", checksums={"a": torch.tensor(7), "b": torch.tensor(-1)})
    engine, exported = SimpleNamespace(send_weights=lambda: done.append(f"send {source.plan.version}")), cast(Any, source)
    context: Any = SimpleNamespace(state={"key": gpu_transports.Stream(engine, exported)})
    assert gpu_transports.send_stream(context, PLAN) == {"a": 7, "b": -1}
    assert done == ["synchronize", "send 4"]


READS: tuple[Any, ...] = (
    {"a": [((0, 1), (0, 3))], "b": [((0, 5),)]},
    {"a": [((1, 2), (0, 3))], "b": [((0, 5),)]},
)
"""Of two workers: a row each of the first tensor, and both all of the second."""


def test_tensors_are_cut_where_workers_read_them_and_engines_are_asked_once_for_each_plan() -> None:
    engines: Any = Engines((), ())
    engines.answers = {"weight_reads": dict.fromkeys((0, 1), READS)}
    sync: Any = WeightSync(None, engines)  # type: ignore[arg-type]
    tiles = sync._tiles(PLAN, engines)
    assert [(tile.tensor, tile.start, tile.shape, tile.workers) for tile in tiles] == [
        ("a", (0, 0), (1, 3), (0,)),
        ("a", (1, 0), (1, 3), (1,)),
        ("b", (0,), (5,), (0, 1)),
    ]
    assert sync._tiles(replace(PLAN, version=5), engines) is tiles and engines.asked == [("weight_reads",)]
    assert [tile.tensor for tile in sync._tiles(replace(PLAN, infos=INFOS[1:]), engines)] == ["b"]
    assert sync._tiles(PLAN, engines) == tiles and len(engines.asked) == 3
    engines.answers["weight_reads"][1] = EngineDirtyError("engine 1 is dirty")
    with pytest.raises(EngineDirtyError, match="engine 1 is dirty"):
        sync._tiles(replace(PLAN, infos=INFOS[:1]), engines)
    assert replace(PLAN, tiles=tiles).received == (12 + 20, 12 + 20) and PLAN.received == (24 + 20,)
    assert replace(PLAN, tiles=tiles[1:2]).received == (0, 12)
    engines.config.tensor_parallel = 1
    assert sync._tiles(PLAN, engines) == (), "whole tensors"
    engines.config.tensor_parallel, engines.engines = 2, ()
    assert sync._tiles(PLAN, engines) == () and len(engines.asked) == 4
