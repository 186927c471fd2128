"""One driver at a time: copies of a group in other tasks, threads and processes."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch
import torch.distributed as dist

from actors import HandleRef, RankContext, TrainGroup
from rl_backend.contracts import HandleError, OperationOrderError, RuntimeConfig, TokenSequence
from tests.support.unigram_runtime import UnigramConfig

UNIGRAM = RuntimeConfig(
    plugins=("tests.support.unigram_runtime",),
    backend="unigram",
    hf_path="unused",
    backend_cfg=UnigramConfig(vocab_size=8),
)


@pytest.fixture(scope="module")
def group(ray_cluster: None) -> Iterator[TrainGroup]:
    """Two ranks of a runtime that a plugin registered."""
    with TrainGroup(UNIGRAM, num_ranks=2, name="ordered") as train:
        yield train


@pytest.fixture(autouse=True)
def operated_from_here(group: TrainGroup) -> None:
    group.take_over()


def meet(context: RankContext, driver: int, number: int) -> bool:
    """A collective that tells whether every rank runs the same driver's operation, and a log of it."""
    mine = torch.tensor([driver, number])
    most, least = mine.clone(), mine.clone()
    dist.all_reduce(most, dist.ReduceOp.MAX)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    context.state.setdefault("log", []).append((driver, number))
    return bool(torch.equal(most, least))


def take_log(context: RankContext) -> list[tuple[int, int]]:
    return context.state.pop("log", [])  # type: ignore[no-any-return]


def operate(group: TrainGroup, driver: int, seconds: float) -> list[int]:
    """Operates for a while, taking the group back whenever the other driver has it; the numbers that went through."""
    done: list[int] = []
    refused = 0
    number = 0
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        number += 1
        try:
            futures = [group.submit_on_ranks(meet, driver, number), group.submit_on_ranks(meet, driver, -number)]
        except OperationOrderError:
            refused += 1
            group.take_over()
            continue
        assert all(result == [True, True] for result in (future.result() for future in futures))
        done.append(number)
    assert refused > 0
    return done


def test_a_third_partys_runtime_trains_in_actors(group: TrainGroup) -> None:
    model = group.build_model()
    sequence = TokenSequence(torch.tensor([0, 7, 7, 7]))
    before = group.forward(model, [sequence, sequence]).output("log_probs")[0]
    expected = torch.log_softmax(torch.linspace(-1.0, 1.0, 8), 0)[7]
    torch.testing.assert_close(before, torch.tensor([expected, expected, expected, 0.0]))
    assert group.config.backend_cfg == UnigramConfig(vocab_size=8)


def test_a_pickled_copy_is_refused_and_told_who_operates_the_group(group: TrainGroup) -> None:
    copy: TrainGroup = pickle.loads(pickle.dumps(group))
    for operate_it in (copy.build_model, copy.shutdown, lambda: copy.run_on_ranks(take_log)):
        with pytest.raises(OperationOrderError, match=r"'ordered' is operated by copy .* take_over\(\)") as raised:
            operate_it()
    assert str(raised.value.details["owner"]) in str(raised.value)
    assert copy.num_ranks == 2 and copy.ranks == group.ranks


def test_taking_over_moves_the_group_and_its_models_and_refuses_the_driver_before(group: TrainGroup) -> None:
    model = group.build_model()
    copy: TrainGroup = pickle.loads(pickle.dumps(group))
    copy.take_over()
    assert copy.weight_version(model) == 0
    with pytest.raises(OperationOrderError, match=re.escape(copy._ranks.driver.description)):
        group.weight_version(model)
    with pytest.raises(OperationOrderError, match="operated by"):
        group.shutdown()
    group.take_over()
    assert group.weight_version(model) == 0


def test_taking_over_waits_for_what_the_driver_before_had_submitted(group: TrainGroup) -> None:
    def slow(context: RankContext) -> int:
        time.sleep(0.4)
        return context.operation

    copy: TrainGroup = pickle.loads(pickle.dumps(group))
    future = group.submit_on_ranks(slow)
    with pytest.raises(OperationOrderError, match=r"run_on_ranks\(.*slow\).* runs on ranks \[0, 1\]"):
        copy.take_over(timeout=0.05)
    copy.take_over()
    (number, _) = copy.run_on_ranks(slow)
    assert future.result() == [number - 1] * 2


@pytest.mark.shows("actors: two drivers never interleave collectives")
def test_two_tasks_racing_for_a_group_never_mix_their_collectives(group: TrainGroup) -> None:
    race = ray.remote(num_cpus=1)(operate)
    done = ray.get([race.remote(group, driver, 2.0) for driver in (1, 2)], timeout=120)
    group.take_over()
    first, second = group.run_on_ranks(take_log)
    assert first == second
    for driver, numbers in zip((1, 2), done, strict=True):
        assert numbers, "a driver that never got the group proves nothing"
        seen = [number for who, number in first if who == driver]
        assert [number for number in seen if number > 0 and -number in seen] == numbers


def test_threads_of_one_driver_may_share_a_group(group: TrainGroup) -> None:
    results: list[list[bool]] = []

    def work(thread: int) -> None:
        for number in range(20):
            results.append(group.run_on_ranks(meet, thread, number))

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[True, True]] * 60
    first, second = group.run_on_ranks(take_log)
    assert first == second


def test_another_driver_process_is_refused_until_it_takes_over(group: TrainGroup, tmp_path: Path) -> None:
    (tmp_path / "group.pickle").write_bytes(pickle.dumps(group))
    program = f"""
import pickle
from pathlib import Path
from actors.cluster.session import join_ray
from rl_backend.contracts import OperationOrderError
from tests.e2e.test_train_group_order import meet
join_ray({ray.get_runtime_context().gcs_address!r}, log_to_driver=False, configure_logging=False)
group = pickle.loads(Path({str(tmp_path / "group.pickle")!r}).read_bytes())
try:
    group.run_on_ranks(meet, 9, 9)
except OperationOrderError as error:
    print("refused:", error.details["owner"])
group.take_over()
print("result:", group.run_on_ranks(meet, 9, 9))
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert "result: [True, True]" in ran.stdout, ran.stderr
    assert f"refused: {group._ranks.driver.description}" in ran.stdout
    with pytest.raises(OperationOrderError):
        group.run_on_ranks(take_log)
    group.take_over()
    assert group.run_on_ranks(take_log) == [[(9, 9)]] * 2


def test_a_handle_of_another_group_is_refused_inside_a_rank(group: TrainGroup) -> None:
    def use(context: RankContext, ref: HandleRef) -> None:
        context.handle(ref)

    stranger = HandleRef("another", 1, "stranger", False, (0, 1), (0, 1))
    with pytest.raises(HandleError, match="'stranger' was not built by this training group"):
        group.run_on_ranks(use, stranger)


def test_a_small_operation_does_not_overtake_a_large_one(group: TrainGroup) -> None:
    def size(context: RankContext, data: bytes) -> tuple[int, int]:
        return len(data), context.operation

    sizes = [20_000_000, 1, 2_000_000, 1, 1]
    futures = [group.submit_on_ranks(size, bytes(length)) for length in sizes]
    answers = [future.result()[0] for future in futures]
    assert [length for length, _ in answers] == sizes
    assert [number - answers[0][1] for _, number in answers] == [0, 1, 2, 3, 4]
