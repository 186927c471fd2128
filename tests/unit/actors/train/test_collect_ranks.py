"""What a driver makes of the answers of its ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from ray.exceptions import ActorDiedError, RayError, RayTaskError

from actors.cluster.processes import Place
from actors.train import ranks as module
from actors.train.outcome import Completed, RankInfo, RemoteTraceback
from actors.train.pulse import LOOK_SECONDS, PEER_SECONDS, PeersOfFailed, WaitBounds
from rl_backend.contracts import BatchError, ConfigError, GroupFailedError, OperationOrderError
from tests.support.told_ranks import Ref, ToldGroup, ToldRay, told_death, told_failure


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> ToldRay:
    made = ToldRay()
    monkeypatch.setattr(module, "ray", made)
    return made


def test_values_come_in_the_order_of_ranks_with_the_largest_peak(told: ToldRay) -> None:
    group = ToldGroup(3, told)
    refs = [Ref(Completed(f"value {rank}", peak)) for rank, peak in enumerate((5, 9, 7))]
    assert group.collect(refs) == ["value 0", "value 1", "value 2"]
    assert group.ranks.peak_memory == 9 and set(told.waits) == {None}
    group.collect([Ref(Completed(None, 8))])
    assert group.ranks.peak_memory == 9
    group.collect([Ref(Completed(None, 11))])
    assert group.ranks.peak_memory == 11


def test_an_operation_that_is_not_done_in_time_leaves_the_group_alone(told: ToldRay) -> None:
    group = ToldGroup(2, told)
    with pytest.raises(TimeoutError, match=r"^operation 3 \(step\) of training group 'ours' is not done after 0.01 s$"):
        group.collect([Ref(Completed(1)), Ref(comes=False)], 0.01)
    assert not group.killed and not group.ranks.ended
    assert all(wait is not None and 0 <= wait <= 0.01 for wait in told.waits)
    with pytest.raises(TimeoutError, match="after 0 s"):
        group.collect([Ref(comes=False)], 0)


def test_ready_says_whether_every_rank_has_answered(told: ToldRay) -> None:
    group = ToldGroup(2, told)
    some: Any = [Ref(), Ref(comes=False)]
    every: Any = (Ref(), Ref())
    assert not group.ranks.ready(some) and group.ranks.ready(every)
    assert told.waits == [0, 0]


def test_the_lowest_rank_with_an_error_of_ours_is_the_one_that_is_raised(told: ToldRay) -> None:
    group = ToldGroup(4, told)
    errors: list[Exception | None] = [ValueError("plain"), BatchError("odd", index=3), None, ConfigError("later")]
    refs = [Ref(Completed(0) if error is None else told_failure(error)) for error in errors]
    with pytest.raises(BatchError, match="odd") as caught:
        group.collect(refs)
    assert caught.value.details == {
        "index": 3,
        "rank": 1,
        "remote_traceback": "traceback of BatchError('odd')",
        "failed_ranks": [0, 1, 3],
    }
    assert isinstance(caught.value.__cause__, RemoteTraceback) and caught.value.__cause__.rank == 1
    assert not group.killed
    # All answered, so the next operation tells the ranks that its failure was seen.
    header, _ = group.ranks.dispatch("step", [b"a"] * 4)
    assert header.acknowledged == {3}
    # The time to wait for peers begins with the first failure alone.
    first, *others = told.waits
    assert first is None and all(wait is not None and wait <= 0.5 for wait in others)


@pytest.mark.parametrize(("pointed", "raised"), [(2, "I am odd"), (1, "it is rank 1 that is odd"), (7, "it is rank 7")])
def test_an_error_that_points_to_another_rank_gives_way_to_that_ranks(told: ToldRay, pointed: int, raised: str) -> None:
    """Where that rank has an error of ours."""
    group = ToldGroup(3, told)
    pointing = BatchError(f"it is rank {pointed} that is odd", rank=pointed)
    refs = [Ref(told_failure(pointing)), Ref(told_failure(ValueError("plain"))), Ref(told_failure(BatchError("I am odd")))]
    with pytest.raises(BatchError, match=raised) as caught:
        group.collect(refs)
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    assert caught.value.__cause__.rank == (2 if pointed == 2 else 0)
    assert caught.value.details["rank"] == pointed and caught.value.details["failed_ranks"] == [0, 1, 2]


def test_a_foreign_error_that_all_answer_to_is_raised_as_it_is(told: ToldRay) -> None:
    group = ToldGroup(3, told)
    refs = [Ref(Completed(0)), Ref(told_failure(KeyError("second"))), Ref(told_failure(KeyError("third")))]
    with pytest.raises(KeyError, match="second") as caught:
        group.collect(refs)
    assert isinstance(caught.value.__cause__, RemoteTraceback) and caught.value.__cause__.rank == 1
    assert not group.killed


def test_a_refusal_for_an_earlier_failure_acknowledges_that_one_too(told: ToldRay) -> None:
    group = ToldGroup(2, told)
    refusals = [OperationOrderError("not run", number=5, failed=4), OperationOrderError("lost", number=5)]
    with pytest.raises(OperationOrderError, match="not run"):
        group.collect([Ref(told_failure(error)) for error in refusals], number=5)
    assert group.ranks.dispatch("step", [b""] * 2)[0].acknowledged == {4, 5}


@pytest.mark.parametrize(
    ("errors", "broken", "shown"),
    [
        ([dist.DistError("lost"), dist.DistError("lost too")], [0, 1], 0),
        ([dist.DistError("lost"), ValueError("the cause"), dist.DistError("lost")], [0, 2], 1),
        ([ValueError("plain"), dist.DistError("lost"), BatchError("the cause")], [1], 2),
    ],
)
def test_a_broken_collective_ends_the_group_and_names_what_was_first_at_fault(
    told: ToldRay, errors: list[Exception], broken: list[int], shown: int
) -> None:
    group = ToldGroup(len(errors), told)
    with pytest.raises(GroupFailedError) as caught:
        group.collect([Ref(told_failure(error)) for error in errors])
    error = errors[shown]
    assert caught.value.__cause__ is error and group.killed == 1
    assert caught.value.message == (
        f"training group 'ours': a collective of operation 3 (step) failed on ranks {broken}: {error!r}; all ranks were "
        "stopped: build a new group and load the last checkpoint"
    )
    traceback = f"traceback of {error!r}"
    assert caught.value.details == {"ranks": broken, "error": repr(error), "remote_traceback": traceback}


def test_peers_that_do_not_answer_after_a_failure_are_stopped(told: ToldRay) -> None:
    group = ToldGroup(4, told)
    group.members.__dict__["failure_grace"] = 0.01
    refs = [Ref(comes=False), Ref(told_failure(BatchError("first"))), Ref(comes=False), Ref(told_failure(BatchError("odd")))]
    with pytest.raises(GroupFailedError) as caught:
        group.collect(refs)
    assert caught.value.message.startswith(
        "training group 'ours': rank 3 failed in operation 3 (step) with BatchError('odd') while ranks [0, 2] gave no "
        "answer within 0.01 s, most likely waiting for it in a collective; all ranks were stopped"
    )
    assert caught.value.details == {
        "ranks": [1, 3],
        "silent": [0, 2],
        "error": "BatchError('odd')",
        "remote_traceback": "traceback of BatchError('odd')",
    }
    assert isinstance(caught.value.__cause__, BatchError) and group.killed == 1


@pytest.mark.parametrize("answers", [False, True])
def test_peers_that_wait_for_one_that_failed_are_stopped_at_once_and_one_that_computes_may_answer(
    told: ToldRay, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    group, slow, looks = ToldGroup(3, told), Ref(comes=False), []
    group.members.__dict__["failure_grace"] = 10.0
    group.ranks.infos = tuple(RankInfo(rank, "node", "10.0.0.1", 100 + rank) for rank in range(3))
    group.ranks.bounds = WaitBounds()

    def look(_: PeersOfFailed, infos: list[RankInfo]) -> bool:
        looks.append([info.rank for info in infos])
        slow.comes = answers and len(looks) == 3
        return not answers and len(looks) == 3

    monkeypatch.setattr(module, "Pulse", lambda *_: SimpleNamespace(look=lambda: None, long_wait=lambda: 0.0))
    monkeypatch.setattr(PeersOfFailed, "look", look)
    monkeypatch.setattr(module, "places_in_code", lambda infos: {info.rank: Place("recv (a.py:1)", True) for info in infos})
    slow.answer = Completed(0)
    refs = [slow, Ref(told_failure(BatchError("odd"))), Ref(Completed(0))]
    with pytest.raises(BatchError if answers else GroupFailedError) as caught:
        group.collect(refs)
    assert looks == [[0]] * 3 and set(told.waits) == {LOOK_SECONDS, PEER_SECONDS}
    if answers:
        assert not group.killed
    else:
        assert "(step) with BatchError('odd') while ranks [0] wait in a collective; rank 0 is in recv" in str(caught.value)
        assert group.killed == 1


def test_a_rank_that_died_is_named_with_its_process_and_those_that_died_beside_it(told: ToldRay) -> None:
    group = ToldGroup(4, told)
    group.ranks.infos = tuple(RankInfo(rank, "node", f"10.0.0.{rank}", 100 + rank) for rank in range(4))
    refs = [
        Ref(ActorDiedError()),
        Ref(RayError("other")),
        Ref(told_death("out of\n  memory")),
        Ref(told_failure(BatchError("first"))),
    ]
    with pytest.raises(GroupFailedError) as caught:
        group.collect(refs)
    reason = "The actor died unexpectedly before finishing this task."
    assert caught.value.message == (
        "training group 'ours': rank 0, 2 (process 100 on 10.0.0.0, process 102 on 10.0.0.2) died during operation 3 "
        f"(step); rank 3 reported BatchError('first'); Ray says: {reason}; all ranks were stopped: build a new group and "
        "load the last checkpoint"
    )
    assert {name: caught.value.details[name] for name in ("ranks", "reason")} == {"ranks": [0, 2], "reason": reason}
    assert caught.value.__cause__ is refs[0].answer and group.killed == 1


def test_the_last_rank_may_die_before_its_place_is_known(told: ToldRay) -> None:
    group = ToldGroup(1, told)
    with pytest.raises(GroupFailedError, match=r"'ours': rank 0 died during operation 3 \(step\); Ray says: The actor None"):
        group.collect([Ref(told_death("a\n b"))])


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (RayTaskError("execute", "remote text", BatchError("odd"), ip="10.0.0.1"), BatchError),
        (RayTaskError("execute", "remote text", SystemExit(3), ip="10.0.0.1"), RuntimeError),
        (RayError("lost object"), RayError),
    ],
)
def test_what_ray_raises_for_one_rank_is_that_ranks_failure(
    told: ToldRay, raised: Exception, expected: type[Exception]
) -> None:
    group = ToldGroup(2, told)
    with pytest.raises(expected) as caught:
        group.collect([Ref(raised), Ref(Completed(0))])
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    assert caught.value.__cause__.rank == 0 and caught.value.__cause__.text == str(raised)
    assert not group.killed
