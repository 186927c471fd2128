"""The ranks of a group as a driver sees them: who may operate them, and how they end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import GetTimeoutError

from actors.cluster.processes import Place
from actors.train import ranks as module
from actors.train.order import OperationHeader, this_thread
from actors.train.outcome import Completed, RankInfo
from actors.train.pulse import LOOK_SECONDS, WaitBounds
from actors.train.ranks import GroupMembers, _rank_environment
from rl_backend.contracts import BatchError, GroupFailedError, HandleError, OperationOrderError, RLBackendError
from rl_backend.contracts.atoms import Operation
from tests.support.told_ranks import FIRST, SECOND, Ref, ToldGroup, ToldRay, told_death, told_failure


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> ToldRay:
    made = ToldRay()
    monkeypatch.setattr(module, "ray", made)
    return made


def test_an_operation_goes_to_every_rank_with_its_own_call(told: ToldRay) -> None:
    group = ToldGroup(3, told)
    loss: Any = "a loss"
    group.ranks.dispatch("zero_grad", [b"x", b"y", b"z"])
    header, refs = group.ranks.dispatch("step", [b"a", b"b", b"c"], loss)
    assert header == OperationHeader(2, "step", this_thread.number)
    assert [worker.sent[1] for worker in group.workers] == [(header, call, loss) for call in (b"a", b"b", b"c")]
    assert [worker.sent[0][1:] for worker in group.workers] == [(call, None) for call in (b"x", b"y", b"z")]
    assert [(outcome.answer, stored.answer) for outcome, stored in refs] == [
        (f"outcome of {call!r}", f"stored of {call!r}") for call in (b"a", b"b", b"c")
    ]
    # Rank 0 alone counts.
    assert [worker.asked for worker in group.workers] == [[("begin", FIRST, "zero_grad"), ("begin", FIRST, "step")], [], []]


def test_a_copy_that_another_driver_operates_is_refused_and_remembers_by_whom(told: ToldRay) -> None:
    group = ToldGroup(2, told)
    group.workers[0].ledger.transfer(SECOND)
    for _ in range(2):
        with pytest.raises(OperationOrderError) as caught:
            group.ranks.dispatch("step", [b"a", b"b"])
        assert caught.value.message == (
            "training group 'ours' is operated by the second driver, and this is the first driver; call take_over() on this "
            "copy to operate it from here"
        )
        assert caught.value.details == {"owner": "the second driver"}
    assert group.ranks.operator == "the second driver" and not group.killed and not group.ranks.ended
    assert len(group.workers[0].asked) == 1 and not group.workers[0].sent


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("cannot be sent")])
def test_a_start_that_is_interrupted_in_the_middle_ends_the_group(told: ToldRay, error: BaseException) -> None:
    group = ToldGroup(3, told)

    def interrupt() -> None:
        raise error

    group.workers[1].on_execute = interrupt
    with pytest.raises(type(error)) as caught:
        group.ranks.dispatch("step", [b"a"] * 3)
    assert caught.value is error
    assert group.killed == 1 and group.ranks.ended
    kind = type(error).__name__
    with pytest.raises(GroupFailedError, match=f"'ours': {kind} interrupted the start of step, which not all ranks may"):
        group.ranks.dispatch("step", [b"a"] * 3)
    assert not group.workers[2].sent


def test_the_journal_is_kept_here_and_on_rank_0(told: ToldRay) -> None:
    group = ToldGroup(2, told)
    operations = [Operation("build_model", {}, number) for number in (1, 2, 3)]
    for operation in operations:
        group.ranks.keep(operation)
    group.ranks.forget(2)
    expected = [operations[0], operations[2]]
    assert group.ranks.journal == expected and group.workers[0].ledger.journal == expected
    assert not group.workers[1].asked


def test_a_copy_takes_over_when_the_operations_before_are_done_everywhere(told: ToldRay) -> None:
    group = ToldGroup(2, told, SECOND, owned=False)
    ledger = group.workers[0].ledger
    for name in ("build_model", "step"):
        ledger.begin(FIRST, name)
    built = Operation("build_model", {}, 1)
    ledger.journal.append(built)
    group.workers[0].answers["progress"] = [(2, 2), (2, 2), (2, 2)]
    group.workers[1].answers["progress"] = [(1, 1), (2, 1), (2, 2)]
    with pytest.raises(OperationOrderError):
        group.ranks.dispatch("step", [b""] * 2)
    group.ranks.take_over(10.0)
    assert [worker.answers["progress"] for worker in group.workers] == [[], []]
    assert group.ranks.journal == [built] and group.ranks.operator == "the second driver"
    header, _ = group.ranks.dispatch("step", [b""] * 2)
    assert (header.number, header.taken_over) == (3, 2)


def test_a_take_over_says_which_ranks_it_waited_for(told: ToldRay) -> None:
    group = ToldGroup(4, told, SECOND, owned=False)
    ledger = group.workers[0].ledger
    for name in ("build_model", "step"):
        ledger.begin(FIRST, name)
    for worker, progress in zip(group.workers, [(2, 2), (2, 1), (1, 1), (2, 1)], strict=True):
        worker.answers["progress"] = progress
    with pytest.raises(OperationOrderError) as caught:
        group.ranks.take_over(0.0)
    assert caught.value.message == (
        "operation 2 (step) of the first driver is not finished after 0 s: it runs on ranks [1, 3] and has not arrived on "
        "ranks [2]; call take_over() again, or build a new group if that driver is gone"
    )
    assert caught.value.details == {"number": 2, "running": [1, 3], "not_arrived": [2]}
    assert not group.killed
    with pytest.raises(OperationOrderError):
        group.ranks.check_usable()


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        (GetTimeoutError(), "rank 1 does not answer"),
        (told_death("gone"), "rank 1 died between operations; Ray says: The actor None is unavailable: gone"),
    ],
)
def test_a_rank_that_does_not_say_how_far_it_is_ends_the_group(told: ToldRay, raised: Exception, message: str) -> None:
    group = ToldGroup(2, told, SECOND, owned=False)
    group.workers[0].answers["progress"] = (0, 0)
    group.workers[1].answers["progress"] = raised
    with pytest.raises(GroupFailedError, match=f"'ours': {message}") as caught:
        group.ranks.take_over(1.0)
    assert caught.value.details["ranks"] == [1] and group.killed == 1


class Looks:
    """A pulse that finds rank 0 stopped at its third look."""

    def __init__(self, *_: Any) -> None:
        self.count = 0

    def look(self) -> tuple[list[int], str] | None:
        self.count += 1
        return ([0], "is stopped (SIGSTOP)") if self.count == 3 else None


@pytest.mark.parametrize("late", [2, 3])
def test_a_rank_between_operations_may_be_late_and_is_lost_when_it_gives_no_sign_of_life(
    told: ToldRay, monkeypatch: pytest.MonkeyPatch, late: int
) -> None:
    group, waits, get = ToldGroup(1, told), [], told.get
    group.ranks.infos, group.ranks.bounds = (RankInfo(0, "node", "10.0.0.1", 77),), WaitBounds()

    def late_answer(ref: Any, timeout: float | None = None) -> Any:
        waits.append(timeout)
        if len(waits) <= late:
            raise GetTimeoutError
        return get(ref)

    monkeypatch.setattr(told, "get", late_answer)
    monkeypatch.setattr(module, "Pulse", Looks)
    monkeypatch.setattr(
        module, "places_in_code", lambda infos: {info.rank: Place("step (adam.py:3)", False) for info in infos}
    )
    if late == 2:
        assert group.ranks.dispatch("step", [b"a"])[0].number == 1 and not group.killed
    else:
        stopped = (
            r"rank 0 \(process 77 on 10.0.0.1\) is stopped \(SIGSTOP\) between operations; rank 0 is in step \(adam.py:3\)"
        )
        with pytest.raises(GroupFailedError, match=stopped):
            group.ranks.dispatch("step", [b"a"])
        assert group.killed == 1
    assert waits == [LOOK_SECONDS] * 3


@pytest.mark.parametrize("method", ["keep", "forget"])
def test_a_rank_that_dies_while_it_is_told_of_the_journal_is_missed_by_the_next_operation(
    told: ToldRay, method: str
) -> None:
    group, operation = ToldGroup(1, told), Operation("build_model", {}, 1)
    group.workers[0].answers[method] = told_death("gone")
    group.ranks.journal = [] if method == "keep" else [operation]
    getattr(group.ranks, method)(operation if method == "keep" else 1)
    assert group.ranks.journal == ([operation] if method == "keep" else []), "those in its place build what it had built"
    with pytest.raises(GroupFailedError, match="rank 0 died between operations"):
        group.ranks.dispatch("step", [b""])


def test_a_group_that_failed_says_so_again_and_its_end_frees_it_once_more(told: ToldRay) -> None:
    group = ToldGroup(1, told)
    for message in ("first", "second"):
        with pytest.raises(GroupFailedError, match=message):
            group.ranks.fail(message, ranks=[0])
    assert group.killed == 1, "what has ended is not stopped again"
    for call in (group.ranks.check_usable, lambda: group.ranks.take_over(1.0), lambda: group.ranks.dispatch("a", [b""])):
        with pytest.raises(GroupFailedError, match="first") as caught:
            call()
        assert caught.value.details == {"ranks": [0]}
    group.ranks.end()
    assert group.killed == 2
    with pytest.raises(GroupFailedError, match="first"):
        group.ranks.check_usable()


def test_a_group_that_was_ended_by_its_driver_says_that(told: ToldRay) -> None:
    group = ToldGroup(1, told)
    group.ranks.end()
    with pytest.raises(HandleError, match=r"^training group 'ours' was shut down$"):
        group.ranks.check_usable()
    assert group.ranks.ended and group.killed == 1
    with pytest.raises(RLBackendError, match="late"):
        group.ranks.fail("late")
    assert group.killed == 1


@pytest.mark.parametrize("usable", [True, False])
def test_members_are_stopped_only_while_ray_is_there(usable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    monkeypatch.setattr(module, "ray_is_usable", lambda: usable)
    monkeypatch.setattr(ray, "kill", done.append)
    monkeypatch.setattr(module, "remove_placement_group", done.append)
    workers: Any = ("first", "second")
    placement: Any = "placement"
    GroupMembers("group", "ours", workers, placement, 1.0).kill()
    assert done == (["first", "second", "placement"] if usable else [])


@pytest.mark.parametrize(
    ("answers", "answered"),
    [
        ([Completed(1), Completed(2)], True),
        ([Completed(1), told_failure(BatchError("odd"))], True),
        ([Completed(1), told_failure(RuntimeError("gloo/ lost"))], False),
        ([Completed(1), told_death("gone")], False),
        ([Completed(1), GetTimeoutError()], False),
    ],
    ids=range(5),
)
def test_ranks_have_answered_unless_one_is_gone_or_missed_a_peer(
    answers: list[Any], answered: bool, told: ToldRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, waits = ToldGroup(2, told), list[float | None]()
    get = told.get

    def get_all(refs: Any, timeout: float | None = None) -> Any:
        waits.append(timeout)
        return [get(ref) for ref in refs]

    monkeypatch.setattr(told, "get", get_all)
    refs: Any = [Ref(each) for each in answers]
    assert group.ranks.has_answered(refs) is answered and waits == [0.1]


def test_ranks_in_the_place_of_others_know_what_those_knew(told: ToldRay) -> None:
    lost, fresh = ToldGroup(1, told), ToldGroup(1, told)
    bounds = WaitBounds(1.0, 2.0)
    lost.ranks.journal = [Operation("build_model", {}, 1)]
    lost.ranks.peak_memory, lost.ranks.bounds, lost.ranks._taken_over = 99, bounds, 4
    lost.ranks._acknowledged = frozenset({3})
    fresh.ranks.take_place_of(lost.ranks, 17)
    assert fresh.ranks.journal == lost.ranks.journal and fresh.ranks.journal is not lost.ranks.journal
    assert (fresh.ranks.peak_memory, fresh.ranks.bounds) == (99, bounds)
    loss: Any = "a loss"
    (refs,) = fresh.ranks.repeat(OperationHeader(9, "step", 5), [b"a"], loss, 4)
    header = OperationHeader(9, "step", 5, frozenset({3}), 4, after=4)
    assert fresh.workers[0].sent == [(header, b"a", "a loss")] and refs[0].answer == "outcome of b'a'"  # type: ignore[attr-defined]
    assert fresh.ranks.dispatch("next", [b"b"])[0].number == 18
    fresh.ranks.end()
    with pytest.raises(HandleError):
        fresh.ranks.repeat(header, [b"a"], None, 4)


def test_a_long_wait_is_told_with_those_that_are_waited_for(
    told: ToldRay, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    group, seconds = ToldGroup(3, told), [0.0, 300.0]
    monkeypatch.setattr(module, "places_in_code", lambda infos: {info.rank: Place("f (a.py:1)", False) for info in infos})
    group.ranks.infos = tuple(RankInfo(rank, "node", "10.0.0.1", rank) for rank in range(3))
    pulse: Any = SimpleNamespace(long_wait=lambda: seconds.pop(0))
    for _ in range(2):
        group.ranks._say_long_wait("operation 3 (step)", pulse, [0, 2])
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("training group 'ours': operation 3 (step) has waited ")
    assert said.endswith("for rank 0, 2; rank 0 is in f (a.py:1); rank 2 is in f (a.py:1)")


@pytest.mark.parametrize(("gpus", "local"), [(0.0, "1"), (0.6, "0"), (1.0, "0")])
def test_a_rank_with_a_share_of_a_gpu_sees_one_alone(gpus: float, local: str) -> None:
    placed: Any = SimpleNamespace(slots=[SimpleNamespace(index_on_node=index) for index in range(2)])
    assert _rank_environment(1, 2, placed, gpus) == {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": local}
