"""A group whose rank dies goes on with another, here with real models in this process, without Ray."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray import cloudpickle

from actors.train import recovery as module
from actors.train.context import HandleRef, RankContext, RankFunction
from actors.train.group import TrainGroup
from actors.train.order import OperationHeader, OperationSequence
from actors.train.outcome import RankInfo
from actors.train.recovery import Recovery
from actors.train.worker import run
from rl_backend.algorithm import sft_loss
from rl_backend.contracts import BatchError, GroupFailedError, RanksReplacedError, TokenSequence, UnsupportedError
from rl_backend.contracts.atoms import Operation
from rl_backend.contracts.lora import LoRAConfig
from tests.support.models import write_tiny
from tests.support.native import VOCAB_SIZE, open_runtime
from tests.support.sft_batches import random_token_sequences

DIES = "dies"


class RankHere:
    """The only rank of a group: an operation runs when it is sent. ``dies`` says in which it dies instead."""

    def __init__(self, context: RankContext, dies: Callable[[OperationHeader], bool], number: int = 0) -> None:
        self.context, self.dies, self.number = context, dies, number
        self.members: Any = SimpleNamespace(id=context.group_id, name="ours", workers=[None], kill=lambda: None)
        self.infos = (RankInfo(0, "here", "127.0.0.1", 1),)
        self.sequence = OperationSequence()
        self.driver, self.bounds, self.peak_memory, self.operator = "driver", None, 0, ""
        self.journal: list[Operation] = []
        self.ran: list[tuple[int, str]] = []
        self.is_dead = self.ended = False

    def dispatch(self, name: str, calls: Sequence[bytes], loss: Any = None) -> Any:
        if self.is_dead:
            raise GroupFailedError("rank 0 died between operations")
        self.number += 1
        header = OperationHeader(self.number, name)
        return header, self._send(header, calls)

    def repeat(self, header: OperationHeader, calls: Sequence[bytes], loss: Any, after: int) -> Any:
        return self._send(OperationHeader(header.number, header.name, after=after), calls)

    def take_place_of(self, lost: RankHere, number: int) -> None:
        self.journal, self.number = list(lost.journal), number

    def _send(self, header: OperationHeader, calls: Sequence[bytes]) -> Any:
        self.is_dead = self.is_dead or self.dies(header)
        if self.is_dead:
            return [(DIES, None)]
        self.sequence.start(header)
        self.context.operation = header.number
        self.ran.append((header.number, header.name))
        answer: Any
        try:
            call = cloudpickle.loads(calls[0])
            answer = run(self.context, call, sft_loss if header.name == "forward_backward" else None)
        except Exception as error:  # noqa: BLE001, as on a rank
            answer = error
        self.sequence.finish(None)
        return [(answer, None)]

    def collect(self, title: str, number: int, refs: Sequence[Any], timeout: float | None) -> list[Any]:
        if refs[0] is DIES:
            raise GroupFailedError(f"rank 0 died during {title}; {module.AFTERWARDS}")
        if isinstance(refs[0], Exception):
            raise refs[0]
        return list(refs)

    def has_answered(self, refs: Sequence[Any]) -> bool:
        return refs[0] is not DIES

    def fail(self, message: str, *, cause: Exception) -> None:
        raise GroupFailedError(message) from cause

    def ready(self, refs: Sequence[Any]) -> bool:
        return True

    def end(self) -> None:
        self.ended = self.is_dead = True

    def keep(self, operation: Operation) -> None:
        self.journal.append(operation)

    def forget(self, key: int) -> None:
        self.journal = [each for each in self.journal if each.number != key]


@pytest.fixture(scope="module", autouse=True)
def _without_ray() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("actors.train.loss.ray.put", lambda loss: loss)  # Ray would start
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("qwen3", tmp_path_factory.mktemp("recovery") / "model")


@pytest.fixture(autouse=True)
def ended(monkeypatch: pytest.MonkeyPatch) -> list[RankInfo]:
    found: list[RankInfo] = []
    monkeypatch.setattr(module, "end_processes", found.extend)
    monkeypatch.setattr(module, "_PAUSE_SECONDS", 0.0)
    return found


@contextmanager
def group_that_recovers(model: Path, *deaths: int) -> Iterator[tuple[TrainGroup, list[RankHere]]]:
    """Each number is an operation in which the rank of then dies, in this order."""
    left, started = list(deaths), []
    with ExitStack() as stack:

        def dies(header: OperationHeader) -> bool:
            if left and header.number == left[0]:
                return bool(left.pop(0))
            return False

        def start(**_: Any) -> Any:
            runtime = stack.enter_context(open_runtime(model))
            started.append(RankHere(RankContext(runtime, "group", 0, 1), dies))
            return started[-1]

        first = start()
        recovery = Recovery(first, start)
        yield TrainGroup.__new__(TrainGroup)._over(first.context.runtime.config, first, None, recovery), started


def sequences(step: int) -> list[TokenSequence]:
    rows = random_token_sequences((9, 5, 12), VOCAB_SIZE, seed=step)
    return [row.with_fields(token_fields={"loss_mask": (torch.arange(len(row)) < len(row) - 1).float()}) for row in rows]


def trained(group: TrainGroup, folder: Path, *, after: Callable[[int], None] = lambda step: None) -> list[Any]:
    """Four steps of a model and a tenant beside it, with a checkpoint of both after the second; all that was computed."""
    policy, base = group.build_model(name="policy"), group.build_model(name="base", trainable=False)
    gone = group.create_lora_adapter(base, LoRAConfig(rank=2))
    group.remove_lora_adapter(gone)
    tenant = group.create_lora_adapter(base, LoRAConfig(rank=4, dropout=0.25))
    found: list[Any] = []
    for step in range(1, 5):
        with pytest.raises(BatchError):  # an error that all ranks answer with is one on new ranks too
            group.forward_backward(policy, [], sft_loss)
        for handle in (policy, tenant):
            group.zero_grad.submit(handle)
            passed = group.forward_backward.submit(handle, sequences(step), sft_loss)
            stepped = group.optimizer_step.submit(handle)
            group.lr_scheduler_step.submit(handle)
            found += [passed.result().losses, stepped.result()]
        if step == 2:
            save(group, folder, {"policy": policy, "tenant": tenant})
        after(step)
    outputs = [torch.cat(list(group.forward(handle, sequences(0)).output("log_probs"))) for handle in (policy, tenant)]
    return [*found, *outputs, group.weight_version(policy)]


def save(group: TrainGroup, folder: Path, handles: dict[str, HandleRef]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "draft").mkdir(parents=True)
    for name, handle in handles.items():
        group.save_checkpoint(handle, folder / "draft" / name)
    (folder / "draft").rename(folder / "step")
    for name, handle in handles.items():
        group.bound(handle, folder / "draft" / name, folder / "step" / name)


def assert_same(found: list[Any], expected: list[Any]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.fixture(scope="module")
def undisturbed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], list[tuple[int, str]]]:
    with group_that_recovers(model) as (group, (rank,)):
        return trained(group, tmp_path_factory.mktemp("undisturbed")), rank.ran


@pytest.mark.parametrize(
    ("name", "which"),
    [("create_lora_adapter", 1), ("forward_backward", 1), ("optimizer_step", 3), ("save_checkpoint", 1), ("zero_grad", 5)],
)
def test_whatever_a_rank_dies_in_all_that_follows_is_the_same(
    name: str, which: int, model: Path, tmp_path: Path, undisturbed: tuple[list[Any], list[tuple[int, str]]]
) -> None:
    expected, ran = undisturbed
    death = [number for number, each in ran if each == name][which]
    saved = [number for number, each in ran if each == "save_checkpoint"][-1]
    with group_that_recovers(model, death) as (group, ranks):
        assert_same(trained(group, tmp_path / "checkpoint"), expected)
        assert len(ranks) == 2 and group.epoch == 1
        (event,) = group.recoveries
    repeated = [number for number, _ in ranks[1].ran if number < death]
    builds = {number for number, each in ran if each in ("build_model", "create_lora_adapter", "remove_lora_adapter")}
    loads = {saved - 1, saved} if death > saved else set()
    # Of what came before the boundary only what builds; in its place the checkpoint is loaded.
    assert {number for number in repeated if number <= saved} - loads == (
        builds & set(repeated) if loads else {number for number in repeated if number <= saved}
    )
    assert [each for number, each in ranks[1].ran if number in loads] == ["load_checkpoint"] * len(loads)
    assert event.reason.startswith("rank 0 died")
    assert event.operations == sum(number <= death for number, _ in ranks[1].ran)


def test_a_rank_that_dies_while_another_catches_up_is_replaced_too(
    model: Path, tmp_path: Path, undisturbed: tuple[list[Any], list[tuple[int, str]]], ended: list[RankInfo]
) -> None:
    expected, ran = undisturbed
    steps = [number for number, each in ran if each == "optimizer_step"]
    with group_that_recovers(model, steps[-1], steps[-2]) as (group, ranks):
        assert_same(trained(group, tmp_path / "checkpoint"), expected)
        assert len(ranks) == 3 and len(group.recoveries) == 1 and len(ended) == 2


@pytest.mark.parametrize("error", [RuntimeError("CUDA out of memory"), UnsupportedError("there is no room")])
@pytest.mark.parametrize("failures", [2, 3])
def test_a_start_of_other_ranks_that_fails_is_tried_again(model: Path, error: Exception, failures: int) -> None:
    with group_that_recovers(model, 2) as (group, ranks):
        recovery: Any = group._recovery
        start, failed, limits = recovery._start, [], []

        def start_late(**options: Any) -> Any:
            if len(failed) == failures:
                limits.append(options.get("start_timeout"))
                return start(**options)
            failed.append((options["epoch"], options.get("start_timeout")))
            raise error

        recovery._start = start_late
        policy = group.build_model()
        if failures == 2:
            group.zero_grad(policy)
            assert len(ranks) == 2 and len(group.recoveries) == 1 and group.epoch == 3
            # Names of ranks that did not start may be taken for a while, and the last try has all the time of a start.
            assert failed == [(1, 60.0), (2, 120.0)] and limits == [None]
            return
        why = rf"^rank 0 died during operation 2 .*; other ranks could not take their place: {error}; all ranks were stopped"
        with pytest.raises(GroupFailedError, match=why):
            group.zero_grad(policy)
        with pytest.raises(GroupFailedError):
            group.zero_grad(policy)


def test_an_operation_that_ends_its_ranks_twice_ends_the_group_by_its_name(model: Path, tmp_path: Path) -> None:
    with group_that_recovers(model, 3, 3) as (group, ranks):
        policy = group.build_model()
        group.zero_grad(policy)
        with pytest.raises(
            GroupFailedError, match=r"^operation 3 \(forward_backward\) has ended its ranks 2 times, at last"
        ):
            group.forward_backward(policy, sequences(1), sft_loss)
        assert len(ranks) == 2 and not group.recoveries
        with pytest.raises(GroupFailedError):
            group.zero_grad(policy)


@pytest.mark.parametrize("when", ["before", "in it"])
def test_a_rank_that_dies_while_its_group_closes_is_no_error(
    model: Path, when: str, caplog: pytest.LogCaptureFixture, ended: list[RankInfo], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.train.group.end_processes", ended.extend)
    with group_that_recovers(model, *([2] if when == "in it" else [])) as (group, ranks):
        group.build_model()
        ranks[0].is_dead = when == "before"
        group.shutdown()
        assert len(ranks) == 1 and not group.recoveries and ended == list(ranks[0].infos)
    assert "a rank was lost while its group closed: rank 0 died" in caplog.text


def test_other_results_on_new_ranks_end_the_group(model: Path, tmp_path: Path) -> None:
    with group_that_recovers(model, 4) as (group, ranks):
        policy = group.build_model()
        group.forward_backward(policy, sequences(1), sft_loss)
        group.optimizer_step(policy)
        state = torch.get_rng_state
        kept: Any = group._recovery._kept._kept[1]  # type: ignore[union-attr]
        assert kept.header.name == "forward_backward" and callable(state)
        kept.digest = "that of other losses"
        with pytest.raises(GroupFailedError, match=r"operation 2 \(forward_backward\) has another result on the new ranks"):
            group.zero_grad(policy)
        assert len(ranks) == 2


def test_a_checkpoint_with_gradients_before_it_is_no_boundary(model: Path, tmp_path: Path) -> None:
    with group_that_recovers(model, 6) as (group, ranks):
        policy = group.build_model()
        expected = group.forward_backward(policy, sequences(1), sft_loss).losses
        save(group, tmp_path / "checkpoint", {"policy": policy})
        ok, norm, _ = group.optimizer_step(policy)
        assert ok and norm > 0 and expected
        group.weight_version(policy)
        group.zero_grad(policy)
        assert [name for _, name in ranks[1].ran][:4] == [
            "build_model",
            "forward_backward",
            "save_checkpoint",
            "optimizer_step",
        ]


def test_no_ranks_are_replaced_while_a_checkpoint_moves(model: Path, tmp_path: Path) -> None:
    with group_that_recovers(model, 3) as (group, ranks):
        policy, draft = group.build_model(), tmp_path / "draft"
        draft.mkdir()
        group.save_checkpoint(policy, draft / "policy")
        dead = group.zero_grad.submit(policy)
        with group.steady():
            waiting = threading.Thread(target=dead.result)
            waiting.start()
            draft.rename(tmp_path / "step")
            waiting.join(0.3)
            assert waiting.is_alive() and len(ranks) == 1
            group.bound(policy, draft / "policy", tmp_path / "step" / "policy")
        waiting.join(60)
        assert not waiting.is_alive() and not draft.exists()
        assert [name for _, name in ranks[1].ran][:3] == ["build_model", "load_checkpoint", "zero_grad"]


def test_calls_that_are_pinned_to_ranks_are_not_made_on_others(model: Path) -> None:
    def put(context: RankContext, value: int) -> int:
        return context.state.setdefault("put", value)  # type: ignore[no-any-return]

    with group_that_recovers(model, 3) as (group, ranks):
        group.build_model()
        ours = group.pinned()
        assert ours.run_on_ranks(put, 5) == [5] and ours == group.pinned()
        for _ in range(2):
            with pytest.raises(RanksReplacedError, match="run_on_ranks"):
                ours.run_on_ranks(put, 6)
        assert ours != group.pinned() and group.pinned().run_on_ranks(put, 7) == [7]
        assert [name for _, name in ranks[1].ran][:2] == ["build_model", "recovered"]


def test_what_is_kept_is_bounded(model: Path, tmp_path: Path) -> None:
    with group_that_recovers(model) as (group, (rank,)):
        recovery: Any = group._recovery
        policy = group.build_model()
        for step in range(3):
            group.forward(policy, sequences(step))
        few = recovery._kept.nbytes
        for step in range(3):
            group.zero_grad(policy)
            group.forward_backward(policy, sequences(step), sft_loss)
        recovery._most_bytes = recovery._kept.nbytes - 1
        assert group.wants_boundary and recovery._kept.nbytes > 2 * few
        group.zero_grad(policy)
        save(group, tmp_path / "checkpoint", {"policy": policy})
        assert not group.wants_boundary and recovery._kept.nbytes < recovery._most_bytes / 4
        while not recovery._off:
            group.zero_grad(policy)
            group.forward_backward(policy, sequences(1), sft_loss)
        assert "more was asked" in recovery._off and not recovery._kept.nbytes
        rank.is_dead = True
        with pytest.raises(GroupFailedError, match="died between operations"):
            group.zero_grad(policy)


def test_a_function_that_cannot_run_again_ends_the_group_by_its_name(model: Path) -> None:
    mark = model.parent / "mark"

    def once(context: RankContext) -> None:
        if mark.exists():
            raise KeyError("what was there before")
        mark.touch()

    with group_that_recovers(model, 2) as (group, _):
        group.run_on_ranks(once)
        with pytest.raises(GroupFailedError, match=r"operation 1 \(run_on_ranks\(.*once\)\) cannot be repeated: KeyError"):
            group.run_on_ranks(lambda context: None)


def test_a_function_of_a_caller_runs_again(model: Path) -> None:
    def count(context: RankContext) -> int:
        context.state["count"] = context.state.get("count", 0) + 1
        return int(context.state["count"])

    with group_that_recovers(model, 4) as (group, _):
        assert [group.run_on_ranks(count) for _ in range(5)] == [[1], [2], [3], [4], [5]]
        assert isinstance(RankFunction(count), RankFunction)
