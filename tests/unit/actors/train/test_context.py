"""What a rank keeps between operations, and the results that a driver waits for."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from actors.train.context import BuiltModel, HandleRef, RankContext, RankFunction, refs_in
from actors.train.group import BoundOperation, GroupFuture, operation
from rl_backend.contracts import BatchError, HandleError, RLBackendError
from tests.support.plain_handle import PlainHandle


def context(group_id: str = "group") -> Any:
    runtime: Any = SimpleNamespace(is_mp_src_rank_with_outputs=lambda handle: True)
    return RankContext(runtime, group_id, 0, 1)


def ref(key: int, group_id: str = "group") -> HandleRef:
    return HandleRef(group_id, key, f"model {key}", False, (0,), (0,))


def test_handles_are_found_by_the_operation_that_made_them() -> None:
    rank, other = context(), context()
    first, second = (PlainHandle(name, False, 0, 0, 1) for name in ("first", "second"))
    for number, handle in ((3, first), (7, second)):
        rank.operation = number
        assert rank.keep(handle).ref.key == number
    assert (rank.handle(ref(3)), rank.handles(ref(7)), rank.handles((ref(7), ref(3)))) == (first, second, [second, first])
    for missing in (ref(4), ref(3, "another group")):
        with pytest.raises(HandleError) as caught:
            rank.handles([ref(7), missing])
        assert str(caught.value) == f"model 'model {missing.key}' was not built by this training group"
    rank.forget(ref(3))
    with pytest.raises(HandleError):
        rank.handle(ref(3))
    assert rank.handle(ref(7)) is second
    with pytest.raises(HandleError):
        other.handle(ref(7))


def test_models_are_found_among_the_arguments_of_a_call() -> None:
    assert list(refs_in([ref(1), 7, "name", [ref(2), ref(3)], (ref(4), None)])) == [ref(1), ref(2), ref(3), ref(4)]
    assert RankFunction(len) == RankFunction(len, (), {})


class Counted:
    """Waits as it is told to, and counts."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.timeouts: list[float | None] = []

    def __call__(self, timeout: float | None) -> Any:
        self.timeouts.append(timeout)
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer


def test_a_result_is_waited_for_once_also_when_it_is_none() -> None:
    wait = Counted(TimeoutError("late"), None)
    future = GroupFuture("step", wait, lambda: False)
    with pytest.raises(TimeoutError):
        future.result(0.5)
    assert not future.done()
    assert [future.result(2.0), future.result()] == [None, None]
    assert wait.timeouts == [0.5, 2.0] and future.done() and future.name == "step"


def test_an_error_is_raised_at_every_look() -> None:
    error = BatchError("odd")
    wait = Counted(error)
    future: GroupFuture[Any] = GroupFuture("step", wait, lambda: False)
    for _ in range(2):
        with pytest.raises(BatchError) as caught:
            future.result()
        assert caught.value is error
    assert wait.timeouts == [None] and future.done()


def test_an_interrupted_wait_can_be_taken_up_again() -> None:
    future = GroupFuture("step", Counted(KeyboardInterrupt(), 3), lambda: False)
    with pytest.raises(KeyboardInterrupt):
        future.result()
    assert not future.done() and future.result() == 3


def test_a_future_is_done_when_the_ranks_have_answered() -> None:
    wait = Counted()
    assert GroupFuture("a", wait, lambda: True).done() and not GroupFuture("a", wait, lambda: False).done()
    assert not wait.timeouts


def test_threads_that_ask_at_once_wait_once() -> None:
    begun, go = threading.Event(), threading.Event()
    waits: list[int] = []

    def wait(timeout: float | None) -> int:
        waits.append(1)
        begun.set()
        assert go.wait(5)
        return 4

    future = GroupFuture("a", wait, lambda: False)
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(future.result())) for _ in range(2)]
    threads[0].start()
    assert begun.wait(5)
    threads[1].start()
    go.set()
    for thread in threads:
        thread.join(5)
    assert found == [4, 4] and len(waits) == 1


class Doubler:
    """A group of one operation."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    @operation
    def scale(self, number: int, *, plus: int = 0) -> GroupFuture[int]:
        """Says so."""
        return GroupFuture("scale", lambda timeout: self.factor * number + plus, lambda: True)


def test_an_operation_is_called_or_submitted_on_the_group_it_belongs_to() -> None:
    three, five = Doubler(3), Doubler(5)
    assert (three.scale(2), five.scale(2, plus=1), three.scale.submit(4, plus=2).result()) == (6, 11, 14)
    assert isinstance(three.scale, BoundOperation) and isinstance(Doubler.scale, operation)
    every: list[Any] = [three.scale, three.scale.submit, Doubler.scale]
    for named in every:
        assert (named.__name__, named.__doc__) == ("scale", "Says so.")


def built(rank: int, dp_rank: int, *, source: bool = True, size: int = 2) -> BuiltModel:
    return BuiltModel(HandleRef("group", 5, "policy", True, (), (), "values", 4, 3), dp_rank, size, source)


def test_a_model_that_all_ranks_have_built_names_where_its_outputs_are() -> None:
    values = [built(0, 1, source=False), built(1, 0), built(2, 1), built(3, 0, source=False)]
    made = HandleRef.of(values)
    assert made == HandleRef("group", 5, "policy", True, (1, 0, 1, 0), (1, 2), "values", 4, 3)
    assert made.data_parallel_size == 2


@pytest.mark.parametrize(
    ("values", "ranks", "dp_ranks"),
    [
        ([built(0, 0), built(1, 1, source=False)], [0], [0]),
        ([built(0, 0), built(1, 0), built(2, 1)], [1, 2], [0, 1]),
        ([built(0, 1), built(1, 2)], [0, 1], [1, 2]),
        ([built(0, 0, source=False)], [], []),
    ],
)
def test_a_runtime_without_one_source_for_each_data_parallel_rank_is_refused(
    values: Sequence[BuiltModel], ranks: list[int], dp_ranks: list[int]
) -> None:
    with pytest.raises(RLBackendError) as caught:
        HandleRef.of(values)
    assert str(caught.value) == (
        f"the runtime names ranks {ranks} as sources of the outputs of data-parallel ranks {dp_ranks}; expected one for "
        "each of 2"
    )
