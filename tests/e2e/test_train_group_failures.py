"""What ends a training group, how it says so, and what it gives back."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Iterator
from typing import Any, Literal

import pytest
import ray
import torch
import torch.distributed as dist

from actors import RankContext, TrainGroup
from actors.train.outcome import Apart, RemoteTraceback
from rl_backend.contracts import (
    BatchError,
    ConfigError,
    GroupFailedError,
    HandleError,
    NativeConfig,
    ParallelConfig,
    RLBackendError,
    RuntimeConfig,
    UnsupportedError,
)
from tests.support.unigram_runtime import UnigramConfig

UNIGRAM = RuntimeConfig(plugins=("tests.support.unigram_runtime",), backend="unigram", hf_path="unused")


@pytest.fixture(autouse=True)
def everything_is_given_back(ray_cluster: None) -> Any:
    before = ray.available_resources()["CPU"]
    yield
    deadline = time.monotonic() + 10
    while ray.available_resources()["CPU"] < before:
        assert time.monotonic() < deadline, f"{ray.available_resources()} after {before} cores before"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def pair(ray_cluster: None) -> Iterator[TrainGroup]:
    """Two ranks, which :func:`test_an_interrupt_while_an_operation_starts_ends_the_group_and_says_so` ends."""
    with TrainGroup(UNIGRAM, num_ranks=2) as group:
        yield group


def fail_on(context: RankContext, rank: int) -> None:
    """One rank fails; its peers wait for it in a collective."""
    if context.rank == rank:
        raise BatchError("this rank has bad data", field="tokens")
    dist.all_reduce(torch.ones(1))


def wait_for_end(group: TrainGroup) -> None:
    """No process of the group is left after a few seconds."""
    deadline = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{info.pid}") for info in group.ranks):
        assert time.monotonic() < deadline, f"{group.ranks} still run"
        time.sleep(0.05)


def store_zeros(context: RankContext, size: int) -> Apart[int]:
    return Apart(size, bytes(size))


def sleep(context: RankContext, seconds: float) -> None:
    time.sleep(seconds)


@pytest.mark.shows("actors: a rank that fails or dies stops its peers within seconds and is named")
def test_a_rank_that_fails_alone_stops_its_peers_at_once() -> None:
    group = TrainGroup(UNIGRAM, num_ranks=2, name="lonely", failure_grace=60.0)
    group.run_on_ranks(sleep, 0.0)  # by now the ranks have imported this file
    start = time.monotonic()
    alone = r"'lonely': rank 1 failed .* ranks \[0\] wait in a collective"
    with pytest.raises(GroupFailedError, match=rf"{alone}.*; rank 0 is in all_reduce .*called from fail_on \(") as ended:
        group.run_on_ranks(fail_on, 1)
    assert time.monotonic() - start < 10.0
    cause = ended.value.__cause__
    assert isinstance(cause, BatchError)
    assert cause.details["field"] == "tokens"
    assert isinstance(cause.__cause__, RemoteTraceback)
    assert "this rank has bad data" in ended.value.details["error"]
    wait_for_end(group)
    with pytest.raises(GroupFailedError, match="rank 1 failed"):
        group.build_model()
    with pytest.raises(GroupFailedError, match="rank 1 failed"):
        group.take_over()
    group.shutdown()


def test_a_rank_killed_in_a_collective_is_named_within_seconds_and_every_copy_learns_of_it() -> None:
    group = TrainGroup(UNIGRAM, num_ranks=2, name="mortal")
    copy: TrainGroup = pickle.loads(pickle.dumps(group))

    def wait_in_collective(context: RankContext) -> None:
        if context.rank == 1:
            time.sleep(60)
        dist.all_reduce(torch.ones(1))  # the peer notices first

    future = group.submit_on_ranks(wait_in_collective)
    time.sleep(0.3)
    os.kill(group.ranks[1].pid, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(
        GroupFailedError, match=rf"rank 1 \(process {group.ranks[1].pid} .*died during operation 1"
    ) as raised:
        future.result()
    assert time.monotonic() - start < 10.0
    assert raised.value.details["ranks"] == [1]
    wait_for_end(group)
    with pytest.raises(GroupFailedError, match="died"):
        future.result()
    with pytest.raises(GroupFailedError, match="died between operations"):
        copy.take_over()


def test_a_rank_killed_between_operations_is_named_by_the_next_one_and_what_it_has_stored_stays() -> None:
    group = TrainGroup(UNIGRAM)
    answers = [group.run_on_ranks(store_zeros, size)[0] for size in (3, 2**22)]
    assert [answer.value for answer in answers] == [3, 2**22]
    assert all(isinstance(answer.stored, ray.ObjectRef) for answer in answers)
    os.kill(group.ranks[0].pid, signal.SIGKILL)
    wait_for_end(group)
    with pytest.raises(GroupFailedError, match=rf"rank 0 \(process {group.ranks[0].pid} .* died between operations"):
        group.build_model()
    assert [len(ray.get(answer.stored, timeout=10.0)) for answer in answers] == [3, 2**22]


@pytest.mark.shows("actors: a group stays usable after every rank refused its input")
def test_errors_that_every_rank_answered_keep_the_group_and_arrive_as_what_they_are(pair: TrainGroup) -> None:
    class NotPicklable(Exception):  # noqa: N818
        def __init__(self, *, name: str) -> None:
            super().__init__(name)

    def raise_typed(context: RankContext) -> None:
        raise HandleError("typed", rank_was=context.rank)

    def raise_foreign(context: RankContext) -> None:
        raise KeyError("foreign")

    def raise_not_picklable(context: RankContext) -> None:
        raise NotPicklable(name="keyword only")

    def answer_not_picklable(context: RankContext) -> object:
        return (number for number in range(3))

    def fail_on_one_without_collective(context: RankContext) -> int:
        if context.rank == 1:
            raise UnsupportedError("only here")
        time.sleep(1.5)  # a peer that waits is stopped by then
        return 0

    with pytest.raises(HandleError, match=r"^typed$") as typed:
        pair.run_on_ranks(raise_typed)
    assert type(typed.value) is HandleError
    assert typed.value.details["rank_was"] == 0
    assert typed.value.details["failed_ranks"] == [0, 1]
    assert "raise_typed" in typed.value.details["remote_traceback"]
    with pytest.raises(KeyError, match="foreign") as foreign:
        pair.run_on_ranks(raise_foreign)
    assert type(foreign.value) is KeyError
    assert "raise_foreign" in str(foreign.value.__cause__)
    with pytest.raises(RLBackendError, match="NotPicklable: keyword only"):
        pair.run_on_ranks(raise_not_picklable)
    with pytest.raises(TypeError, match="pickle"):
        pair.run_on_ranks(answer_not_picklable)
    with pytest.raises(UnsupportedError, match="only here") as one:
        pair.run_on_ranks(fail_on_one_without_collective)
    assert one.value.details["rank"] == 1
    model = pair.build_model()
    assert pair.weight_version(model) == 0


@pytest.mark.long
def test_a_broken_collective_ends_the_group() -> None:
    def break_collective(context: RankContext) -> None:
        raise RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer")

    group = TrainGroup(UNIGRAM, num_ranks=1)
    with pytest.raises(GroupFailedError, match=r"a collective of operation 1 .* failed on ranks \[0\].*Connection closed"):
        group.run_on_ranks(break_collective)


def test_a_runtime_that_cannot_start_says_why_and_frees_everything() -> None:
    config = RuntimeConfig(hf_path="/nowhere", backend_cfg=NativeConfig(device="cpu"))
    with pytest.raises(RLBackendError, match="/nowhere"), TrainGroup(config) as group:
        group.build_model()


def test_shutdown_frees_cores_and_names_does_not_wait_for_ever_and_may_be_repeated() -> None:
    free = ray.available_resources()["CPU"]
    group = TrainGroup(UNIGRAM, cores_per_rank=2, name="brief")
    assert ray.available_resources()["CPU"] == free - 2
    assert group.run_on_ranks(lambda context: (torch.get_num_threads(), os.environ["OMP_NUM_THREADS"])) == [(2, "2")]
    group.submit_on_ranks(sleep, 60.0)
    start = time.monotonic()
    group.shutdown(timeout=0.5)
    assert time.monotonic() - start < 10.0
    group.shutdown()
    with pytest.raises(HandleError, match="'brief' was shut down"):
        group.build_model()


def test_a_group_that_nobody_refers_to_gives_its_cores_back() -> None:
    free = ray.available_resources()["CPU"]
    group = TrainGroup(UNIGRAM)
    assert ray.available_resources()["CPU"] == free - 1
    del group


def test_more_cores_or_gpus_than_the_cluster_has_are_refused_within_seconds() -> None:
    start, total = time.monotonic(), int(ray.cluster_resources()["CPU"])
    with pytest.raises(
        UnsupportedError, match=rf"asks for 100 ranks with 1 CPU .*together 100 CPU .* of {total} CPU"
    ) as raised:
        TrainGroup(UNIGRAM, num_ranks=100, placement_timeout=1.0)
    assert raised.value.details["asked"] == {"CPU": 100}
    assert raised.value.details["total"]["CPU"] == total
    with pytest.raises(UnsupportedError, match=r"together 1 CPU and 1 GPU.* 0 GPU"):
        TrainGroup(UNIGRAM, gpus_per_rank=1, placement_timeout=1.0)
    assert time.monotonic() - start < 15.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_ranks": 0}, "num_ranks=0: must be at least 1"),
        ({"cores_per_rank": 0}, "cores_per_rank=0: must be at least 1"),
        ({"gpus_per_rank": 2}, "gpus_per_rank=2"),
        ({"gpus_per_rank": 0.5, "num_ranks": 2}, "gpus_per_rank=0.5: a rank trains on no GPU .0., on one .1. or on a"),
    ],
)
def test_numbers_that_make_no_sense_are_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainGroup(UNIGRAM, **arguments)


@pytest.mark.parametrize(("device", "gpus"), [("cuda", 0), ("cpu", 1)])
def test_a_device_that_the_ranks_do_not_have_is_refused(device: Literal["cuda", "cpu"], gpus: Literal[0, 1]) -> None:
    config = RuntimeConfig(hf_path="unused", backend_cfg=NativeConfig(device=device))
    with pytest.raises(ConfigError, match=f"gpus_per_rank={gpus}.*device='{device}'"):
        TrainGroup(config, gpus_per_rank=gpus)


def test_a_layout_that_the_ranks_do_not_fill_is_refused_before_anything_starts() -> None:
    config = UNIGRAM.replace(backend_cfg=UnigramConfig(parallel=ParallelConfig(tp=2)))
    with pytest.raises(ConfigError, match="world size 3 is not a multiple of tp"):
        TrainGroup(config, num_ranks=3)


def test_an_interrupt_while_an_operation_starts_ends_the_group_and_says_so(
    pair: TrainGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = pair._ranks._control

    def interrupted(*arguments: Any) -> Any:
        control(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(pair._ranks, "_control", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pair.run_on_ranks(sleep, 0.0)
    wait_for_end(pair)
    with pytest.raises(GroupFailedError, match="KeyboardInterrupt interrupted the start of"):
        pair.run_on_ranks(sleep, 0.0)


class Unclosable:
    def close(self) -> None:
        raise BatchError("cannot be closed")


def keep_unclosable(context: RankContext) -> None:
    context.state["kept"] = Unclosable()


@pytest.mark.long
def test_an_error_of_closing_does_not_hide_the_one_that_came_before() -> None:
    with pytest.raises(KeyError) as raised, TrainGroup(UNIGRAM) as group:  # noqa: PT012, how the body ends is the subject
        group.run_on_ranks(keep_unclosable)
        raise KeyError("the user's")
    assert "shutdown() failed as well: cannot be closed" in raised.value.__notes__[0]
    with pytest.raises(BatchError, match="cannot be closed"), TrainGroup(UNIGRAM) as group:
        group.run_on_ranks(keep_unclosable)
