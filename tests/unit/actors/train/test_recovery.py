"""A group whose rank dies goes on with another, here with real models in this process, without Ray."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.train.context import HandleRef, RankContext, RankFunction
from actors.train.group import TrainGroup
from actors.train.outcome import RankInfo
from rl_backend.algorithm import sft_loss
from rl_backend.contracts import BatchError, GroupFailedError, RanksReplacedError, UnsupportedError
from rl_backend.contracts.lora import LORA_FIELD, LoRAConfig
from tests.support.models import write_tiny
from tests.support.ranks_in_process import assert_same, group_that_recovers, sequences, use_ranks_here


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("qwen3", tmp_path_factory.mktemp("recovery") / "model")


@pytest.fixture(scope="module", autouse=True)
def ended() -> Iterator[list[RankInfo]]:
    with pytest.MonkeyPatch.context() as patch:
        yield use_ranks_here(patch)[0]


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
    ended.clear()
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
            GroupFailedError,
            match=r"^operation 3 \(forward_backward\) \(rows: 3 sequences of up to 12 tokens, 26 in all, on 1 "
            r"data-parallel rank\) has ended its ranks 2 times, at last so: .*"
            r"\. Then held memory on the driver's node: engine 3 GB; all ranks were stopped",
        ):
            group.forward_backward(policy, sequences(1), sft_loss)
        assert len(ranks) == 2 and not group.recoveries
        with pytest.raises(GroupFailedError):
            group.zero_grad(policy)


def test_who_waits_for_what_a_failed_recovery_did_not_send_again_is_told(model: Path) -> None:
    with group_that_recovers(model, 3, 2, 2) as (group, _):
        recovery: Any = group._recovery
        policy = group.build_model()
        group.forward_backward(policy, sequences(1), sft_loss)
        dead = group.zero_grad.submit(policy)
        kept = recovery._kept._kept[-1]
        with pytest.raises(GroupFailedError, match=r"^operation 2 \(forward_backward\) \(.+\) has ended its ranks 2 times"):
            dead.result()
        found: list[Exception] = []

        def wait() -> None:  # as another thread that had a part of it
            try:
                recovery.result(kept, None)
            except Exception as error:  # noqa: BLE001
                found.append(error)

        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        waiting.join(30)
        assert [type(error) for error in found] == [GroupFailedError]


@pytest.mark.parametrize("when", ["before", "in it"])
def test_a_rank_that_dies_while_its_group_closes_is_no_error(
    model: Path, when: str, caplog: pytest.LogCaptureFixture, ended: list[RankInfo], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.train.group.end_processes", ended.extend)
    with group_that_recovers(model, *([2] if when == "in it" else [])) as (group, ranks):
        group.build_model()
        ranks[0].is_dead = when == "before"
        before = len(ended)
        group.shutdown()
        assert len(ranks) == 1 and not group.recoveries and ended[before:] == list(ranks[0].infos)
    assert "a rank was lost while its group closed: rank 0 died" in caplog.text


def test_other_results_on_new_ranks_end_the_group(model: Path, tmp_path: Path) -> None:
    with group_that_recovers(model, 4) as (group, ranks):
        policy = group.build_model()
        group.forward_backward(policy, sequences(1), sft_loss)
        group.optimizer_step(policy)
        state = torch.get_rng_state
        kept: Any = group._recovery._kept._kept[1]
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


def trained_together(group: TrainGroup, folder: Path | None) -> list[Any]:
    """Four steps of tenants that share passes: carl leaves after the second. With a folder ann has a checkpoint then."""
    base = group.build_model(name="base", trainable=False)
    tenants = [
        group.create_lora_adapter(base, LoRAConfig(rank=rank), name=name)
        for name, rank in (("ann", 2), ("bob", 4), ("carl", 3))
    ]
    found: list[Any] = []
    for step in range(1, 5):
        rows = [
            row.with_fields(sequence_fields={LORA_FIELD: torch.tensor(tenant.lora_id)})
            for tenant in tenants
            for row in sequences(step)
        ]
        passed = group.forward_backward(base, rows, {tenant.name: sft_loss for tenant in tenants})
        for tenant in tenants:
            found += [passed.tenants[tenant.name].losses, group.optimizer_step(tenant)]
            group.zero_grad(tenant)
        if step == 2:
            if folder is not None:
                save(group, folder, {"ann": tenants[0]})
            group.remove_lora_adapter(tenants.pop())
    return [*found, *(torch.cat(list(group.forward(tenant, sequences(0)).output("log_probs"))) for tenant in tenants)]


def test_tenants_go_on_from_passes_that_they_shared_with_one_that_has_left(model: Path) -> None:
    with group_that_recovers(model) as (group, (rank,)):
        expected, ran = trained_together(group, None), rank.ran
    death = [number for number, name in ran if name == "optimizer_step"][-1]
    with group_that_recovers(model, death) as (group, _):
        assert_same(trained_together(group, None), expected)
        assert group.epoch == 1


def test_tenants_that_share_passes_continue_each_from_its_own_checkpoint(model: Path, tmp_path: Path) -> None:
    with group_that_recovers(model) as (group, (rank,)):
        expected, ran = trained_together(group, tmp_path / "undisturbed"), rank.ran
    steps = [number for number, name in ran if name == "optimizer_step"]
    with group_that_recovers(model, steps[-2], steps[-1]) as (group, ranks):
        assert_same(trained_together(group, tmp_path / "disturbed"), expected)
        assert len(ranks) == 3 and len(group.recoveries) == 2
    repeated = [name for number, name in ranks[1].ran if number < steps[-2]]
    # Three of bob and one of ann; her others are in the checkpoint, and those of carl, who has left, are over.
    assert repeated.count("optimizer_step") == 3 + 1 and repeated.count("load_checkpoint") == 1
    assert repeated.count("forward_backward") == 4
