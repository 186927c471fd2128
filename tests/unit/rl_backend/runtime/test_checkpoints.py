"""Saves now and in the background: whose error is told to whom, what waits for what, and what is left of a failed one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rl_backend.checkpoint.manifest import TrainingManifest
from rl_backend.contracts import CheckpointError
from rl_backend.runtime import checkpoints
from rl_backend.runtime.checkpoints import CheckpointWriter
from tests.support.rank_threads import run_ranks

MANIFEST = TrainingManifest(
    model_type="m", parameters={}, weight_version=0, schedule_steps=0, optimizer_steps=0, world_size=1, runtime_config={}
)


class Handle:
    """What a writer knows a model by."""

    groups = SimpleNamespace(device=torch.device("cpu"))

    def __init__(self, **facts: Any) -> None:
        self.__dict__.update(facts)


class Writes:
    """In the place of writing: keeps what it is given, waits until it may, and fails where it is told to."""

    def __init__(self) -> None:
        self.given: dict[str, list[Any]] = {}
        self.may_write = threading.Event()
        self.may_write.set()
        self.failing: dict[tuple[str, int], BaseException] = {}

    def __call__(self, draft: Path, path: Path, tensors: Any, manifest: TrainingManifest, group: dist.ProcessGroup) -> None:
        assert self.may_write.wait(20)
        name = path.name
        self.given.setdefault(name, []).append((group.rank(), tensors["x"].tolist(), manifest.extra))
        if error := self.failing.get((name, group.rank())):
            raise error


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Writes:
    made = Writes()
    monkeypatch.setattr(checkpoints, "write_training_state", made)
    return made


def save(
    writer: CheckpointWriter,
    handle: Any,
    path: Path,
    *,
    asynchronous: bool = True,
    x: Tensor | None = None,
    extra: Any = None,
) -> None:
    state = {"x": torch.zeros(2) if x is None else x}
    writer.save_training_state(handle, path, lambda: (state, MANIFEST), asynchronous=asynchronous, extra=extra)


def raised(call: Callable[[], object], kind: type[BaseException] = CheckpointError) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    return ""


def test_an_error_of_one_rank_is_raised_on_all_by_what_waits_for_its_handle(tmp_path: Path, writes: Writes) -> None:
    writes.failing[("second", 1)] = OSError("disk full")
    writes.failing[("third", 0)] = CheckpointError("a reason of its own")

    def of_rank(group: dist.ProcessGroup) -> list[str]:
        writer = CheckpointWriter(group)
        handles = [Handle() for _ in range(3)]
        for handle, name in zip(handles, ("first", "second", "third"), strict=True):
            save(writer, handle, tmp_path / name)
        writer.settle()
        found = [
            raised(lambda: writer.wait(handles[0])),  # type: ignore[arg-type]
            raised(lambda: save(writer, handles[1], tmp_path / "again")),
            raised(lambda: writer.wait(handles[1])),  # type: ignore[arg-type]
            raised(writer.wait),
            raised(writer.wait),
        ]
        writer.close()
        return found

    for found in run_ranks(of_rank):
        assert found == ["", "OSError: disk full", "", "a reason of its own", ""]
    assert "again" not in writes.given


def test_several_errors_are_told_together_and_once(tmp_path: Path, writes: Writes) -> None:
    for name, rank in (("first", 1), ("second", 0), ("third", 0), ("third", 1)):
        writes.failing[(name, rank)] = OSError(name)

    def of_rank(group: dist.ProcessGroup) -> tuple[str, str]:
        writer = CheckpointWriter(group)
        for name in ("first", "second", "third"):
            save(writer, Handle(), tmp_path / name)
        found = raised(writer.wait), raised(writer.wait)
        writer.close()
        return found

    assert run_ranks(of_rank) == [("OSError: first; OSError: second; OSError: third", "")] * 2


@pytest.mark.parametrize("asked", [(0,), (1,), (0, 1), ()], ids=str)
def test_an_error_that_not_all_ranks_have_asked_for_is_raised_again_on_all(
    tmp_path: Path, writes: Writes, asked: tuple[int, ...]
) -> None:
    for rank in (0, 1):
        writes.failing[("one", rank)] = CheckpointError("lost")

    def of_rank(group: dist.ProcessGroup) -> list[Any]:
        writer, handle, other = CheckpointWriter(group), Handle(), Handle()
        save(writer, handle, tmp_path / "one")
        writer.settle()
        found: list[Any] = [writer.is_pending(other)]  # type: ignore[arg-type]
        if group.rank() in asked:
            found.append(raised(lambda: writer.is_pending(handle)))  # type: ignore[arg-type]
            found.append(writer.is_pending(handle))  # type: ignore[arg-type]
        found.append(raised(writer.wait))
        writer.close()
        return found

    for rank, found in enumerate(run_ranks(of_rank)):
        assert found == [False, *(["lost", False] if rank in asked else []), "" if asked == (0, 1) else "lost"]


def test_a_save_is_pending_until_it_is_written_and_other_handles_are_not_waited_for(tmp_path: Path, writes: Writes) -> None:
    def of_rank(group: dist.ProcessGroup) -> None:
        writer, slow, quick = CheckpointWriter(group), Handle(), Handle()
        writes.may_write.clear()
        save(writer, slow, tmp_path / "slow", x=(x := torch.tensor([1.0, 2.0])), extra={"at": [3]})
        x.zero_()
        assert writer.is_pending(slow) and not writer.is_pending(quick)  # type: ignore[arg-type]
        writer.wait(quick)  # type: ignore[arg-type]
        save(writer, quick, tmp_path / "quick")
        assert writer.is_pending(slow) and writer.is_pending(quick)  # type: ignore[arg-type]
        writes.may_write.set()
        save(writer, slow, tmp_path / "slow", x=torch.tensor([5.0, 6.0]))
        writer.settle()
        assert not writer.is_pending(slow) and not writer.is_pending(quick)  # type: ignore[arg-type]
        writer.close()

    run_ranks(of_rank, 1)
    # What was copied when the save was asked for, and in that order.
    assert writes.given == {"slow": [(0, [1.0, 2.0], {"at": [3]}), (0, [5.0, 6.0], {})], "quick": [(0, [0.0, 0.0], {})]}


def test_a_close_waits_raises_the_first_error_that_nobody_has_heard_and_gives_up_the_thread(
    tmp_path: Path, writes: Writes
) -> None:
    for name in ("heard", "second", "third"):
        writes.failing[(name, 0)] = OSError(name)

    def of_rank(group: dist.ProcessGroup) -> list[str]:
        before = threading.active_count()
        writer, heard = CheckpointWriter(group), Handle()
        for handle, name in ((heard, "heard"), (Handle(), "fine"), (Handle(), "second"), (Handle(), "third")):
            save(writer, handle, tmp_path / name)
        writer.settle()
        assert threading.active_count() == before + 1
        found = [raised(lambda: writer.is_pending(heard), OSError)]  # type: ignore[arg-type]
        found += [raised(writer.close, OSError), raised(writer.close, OSError)]
        assert threading.active_count() == before
        save(writer, heard, tmp_path / "afterwards")
        writer.close()
        return found

    assert run_ranks(of_rank, 1) == [["heard", "second", ""]]
    assert writes.given["afterwards"]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({1: 2}, r"extra=\{1: 2\}: JSON turns it into \{'1': 2\}; use strings as keys, and lists"),
        ({"a": (1, 2)}, r"JSON turns it into \{'a': \[1, 2\]\}; use strings"),
        ({"a": {1}}, r"extra=\{'a': \{1\}\}: it is kept as JSON: Object of type set is not JSON serializable"),
        ({"a": float("nan")}, r"JSON turns it into \{'a': nan\}"),
    ],
    ids=str,
)
def test_what_json_does_not_keep_is_refused_on_all_ranks_and_leaves_nothing(
    tmp_path: Path, writes: Writes, extra: Any, message: str
) -> None:
    asked: list[int] = []

    def of_rank(group: dist.ProcessGroup) -> str:
        writer = CheckpointWriter(group)

        def state() -> Any:
            asked.append(group.rank())
            return {"x": torch.zeros(1)}, MANIFEST

        given = extra if group.rank() == 0 else None
        return raised(
            lambda: writer.save_training_state(Handle(), tmp_path / "out", state, asynchronous=False, extra=given)  # type: ignore[arg-type]
        )

    first, second = run_ranks(of_rank)
    assert first == second
    with pytest.raises(CheckpointError, match=message):
        raise CheckpointError(first)
    assert "out could not be saved" in first and not asked and not writes.given and not list(tmp_path.iterdir())


def test_a_state_that_cannot_be_taken_leaves_nothing_and_a_path_that_exists_is_not_touched(
    tmp_path: Path, writes: Writes
) -> None:
    (tmp_path / "there").mkdir()

    def of_rank(group: dist.ProcessGroup) -> list[str]:
        writer, handle = CheckpointWriter(group), Handle()

        def state() -> Any:
            if group.rank() == 1:
                raise RuntimeError("out of memory")
            return {"x": torch.zeros(1)}, MANIFEST

        def refused(asynchronous: bool) -> str:
            options: Any = {"asynchronous": asynchronous}
            return raised(lambda: writer.save_training_state(handle, tmp_path / "out", state, **options))  # type: ignore[arg-type]

        found = [refused(False), refused(True)]
        found.append(raised(lambda: save(writer, handle, tmp_path / "there", asynchronous=False)))
        save(writer, handle, tmp_path / "below" / "new", asynchronous=False, extra={"a": [1, None, {"b": "c"}]})
        return found

    for found in run_ranks(of_rank):
        assert found[0] == found[1] == f"{tmp_path}/out could not be saved: RuntimeError: out of memory (on rank 1)"
        assert "there exists; a checkpoint is written to a new directory" in found[2]
    assert sorted(writes.given["new"]) == [
        (0, [0.0, 0.0], {"a": [1, None, {"b": "c"}]}),
        (1, [0.0, 0.0], {"a": [1, None, {"b": "c"}]}),
    ]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["below", "there"]


def test_saves_in_the_background_wait_for_other_ranks_as_long_as_they_are_told(tmp_path: Path, writes: Writes) -> None:
    def of_rank(group: dist.ProcessGroup) -> list[dict[str, Any]]:
        asked: list[dict[str, Any]] = []
        with pytest.MonkeyPatch.context() as patch:
            opened = dist.new_group
            patch.setattr(dist, "new_group", lambda **options: asked.append(options) or opened(**options))  # type: ignore[func-returns-value]
            writer, handle = CheckpointWriter(group, timedelta(seconds=9)), Handle()
            save(writer, handle, tmp_path / "now", asynchronous=False)
            assert asked == []
            for name in ("first", "second"):
                save(writer, handle, tmp_path / name)
            writer.close()
        return asked

    assert run_ranks(of_rank, 1) == [[{"backend": "gloo", "timeout": timedelta(seconds=9)}]]


def test_the_end_of_a_handle_waits_for_its_own_save_alone(tmp_path: Path, writes: Writes) -> None:
    writes.failing[("first", 0)], writes.failing[("second", 0)] = OSError("first"), OSError("second")

    def of_rank(group: dist.ProcessGroup) -> list[str]:
        writer, first, second, without = CheckpointWriter(group), Handle(), Handle(), Handle()
        for handle, name in ((first, "first"), (second, "second")):
            save(writer, handle, tmp_path / name)
        found = [raised(lambda each=each: writer.finish(each)) for each in (without, second, second)]  # type: ignore[misc]
        return [*found, raised(writer.close, OSError)]

    assert run_ranks(of_rank, 1) == [["", "OSError: second", "", "first"]]
