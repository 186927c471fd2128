"""The streaming transports without a GPU: what their source yields, and what their receivers accept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from actors.sync.gpu_transports import (
    EngineClient,
    ExportSource,
    NcclTransport,
    Stream,
    as_vllm_drives_it,
    close_stream,
    end_group,
    send_stream,
)
from actors.sync.push import WeightSync
from actors.sync.source import WeightSource
from actors.sync.staged_transports import PushPlan, describe_export, make_plan
from rl_backend.contracts import EngineDeadError, HandleError, WeightCheckError, WeightSyncError
from rl_backend.weights.inspection import device_checksum

WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2, 3), "c": torch.full((2, 3), -2.0)}


class Exports:
    """A trainer whose export yields ``order`` when it is asked for the second time."""

    def __init__(self, order: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        # Ray is not running, and a push of plain tensors needs only the name of its node.
        monkeypatch.setattr("actors.sync.staged_transports.ray.get_runtime_context", lambda: self)
        reads = 0

        def weights() -> Iterator[tuple[str, Tensor]]:
            nonlocal reads
            reads += 1
            yield from ((name, WEIGHTS.get(name, WEIGHTS["a"])) for name in (WEIGHTS if reads == 1 else order))

        self.source = WeightSource(weights)
        self.plan: PushPlan = make_plan(self.source.run_on_ranks(describe_export, "key", None, "float32", None))

    def get_node_id(self) -> str:
        return "node"

    def stream(self) -> ExportSource:
        return self.source.run_on_ranks(lambda context: ExportSource(context, self.plan))[0]


def test_a_stream_yields_what_was_announced_with_a_checksum_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Exports(list(WEIGHTS), monkeypatch).stream()
    assert [(meta.name, meta.dtype, tuple(meta.shape)) for meta in stream.metadata()] == [
        (name, torch.float32, (2, 3)) for name in WEIGHTS
    ]
    assert [(name, tensor.tolist()) for name, tensor in stream] == [(name, t.tolist()) for name, t in WEIGHTS.items()]
    assert list(stream.checksums) == list(WEIGHTS)


class WeightSourceOf033:
    """``WeightSource`` of vLLM 0.33, which has no build for CPUs: ``vllm/distributed/weight_transfer/base.py`` says so."""

    def __init_subclass__(cls) -> None:
        if not isinstance(cls.__dict__["metadata"], cached_property):
            raise TypeError(f"{cls.__name__}.metadata must be a functools.cached_property")

    metadata: Any

    def owned_names(self, rank: int) -> list[str]:
        return [meta.name for meta in self.metadata if meta.owners is None or rank in meta.owners]

    def implements_iter_full(self) -> bool:
        return type(self).iter_full is not WeightSourceOf033.iter_full

    def iter_full(self) -> Iterator[tuple[str, Tensor]]:
        raise NotImplementedError


@dataclass(frozen=True)
class ParamMetaOf033:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owners: tuple[int, ...] | None = None


def test_a_stream_is_what_vllm_0_33_drives(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.weight_transfer import base

    stream = Exports(list(WEIGHTS), monkeypatch).stream()
    assert as_vllm_drives_it(stream) is stream or hasattr(base.WeightSource, "iter_full")
    monkeypatch.setattr(base, "WeightSource", WeightSourceOf033)
    monkeypatch.setattr(base, "ParamMeta", ParamMetaOf033)
    source = as_vllm_drives_it(stream)
    # What the sender of IPC asks of a rank, and what that of NCCL compares as it sends.
    assert source.implements_iter_full() and source.owned_names(3) == list(WEIGHTS)
    for _ in range(2):
        for meta, (name, tensor) in zip(source.metadata, source.iter_full(), strict=True):
            assert (name, tensor.dtype, tuple(tensor.shape)) == (meta.name, meta.dtype, meta.shape)
            assert torch.equal(tensor, WEIGHTS[name])
        assert list(stream.checksums) == list(WEIGHTS)


def test_a_receiver_that_is_told_only_what_has_changed_remembers_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    from actors.rollout.vllm.streaming import CheckedNcclWeightTransferEngine, NCCLWeightTransferEngine

    told: dict[Any, list[str]] = {}
    received: list[list[str]] = []

    def receive(engine: Any, names: list[str]) -> None:
        """As ``receive_weights`` of vLLM 0.33, which keeps the last metadata by its model."""
        names = told.setdefault(engine.model, names)
        engine.model.load_weights([(name, WEIGHTS[name]) for name in names])

    monkeypatch.setattr(NCCLWeightTransferEngine, "start_weight_update", lambda engine: None)
    monkeypatch.setattr(NCCLWeightTransferEngine, "receive_weights", receive)
    receiver: Any = CheckedNcclWeightTransferEngine.__new__(CheckedNcclWeightTransferEngine)
    receiver.model = SimpleNamespace(load_weights=lambda weights: received.append([name for name, _ in weights]))
    checksums = {name: int(device_checksum(WEIGHTS[name])) for name in ("a", "b")}
    for names in (["a", "b"], []):
        receiver.start_weight_update()
        with pytest.raises(WeightSyncError, match="received bytes differ"):
            receiver.receive_weights(receiver.parse_update_info({"checksums": checksums}))
        receiver.receive_weights(names)
        receiver.receive_weights(receiver.parse_update_info({"checksums": checksums}))
    assert received == [["a", "b"], ["a", "b"]]


@pytest.mark.parametrize(
    ("order", "before"), [(["b", "a", "c"], 0), (["a", "c", "b"], 1), (["a", "b"], 2), (["a", "b", "x"], 2), ([*"abca"], 3)]
)
def test_a_stream_ends_before_the_first_tensor_that_is_not_the_one_announced(
    order: list[str], before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []
    stream = Exports(order, monkeypatch).stream()

    def send() -> None:
        for name, _ in stream:
            sent.append(name)

    with pytest.raises(WeightCheckError, match="the export"):
        send()
    assert sent == list(WEIGHTS)[:before]


def test_what_an_export_began_on_a_stream_is_done_before_it_goes_on_with_another(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []

    class Stream:
        device = torch.device("cpu")

        def __init__(self, name: str) -> None:
            self.name = name

        def synchronize(self) -> None:
            waited.append(self.name)

    first, second = Stream("first"), Stream("second")
    present = [first]
    monkeypatch.setattr("actors.sync.gpu_transports._present_stream", lambda: present[-1])
    tensors = iter(Exports(list(WEIGHTS), monkeypatch).stream())
    next(tensors)
    assert not waited
    present.append(second)
    next(tensors)
    assert waited == ["first"]
    next(tensors)
    assert waited == ["first"]


def test_tensors_of_a_cpu_are_sent_from_the_device_of_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.sync.gpu_transports._present_stream", lambda: SimpleNamespace(device=torch.device("meta")))
    stream = Exports(list(WEIGHTS), monkeypatch).stream()
    monkeypatch.setattr("actors.sync.gpu_transports.device_checksum", lambda tensor: tensor)
    assert {tensor.device.type for _, tensor in stream} == {"meta"}


def test_a_transport_whose_engines_receive_from_another_push_connects_again(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    infos = {0: SimpleNamespace(pid=7)}
    engines: Any = SimpleNamespace(engines=(0,), infos=infos, config=SimpleNamespace(tensor_parallel=1), actors=list)
    train: Any = SimpleNamespace(run_on_ranks=lambda function, plan, client: opened.append(plan.key))
    rollout: Any = SimpleNamespace(engine_set=engines, last_sync="", attach_weight_sync=lambda: None, pushing=nullcontext())
    engines.lost_engines, engines.fixed = {}, lambda: engines
    syncs = [WeightSync(train, rollout, transport="nccl") for _ in range(2)]
    plans = {sync._key: SimpleNamespace(key=sync._key, version=1, nbytes=0) for sync in syncs}
    for sync in syncs:
        monkeypatch.setattr(sync, "_plan", partial(plans.get, sync._key))
        monkeypatch.setattr(sync._transport, "problem", lambda plan, rollout: "")
        push = partial(_connect_alone, train)
        monkeypatch.setattr(sync, "_push_streaming", push)
    first, second = syncs
    for sync in (first, first, second, first, first):
        sync._push()
    assert opened == [first._key, second._key, first._key]


def _connect_alone(train: Any, transport: Any, plan: Any, rollout: Any, clock: Any) -> tuple[int, ...]:
    transport.connect(plan, train, rollout)
    return (0,)


class Group:
    """Stands for a communicator of vLLM's."""

    ended = 0

    def destroy(self) -> None:
        self.ended += 1


def answers(monkeypatch: pytest.MonkeyPatch, outcomes: dict[str, Exception | None]) -> EngineClient:
    """A client of engines of these names that answer so, in this order; those without an outcome never do."""

    def wait(calls: list[str], timeout: float) -> tuple[list[str], list[str]]:
        found = next((name for name in outcomes if name in calls), None)
        return ([], calls) if found is None else ([found], [name for name in calls if name != found])

    def get(done: list[str]) -> None:
        (name,) = done
        error = outcomes[name]
        if error is not None:
            raise error

    monkeypatch.setattr("actors.sync.gpu_transports.ray", SimpleNamespace(wait=wait, get=get))
    actors = [SimpleNamespace(update=SimpleNamespace(remote=lambda info, name=name: name)) for name in ("a", "b")]
    return EngineClient("nccl", actors, 1)


def test_a_sender_stops_when_an_engine_receives_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    for outcomes, error in (
        ({"b": EngineDeadError("engine 1 died")}, "engine 1 died"),
        ({"a": None}, "1 engines have not answered the update"),
    ):
        client, group = answers(monkeypatch, outcomes), Group()
        client.stop_sending = partial(end_group, SimpleNamespace(model_update_group=group))
        with pytest.raises((EngineDeadError, WeightSyncError), match=error):
            client.update_weights({})
        assert group.ended == 1
    client, group = answers(monkeypatch, {"a": None, "b": None}), Group()
    client.stop_sending = partial(end_group, SimpleNamespace(model_update_group=group))
    client.update_weights({})
    assert group.ended == 0
    # A sender that waits for no engine goes on: the driver hears of the failure at the end.
    answers(monkeypatch, {"a": EngineDeadError("engine 0 died"), "b": None}).update_weights({})


def test_connections_that_end_leave_no_group_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    from actors.rollout.vllm.streaming import CheckedNcclWeightTransferEngine

    group = Group()
    engine: Any = SimpleNamespace(model_update_group=group, shutdown=lambda: None)
    context: Any = SimpleNamespace(state={"key": Stream(engine, None)})  # type: ignore[arg-type]
    close_stream(context, "key")
    close_stream(context, "key")
    receiver = CheckedNcclWeightTransferEngine.__new__(CheckedNcclWeightTransferEngine)
    receiver.model_update_group = group
    receiver.shutdown()
    receiver.shutdown()
    assert group.ended == 2 and context.state == {}


def test_a_worker_that_receives_another_way_ends_the_way_before(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    # As if an engine's process had imported it: what that changes in vLLM and torch is not for this process.
    monkeypatch.setitem(WeightTransferEngineFactory._registry, "rl_backend", None)
    from actors.rollout.vllm import worker

    happened: list[str] = []

    class Receiver:
        kind = ""

        def __init__(self, *of_worker: Any) -> None:
            assert of_worker == ("config", "vllm config", "device", "model")
            happened.append(f"make {self.kind}")

        def parse_init_info(self, settings: dict[str, Any]) -> dict[str, Any]:
            return {**settings, "for": self.kind}

        def init_transfer_engine(self, info: dict[str, Any]) -> None:
            happened.append(f"connect {info['for']} to {info['to']}")

        def receive_weights(self, info: str) -> None:
            happened.append(f"{self.kind} receives {info}")

        def shutdown(self) -> None:
            happened.append(f"end {self.kind}")

    kinds = {place: type(kind, (Receiver,), {"kind": kind}) for kind, place in worker._KINDS.items()}
    monkeypatch.setattr(worker, "resolve_obj_by_qualname", kinds.__getitem__)
    switching: Any = worker.SwitchingWeightTransferEngine.__new__(worker.SwitchingWeightTransferEngine)
    switching.config, switching.vllm_config, switching.device, switching.model = "config", "vllm config", "device", "model"
    switching.shutdown()
    expected = []
    for number, kind in enumerate(("staged", "nccl", "nccl", "cuda_ipc", "staged")):
        before = happened[-1].partition(" ")[0] if happened else ""
        expected += [f"end {before}"] if before else []
        message = {"kind": kind, "to": f"place {number}"}
        switching.init_transfer_engine(switching.parse_init_info(message))
        assert message["kind"] == kind, "the message is the caller's"
        switching.receive_weights("weights")
        expected += [f"make {kind}", f"connect {kind} to place {number}", f"{kind} receives weights"]
        assert happened == expected
    switching.shutdown()
    assert happened == [*expected, "end staged"]


def test_a_sync_whose_push_failed_closes_what_ranks_keep_and_one_of_a_group_that_has_ended_nothing() -> None:
    closed: list[str] = []

    def run_on_ranks(function: Any, argument: Any, *others: Any) -> list[Any]:
        if function is send_stream:
            raise WeightSyncError("an engine died")
        if closed and closed[-1] == "second":
            raise HandleError("the group was shut down")
        closed.append(argument if function is close_stream else argument.key)
        return []

    train: Any = SimpleNamespace(run_on_ranks=run_on_ranks)
    engines: Any = SimpleNamespace(engines=(0,), infos={0: SimpleNamespace(pid=7)}, actors=list)
    engines.config = SimpleNamespace(tensor_parallel=1)
    transport = NcclTransport()
    for key in ("first", "second"):
        plan: Any = SimpleNamespace(key=key)
        transport.connect(plan, train, engines)
        with pytest.raises(WeightSyncError):
            transport.send(plan, train, engines)
        transport.close(train, engines)
        transport.close(train, engines)
    assert closed == ["first", "first", "second"]


def test_a_receiver_takes_all_that_is_sent_although_a_loader_refuses_a_part_of_it() -> None:
    from actors.rollout.vllm.streaming import CheckedLoad

    class Model:
        def load_weights(self, weights: list[tuple[str, Tensor]]) -> None:
            loaded.extend(name for name, _ in weights)
            if "b" in loaded:
                raise RuntimeError("out of memory")

    loaded: list[str] = []
    load = CheckedLoad(Model())
    for name, tensor in WEIGHTS.items():
        load.load_weights([(name, tensor)])
    assert loaded == ["a", "b"]
    with pytest.raises(WeightSyncError, match="vLLM could not load them: RuntimeError: out of memory"):
        load.confirm({name: int(device_checksum(tensor)) for name, tensor in WEIGHTS.items()})


def test_a_receiver_refuses_tensors_that_arrive_under_each_others_names() -> None:
    from actors.rollout.vllm.streaming import CheckedLoad

    class Model:
        def load_weights(self, weights: list[tuple[str, Tensor]]) -> None:
            loaded.extend(name for name, _ in weights)

    checksums = {name: int(device_checksum(tensor)) for name, tensor in WEIGHTS.items()}
    for names, refused in ((["a", "b", "c"], []), (["b", "a", "c"], ["a", "b"]), (["a", "b"], ["c"])):
        loaded: list[str] = []
        load = CheckedLoad(Model())
        load.load_weights(zip(names, WEIGHTS.values(), strict=False))
        assert loaded == names
        if refused:
            with pytest.raises(WeightSyncError, match=", ".join(refused)):
                load.confirm(checksums)
        else:
            load.confirm(checksums)
