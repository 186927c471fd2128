"""Operations that are kept to be run again: which of them, for how long, and whether their results are the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray import cloudpickle

from actors.train.context import HandleRef
from actors.train.kept import Kept, KeptOperations, calls_of, digest, facts_of, models_in
from actors.train.order import OperationHeader
from rl_backend.contracts import RLBackendError
from rl_backend.contracts.atoms import Operation


def kept(number: int, name: str, models: Sequence[int] = (), role: str = "changes", **options: Any) -> Kept:
    given: dict[str, Any] = {"call": b"12345", "saves_to": None, "answered": True, "ranks": None, **options}
    return Kept(OperationHeader(number, name), loss=None, role=role, models=frozenset(models), refs=(), **given)  # type: ignore[arg-type]


def of(*operations: Kept) -> KeptOperations:
    made = KeptOperations()
    for each in operations:
        made.add(each)
    return made


def ref(key: int, *, forward_only: bool = False) -> HandleRef:
    return HandleRef("group", key, f"model {key}", forward_only, (0,), (0,))


@pytest.mark.parametrize(
    ("names", "left"),
    [
        ((), False),
        (("forward_backward",), True),
        (("forward_backward", "lr_scheduler_step"), True),
        (("forward_backward", "optimizer_step"), False),
        (("forward_backward", "zero_grad"), False),
        (("forward_backward", "load_checkpoint"), False),
        (("forward_backward", "save_checkpoint", "run_on_ranks(f)"), True),
        (("forward_backward", "optimizer_step", "lr_scheduler_step"), False),
        (("optimizer_step", "forward_backward"), True),
    ],
)
def test_gradients_are_left_until_a_step_or_what_clears_them(names: Sequence[str], left: bool) -> None:
    operations = of(*(kept(number, name, [7]) for number, name in enumerate(names, 1)))
    assert operations.has_gradients(7) is left and not operations.has_gradients(8)
    if left:
        at = names.index("forward_backward") + 1
        assert operations.has_gradients(7, at + 1) and not operations.has_gradients(7, at)


def test_gradients_may_be_of_any_model_where_that_is_not_known_and_never_of_a_look() -> None:
    assert of(kept(1, "forward_backward")).has_gradients(7)
    assert not of(kept(1, "forward_backward", [7], "reads")).has_gradients(7)
    assert of(kept(1, "forward_backward", [7]), kept(2, "zero_grad", [8])).has_gradients(7)


def test_looks_are_kept_until_they_are_answered_and_what_changes_a_model_stays() -> None:
    looks, pinned, changes, builds = (
        kept(number, "x", role=role) for number, role in enumerate(("reads", "pinned", "changes", "builds"), 1)
    )
    operations = of(looks, pinned, changes, builds)
    assert operations.nbytes == 20 and len(operations) == 4
    for each in (looks, pinned, changes, builds, looks):
        operations.forget(each)
    assert operations.to_repeat() == [changes, builds] and operations.nbytes == 10
    waits = kept(5, "x", role="reads", answered=False)
    operations.add(waits)
    operations.add(kept(6, "x", role="reads"))
    assert operations.to_repeat() == [changes, builds, waits] and operations.unanswered() == [waits]
    operations.clear()
    assert len(operations) == operations.nbytes == 0


def test_a_checkpoint_is_a_boundary_of_its_model_from_the_save_on(tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    build = kept(1, "build_model", [], "builds")
    save = kept(4, "save_checkpoint", [7], saves_to=draft, digest="its result", answered=False)
    after = kept(5, "forward_backward", [7])
    operations = of(build, kept(2, "optimizer_step", [7]), kept(3, "optimizer_step", [8]), save, after)
    assert operations.boundary_of(7) == 0 and operations.is_saving(7) and not operations.is_saving(8)
    for saved, key in ((draft, 8), (tmp_path / "other", 7)):
        operations.bound(ref(key), saved, tmp_path / "step")
    assert len(operations) == 5 and operations.boundary_of(7) == operations.boundary_of(8) == 0
    operations.bound(ref(7), draft, tmp_path / "step")
    assert [each.number for each in operations.to_repeat()] == [1, 3, 4, 5] and operations.boundary_of(7) == 4
    assert (save.header.name, save.saves_to, save.digest, save.answered) == ("load_checkpoint", None, "", True)
    assert cloudpickle.loads(save.call) == Operation("load_checkpoint", {"handle": ref(7), "path": tmp_path / "step"})
    assert not operations.is_saving(7) and operations.nbytes == sum(each.nbytes for each in operations.to_repeat())


def test_a_checkpoint_with_gradients_is_no_boundary_and_one_before_them_is(tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    operations = of(kept(1, "forward_backward", [7]), kept(2, "save_checkpoint", [7], saves_to=draft))
    operations.bound(ref(7), draft, tmp_path / "step")
    assert operations.boundary_of(7) == 0 and len(operations) == 2
    # Saved twice to one place: the last one counts.
    operations.add(kept(3, "zero_grad", [7]))
    operations.add(kept(4, "save_checkpoint", [7], saves_to=draft))
    operations.add(kept(5, "forward_backward", [7]))
    operations.bound(ref(7), draft, tmp_path / "step")
    assert operations.boundary_of(7) == 4 and [each.number for each in operations.to_repeat()] == [4, 5]


def test_a_save_is_over_when_its_folder_is_there_or_it_has_failed(tmp_path: Path) -> None:
    there, missing = tmp_path / "there", tmp_path / "missing"
    there.mkdir()
    assert not of(kept(1, "save_checkpoint", [7], saves_to=there)).is_saving(7)
    assert of(kept(1, "save_checkpoint", [7], saves_to=missing)).is_saving(7)
    assert not of(kept(1, "save_checkpoint", [7], saves_to=missing, failed=True)).is_saving(7)
    assert of(kept(1, "save_checkpoint", [7], saves_to=there), kept(2, "save_checkpoint", [7], saves_to=missing)).is_saving(
        7
    )


def test_what_nobody_has_read_yet_stays_until_its_ranks_have_answered() -> None:
    ready: list[bool] = [False]
    ranks: Any = SimpleNamespace(ready=lambda outcomes: ready[0])
    waits = kept(1, "optimizer_step", [7], answered=False, ranks=ranks)
    operations = of(waits)
    operations.bound_in_memory(kept(2, "load_held_state", [7], boundary="first"))
    assert waits in operations.to_repeat()
    ready[0] = True
    operations.bound_in_memory(kept(3, "load_held_state", [7], boundary="second"))
    assert [each.number for each in operations.to_repeat()] == [3] and operations.boundaries() == ["second"]


def test_a_pass_of_several_is_repeated_for_those_whose_boundary_is_before_it() -> None:
    shared = kept(3, "forward_backward", [1, 2])
    operations = of(kept(1, "zero_grad", [1, 2]), kept(2, "zero_grad", [2]), shared)
    assert operations.repeats(shared)
    operations.bound_in_memory(kept(3, "load_held_state", [1]))
    assert operations.repeats(shared), "a load of the same number is of the state before what follows"
    operations.bound_in_memory(kept(4, "load_held_state", [1]))
    assert not operations.repeats(shared) and shared in operations.to_repeat()
    other = of(shared)
    other.forget_model(2)
    assert not other.repeats(shared) and other.repeats(kept(9, "zero_grad", [1]))


def test_ranks_of_another_layout_may_answer_otherwise_and_die_again() -> None:
    operations = of(kept(1, "zero_grad", digest="a", deaths=1), kept(2, "zero_grad", digest="b"))
    operations.in_another_layout()
    assert [(each.digest, each.deaths) for each in operations.to_repeat()] == [("", 0)] * 2


@pytest.mark.parametrize(
    ("name", "role", "kept_by_digest"),
    [
        ("forward_backward", "changes", True),
        ("build_model", "builds", True),
        ("forward_backward", "reads", False),
        ("run_on_ranks(f)", "changes", False),
    ],
)
def test_a_result_that_is_another_one_is_noticed_where_it_is_numbers(name: str, role: str, kept_by_digest: bool) -> None:
    operation = kept(4, name, [7], role, answered=False)
    operation.note([1.0])
    assert operation.answered and bool(operation.digest) is kept_by_digest
    operation.note([1.0])
    if kept_by_digest:
        with pytest.raises(RLBackendError, match=r"operation 4 \(.*\) has another result on the new ranks") as raised:
            operation.note([2.0])
        assert raised.value.details == {"number": 4}
    else:
        operation.note([2.0])


@dataclass
class Pair:
    first: Any
    second: Any = None


def test_digests_are_of_values_types_shapes_and_places() -> None:
    values = torch.arange(6.0)
    different = [
        values,
        values.view(2, 3),
        values.view(3, 2),
        values + 1,
        values.double(),
        values.view(torch.int32),
        [values],
        [values, values],
        [[values], values],
        {"a": values},
        {"b": values},
        Pair(values),
        Pair(None, values),
        1,
        1.0,
        True,
        "1",
        [1, 2],
        [[1], 2],
        [12],
        [],
        {},
        float("nan"),
    ]
    assert len({digest(each) for each in different}) == len(different)
    assert digest(values) == digest(values.clone()) == digest(torch.arange(12.0)[::2] / 2)
    assert digest((1, 2)) == digest([1, 2]) and digest(float("nan")) == digest(float("nan"))
    assert digest(values.requires_grad_()) == digest(values.detach())


def test_an_operation_is_kept_by_what_its_atom_declares() -> None:
    one, frozen = ref(1), ref(2, forward_only=True)
    for operation, expected in (
        (Operation("build_model", {}), ("builds", frozenset(), None)),
        (Operation("create_lora_adapter", {"handle": frozen}), ("builds", frozenset(), None)),
        (Operation("remove_lora_adapter", {"handle": one}), ("builds", {1}, None)),
        (Operation("zero_grad", {"handle": [one, ref(3)]}), ("changes", {1, 3}, None)),
        (Operation("save_checkpoint", {"handle": one, "path": "there"}), ("changes", {1}, Path("there"))),
        (Operation("load_checkpoint", {"handle": one, "path": "there"}), ("changes", {1}, None)),
        (Operation("list_lora_adapters", {"handle": one}), ("reads", {1}, None)),
    ):
        assert facts_of(operation) == expected
    assert models_in([one, 5, (ref(3), frozen)]) == frozenset(), "one of a frozen base may be of any tenant"
    assert models_in([]) == frozenset() and models_in([one, ref(3)]) == {1, 3}


def test_every_rank_is_sent_the_same_or_its_share() -> None:
    spread: Any = SimpleNamespace(calls=[b"b", b"a", b"b"], shares=[b"123", b"4"])
    same = calls_of(b"x", 3)
    assert list(same) == [b"x"] * 3 and list(calls_of(spread, 3)) == [b"b", b"a", b"b"]
    assert kept(1, "x", call=spread).nbytes == 4, "what is sent twice is kept once"
