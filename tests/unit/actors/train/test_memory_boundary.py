"""A group that keeps the state after each step in memory goes on from there, without a checkpoint."""

from __future__ import annotations

import math
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray import cloudpickle
from ray.exceptions import RayError

from actors.cluster.processes import Process, start_time
from actors.train import memory_boundary
from actors.train.context import HandleRef, RankContext
from actors.train.group import TrainGroup
from actors.train.kept import Kept, KeptOperations
from actors.train.order import OperationHeader
from actors.train.outcome import RankInfo
from actors.wire import held_memory
from rl_backend.contracts import CheckpointError, GroupFailedError
from rl_backend.contracts.lora import LoRAConfig
from tests.support.actors_in_process import until
from tests.support.models import write_tiny
from tests.support.plain_handle import PlainHandle
from tests.support.ranks_in_process import (
    HolderHere,
    assert_same,
    group_that_recovers,
    sequences,
    train_step,
    use_ranks_here,
)
from tests.support.written_checkpoints import manifest_of

STEPS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("qwen3", tmp_path_factory.mktemp("memory") / "model")


@pytest.fixture
def holders(monkeypatch: pytest.MonkeyPatch) -> list[HolderHere]:
    return use_ranks_here(monkeypatch)[1]


def trained(group: TrainGroup, *, after: Callable[[int], None] = lambda step: None) -> list[Any]:
    """Steps of a model and a tenant beside it, in turn; all that was computed."""
    policy, base = group.build_model(name="policy"), group.build_model(name="base", trainable=False)
    tenant = group.create_lora_adapter(base, LoRAConfig(rank=4, dropout=0.25))
    found: list[Any] = []
    for step in range(1, STEPS + 1):
        found += [*train_step(group, policy, step), *train_step(group, tenant, step)]
        after(step)
    outputs = [torch.cat(list(group.forward(handle, sequences(0)).output("log_probs"))) for handle in (policy, tenant)]
    return [*found, *outputs, group.weight_version(policy)]


@pytest.fixture(scope="module")
def undisturbed(model: Path) -> Iterator[tuple[list[Any], list[tuple[int, str]]]]:
    with pytest.MonkeyPatch.context() as patch:
        use_ranks_here(patch)
        with group_that_recovers(model, in_memory=True) as (group, (rank,)):
            yield trained(group), rank.ran


@pytest.mark.parametrize("nodes", [("here",), ("here", "there")], ids=["one node", "two nodes"])
@pytest.mark.parametrize(
    ("name", "which"),
    [("forward_backward", 0), ("forward_backward", 5), ("optimizer_step", 4), ("hold_state", 4), ("lr_scheduler_step", 7)],
)
def test_whatever_a_rank_dies_in_all_that_follows_is_the_same_and_a_step_at_most_runs_again(
    name: str,
    which: int,
    nodes: Sequence[str],
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    undisturbed: tuple[list[Any], list[tuple[int, str]]],
) -> None:
    _, holders = use_ranks_here(monkeypatch, nodes)
    expected, ran = undisturbed
    death = [number for number, each in ran if each == name][which]
    with group_that_recovers(model, death, in_memory=True) as (group, ranks):
        assert_same(trained(group), expected)
        (event,) = group.recoveries
        assert len(ranks) == 2 and event.steps <= 1 and event.operations <= 12
        # Of each model the last state, and the one before that where it is not freed yet.
        assert {each.node_id for each in holders} == set(nodes)
        assert all(len(each.holder._files) <= 4 for each in holders)
    assert all(not each.holder._files for each in holders)


def test_a_node_that_is_lost_leaves_the_copy_of_another(
    model: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: tuple[list[Any], list[tuple[int, str]]]
) -> None:
    _, holders = use_ranks_here(monkeypatch, ["there", "here"])
    expected, ran = undisturbed
    death = [number for number, each in ran if each == "optimizer_step"][5]

    def lose(step: int) -> None:
        if step == 2:
            next(each for each in holders if each.node_id == "here").die()

    with group_that_recovers(model, death, in_memory=True) as (group, _):
        assert_same(trained(group, after=lose), expected)
        assert group.epoch == 1 and len(holders) == 3


def test_a_node_without_room_for_a_copy_leaves_the_state_with_the_ranks(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, holders = use_ranks_here(monkeypatch, ["there", "here"])
    monkeypatch.setattr(held_memory, "read_memory", lambda: (2**30, 100))
    said: list[str] = []
    with group_that_recovers(model, in_memory=True) as (group, ranks):
        group.say_recoveries(said.append)
        policy = group.build_model(name="policy")
        for step in (1, 2, 3):
            train_step(group, policy, step)
        (line,) = said
        assert "the state of 'policy' has no copy on another node than its ranks' (no room there: it takes" in line
        assert {each.node_id: bool(each.holder._files) for each in holders} == {"here": True, "there": False}
        ranks[0].is_dead = True
        group.zero_grad(policy)
        assert group.recoveries[0].steps == 0


def test_a_holder_that_dies_is_started_again_and_the_next_step_is_kept_there(
    model: Path, holders: list[HolderHere], undisturbed: tuple[list[Any], list[tuple[int, str]]]
) -> None:
    expected, ran = undisturbed
    said: list[str] = []
    death = [number for number, each in ran if each == "forward_backward"][-1]

    def lose(step: int) -> None:
        if step == 1:
            holders[0].die()

    with group_that_recovers(model, death, in_memory=True) as (group, _):
        group.say_recoveries(said.append)
        assert_same(trained(group, after=lose), expected)
        assert group.epoch == 1 and len(holders) == 2 and group.recoveries[0].steps <= 1
    assert [("memory was lost; another one is started" in line, "the run goes on" in line) for line in said] == [
        (True, False),
        (False, True),
    ]


def test_a_stopped_holder_is_ended_within_seconds_and_another_one_started(
    holders: list[HolderHere], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, said = RankInfo(0, "here", "127.0.0.1", 1, "1"), list[str]()
    boundaries = memory_boundary.MemoryBoundaries(said.append)
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        boundaries.place([here])
        boundaries._processes[id(holders[0])] = (sleeper.pid, start_time(sleeper.pid))
        asked = memory_boundary._Asked(
            HandleRef("group", 0, "policy", False, (0,), (0,)), 1, 0, [], ["an answer"], time.monotonic() - 10
        )
        boundaries._asked[0] = asked
        monkeypatch.setattr(memory_boundary.ray, "wait", lambda refs, **_: ([], refs))
        boundaries.made([here])
        assert not said and len(holders) == 1, "a holder that is busy is waited for"
        sleeper.send_signal(signal.SIGSTOP)
        until(lambda: Process.of(sleeper.pid).is_stopped)
        holders[0].is_dead = True
        boundaries.made([here])
        sleeper.kill()
    assert len(holders) == 2 and "was lost; another one is started" in said[0]


def test_a_rank_and_the_only_holder_that_die_together_end_the_group_and_say_what_to_do(
    model: Path, holders: list[HolderHere]
) -> None:
    with group_that_recovers(model, in_memory=True) as (group, ranks):
        policy = group.build_model(name="policy")
        train_step(group, policy, 1)
        train_step(group, policy, 2)
        holders[0].die()
        ranks[0].is_dead = True
        with pytest.raises(GroupFailedError, match=r"the state of 'policy' in memory died too.*resume=auto"):
            group.zero_grad(policy)
        assert len(ranks) == 1


def test_only_what_came_since_the_last_step_is_kept(model: Path, holders: list[HolderHere]) -> None:
    with group_that_recovers(model, in_memory=True) as (group, _):
        kept: Any = group._recovery._kept
        policy = group.build_model(name="policy")
        sizes = []
        for _ in range(4):
            train_step(group, policy, 1)
            group.run_on_ranks(lambda context: None)
            sizes.append((len(kept), kept.nbytes))
        assert sizes[1] == sizes[2] == sizes[3]
        (holder,) = holders
        assert len(holder.holder._files) <= 2


def test_a_state_that_cannot_be_kept_is_said_once_and_the_run_goes_on(
    model: Path, holders: list[HolderHere], monkeypatch: pytest.MonkeyPatch
) -> None:
    free = iter(range(0, -100 * 2**20, -(2**20)))  # other figures at each step
    monkeypatch.setattr(memory_boundary, "read_memory", lambda: (2**30, next(free)))
    said: list[str] = []
    with group_that_recovers(model, in_memory=True) as (group, ranks):
        group.say_recoveries(said.append)
        policy = group.build_model(name="policy")
        for step in range(3):
            train_step(group, policy, step)
        (line,) = said
        assert "the state of 'policy' could not be kept in memory (MemoryError: it takes" in line
        ranks[0].is_dead = True
        group.zero_grad(policy)
        assert group.recoveries[0].steps == 3


def test_a_model_that_takes_no_step_any_more_is_kept_by_the_next_holder_too(model: Path, holders: list[HolderHere]) -> None:
    with group_that_recovers(model, in_memory=True) as (group, ranks):
        idle, other = group.build_model(name="idle"), group.build_model(name="other")
        train_step(group, idle, 1)
        train_step(group, other, 1)
        expected = group.forward(idle, sequences(0)).output("log_probs")
        holders[0].die()
        for step in range(2, 5):
            train_step(group, other, step)
        ranks[0].is_dead = True
        assert_same(list(group.forward(idle, sequences(0)).output("log_probs")), list(expected))
        assert len(holders) == 2 and "build_model" in [name for _, name in ranks[1].ran]


def test_a_copy_that_fails_in_the_middle_leaves_the_one_before(
    model: Path, holders: list[HolderHere], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_state = memory_boundary.write_state

    def fails(tensors: Any, manifest: Any, room: Callable[[int], torch.Tensor]) -> tuple[int, int]:
        room(1000).fill_(3)
        raise OSError("it was interrupted")

    with group_that_recovers(model, in_memory=True) as (group, ranks):
        policy = group.build_model(name="policy")
        for step in (1, 2):
            train_step(group, policy, step)
        monkeypatch.setattr(memory_boundary, "write_state", fails)
        for step in (3, 4):
            train_step(group, policy, step)
        monkeypatch.setattr(memory_boundary, "write_state", write_state)
        expected = group.forward(policy, sequences(0)).output("log_probs")
        ranks[0].is_dead = True
        assert_same(list(group.forward(policy, sequences(0)).output("log_probs")), list(expected))
        assert group.recoveries[0].steps == 2


def test_ranks_that_die_of_the_copy_itself_are_not_killed_by_it_for_ever(model: Path, holders: list[HolderHere]) -> None:
    said: list[str] = []
    with group_that_recovers(model, in_memory=True) as (group, ranks):
        group.say_recoveries(said.append)
        for rank in ranks:
            rank.dies = lambda header: header.name == "hold_state"
        policy = group.build_model(name="policy")
        for step in range(1, 5):
            train_step(group, policy, step)
            for rank in ranks:
                rank.dies = lambda header: header.name == "hold_state"
        assert len(ranks) == 3 and group.weight_version(policy) == 4
        assert sum("none is kept any more" in line for line in said) == 1


def test_ranks_that_die_before_they_come_to_the_copy_do_not_die_of_it(
    holders: list[HolderHere], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(refs: Any) -> None:
        raise RayError

    here, said = RankInfo(0, "here", "127.0.0.1", 1, "1"), list[str]()
    boundaries = memory_boundary.MemoryBoundaries(said.append)
    boundaries.place([here])
    monkeypatch.setattr(memory_boundary, "_has_died", lambda holder, **_: False)
    monkeypatch.setattr(memory_boundary.ray, "wait", lambda refs, **_: (refs, []))
    monkeypatch.setattr(memory_boundary.ray, "get", lost)
    handle = HandleRef("group", 0, "policy", False, (0,), (0,))
    for reached in (7.0, 8.0, math.inf, math.inf):
        boundaries._asked[0] = memory_boundary._Asked(handle, 9, 0, [], ["an answer"])
        assert not said and not boundaries.made([here], 0.0, lambda reached=reached: reached)
    assert "ranks died 2 times before their state was in memory" in said[0]


def test_a_state_is_asked_for_when_the_last_one_is_there_while_ranks_have_a_pass(
    model: Path, holders: list[HolderHere], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow:
        """Is making a state until it has been asked ``looks`` times."""

        def __init__(self, looks: int) -> None:
            self.looks, self.asked_while_making = looks, list[bool]()

        @property
        def making(self) -> set[int]:
            return {policy.key, other} if self.looks > 0 else {other}

        def made(self, *_: Any) -> list[Any]:
            self.looks -= 1
            return []

        def lost(self) -> list[Any]:
            return []

        def make(self, *_: Any) -> None:
            self.asked_while_making.append(policy.key in self.making)

        def forget(self, *_: Any) -> None: ...

        def close(self) -> None: ...

    with group_that_recovers(model, in_memory=True) as (group, _):
        policy = group.build_model(name="policy")
        recovery: Any = group._recovery
        recovery._memory.close()
        other = policy.key + 1  # a model that takes no step
        earlier = recovery._number - 1
        for reached, looks, making in ((earlier, 4, False), (earlier, 1, False), (math.inf, 4, True)):
            recovery._memory = slow = Slow(looks)
            monkeypatch.setattr(recovery, "_reached", lambda reached=reached: reached)
            recovery.stepped([policy])
            assert slow.asked_while_making == [making], "ranks that have nothing else to do do not wait"


def test_memory_of_a_tenant_that_is_gone_is_freed(model: Path, holders: list[HolderHere]) -> None:
    with group_that_recovers(model, in_memory=True) as (group, ranks):
        base = group.build_model(name="base", trainable=False)
        stays, goes = (group.create_lora_adapter(base, LoRAConfig(rank=2), name=name) for name in ("stays", "goes"))
        for step in (1, 2):
            train_step(group, stays, step)
            train_step(group, goes, step)
        group.remove_lora_adapter(goes)
        assert {key.model for key in holders[0].holder._files} == {stays.key}
        train_step(group, stays, 3)
        ranks[0].is_dead = True
        group.zero_grad(stays)
        assert group.epoch == 1 and [each.name for each in group.list_lora_adapters(base)] == ["stays"]


def test_what_a_checkpoint_in_the_background_has_to_write_can_be_written_again(
    model: Path, holders: list[HolderHere], tmp_path: Path
) -> None:
    """Its state is older than the last step's, which would not bring it back."""
    with group_that_recovers(model, in_memory=True) as (group, ranks):
        policy = group.build_model(name="policy")
        train_step(group, policy, 1)
        train_step(group, policy, 2)
        path = tmp_path / "saved"
        group.save_checkpoint(policy, path, asynchronous=True)
        group.wait_for_checkpoint(policy)
        moved = path.rename(tmp_path / "elsewhere")  # as if it were not there yet
        train_step(group, policy, 3)
        train_step(group, policy, 4)
        ranks[0].is_dead = True
        group.zero_grad(policy)
        assert "save_checkpoint" in [name for _, name in ranks[1].ran]
        group.wait_for_checkpoint(policy)
        assert path.is_dir() and moved.is_dir()


def test_a_save_that_failed_holds_back_no_later_state(model: Path, holders: list[HolderHere], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with group_that_recovers(model, in_memory=True) as (group, ranks):
        policy = group.build_model(name="policy")
        train_step(group, policy, 1)
        with pytest.raises(CheckpointError):
            group.save_checkpoint(policy, tmp_path / "file" / "state")
        for step in (2, 3):
            train_step(group, policy, step)
        ranks[0].is_dead = True
        group.zero_grad(policy)
        assert group.epoch == 1 and group.recoveries[0].steps == 0


def kept(number: int, models: Sequence[int], name: str = "forward_backward", **options: Any) -> Kept:
    header = OperationHeader(number, name)
    return Kept(header, b"1", None, "changes", frozenset(models), None, (), None, answered=True, **options)  # type: ignore[arg-type]


def test_what_may_concern_any_model_is_kept_until_each_has_a_boundary_after_it() -> None:
    operations = KeptOperations()
    for each in (kept(1, [1, 2], "zero_grad"), kept(2, []), kept(3, [1], "optimizer_step")):
        operations.add(each)

    def numbers() -> list[int]:
        return [each.number for each in operations.to_repeat()]

    operations.bound_in_memory(kept(4, [1], "load_held_state", boundary="first"))
    assert numbers() == [1, 2, 4] and operations.boundaries() == ["first"]
    operations.add(kept(5, [2], "optimizer_step"))
    operations.add(kept(7, [1]))
    operations.bound_in_memory(kept(6, [2], "load_held_state", boundary="second"))
    assert numbers() == [4, 6, 7]
    operations.add(kept(8, []))
    operations.forget_model(2)
    operations.bound_in_memory(kept(9, [1], "load_held_state", boundary="third"))
    assert numbers() == [9] and operations.nbytes == 1


def test_a_state_that_has_grown_gets_memory_that_holds_it() -> None:
    states = [{"weights": torch.arange(float(size))} for size in (9, 100_000, 5)]
    given = iter(states)
    runtime: Any = SimpleNamespace(
        training_state=lambda _: (next(given), manifest_of()), is_mp_src_rank_with_outputs=lambda _: True
    )
    context, policy = RankContext(runtime, "group", 0, 1), HandleRef("group", 0, "policy", False, (0,), (0,))
    context.keep(PlainHandle("policy", False, 0, 0, 1))
    for state in states:
        written = memory_boundary.hold_state(context, policy, 0).stored
        assert isinstance(written, held_memory.Written), written
        held = torch.from_file(written.path, shared=True, size=written.end, dtype=torch.uint8)
        assert torch.equal(held[: state["weights"].nbytes].view(torch.float32), state["weights"])


def test_a_rank_without_such_a_model_says_so(holders: list[HolderHere], model: Path) -> None:
    context = RankContext(None, "group", 0, 1)  # type: ignore[arg-type]
    answer = memory_boundary.hold_state(context, HandleRef("group", 3, "policy", False, (0,), (0,)), 0)
    assert answer.value is None and answer.stored == "HandleError: model 'policy' was not built by this training group"


@pytest.mark.parametrize(
    ("homes", "living", "mirrors"),
    [
        (["b"], ["a", "b", "c"], {"b": "c"}),
        (["c"], ["a", "b", "c"], {"c": "a"}),
        (["a"], ["a"], {}),
        (["a", "a"], ["a"], {}),
        (["c", "a"], ["a", "b", "c"], {"a": "c", "c": "a"}),
        (["c", "b", "a"], ["a", "b", "c", "d"], {"a": "b", "b": "c", "c": "a"}),
    ],
    ids=str,
)
def test_copies_lie_on_another_node_of_the_ranks_or_of_the_cluster_where_these_have_one(
    homes: list[str], living: list[str], mirrors: dict[str, str], holders: list[HolderHere], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_boundary, "living_nodes", lambda: [{"NodeID": node} for node in reversed(living)])
    boundaries = memory_boundary.MemoryBoundaries(lambda text: None)
    infos = [RankInfo(rank, node, "10.0.0.1", rank, "1") for rank, node in enumerate(homes)]
    boundaries.place(infos)
    assert boundaries._mirrors == mirrors
    assert sorted(holder.node_id for holder in holders) == sorted({*homes, *mirrors.values()})
    boundaries.place(infos)
    assert len(holders) == len({*homes, *mirrors.values()}), "who has a holder keeps it"


def test_a_copy_is_chosen_whose_holder_lives_and_a_hung_one_only_where_there_is_no_other(
    holders: list[HolderHere], monkeypatch: pytest.MonkeyPatch
) -> None:
    boundaries = memory_boundary.MemoryBoundaries(lambda text: None)
    near, far = HolderHere("near"), HolderHere("far")
    state: dict[str, str] = {}

    def has_died(holder: Any, *, hung: bool = False) -> bool:
        return state.get(holder.node_id) == "dead" or (hung and state.get(holder.node_id) == "hung")

    monkeypatch.setattr(memory_boundary, "_has_died", has_died)
    handle = HandleRef("group", 5, "policy", False, (0,), (0,))

    def boundary(*nodes: list[HolderHere]) -> Any:
        copies = tuple(
            tuple(
                memory_boundary.Copy(each.node_id, each, held_memory.HeldKey(5, rank, 1), held_memory.Written("p", 1, 2))
                for each in of_rank
            )
            for rank, of_rank in enumerate(nodes)
        )
        return memory_boundary.Boundary(handle, 1, 0, copies)

    def chosen(*nodes: list[HolderHere]) -> list[str] | None:
        found = boundaries.choose(boundary(*nodes))
        return None if found is None else [each.node_id for each in found]

    assert chosen([near, far], [far, near]) == ["near", "far"], "the nearest first"
    state["near"] = "dead"
    assert chosen([near, far], [far, near]) == ["far", "far"] and chosen([near, far], [near]) is None
    state["near"] = "hung"
    assert chosen([near, far], [far, near]) == ["far", "far"]
    assert chosen([near, far], [near]) == ["near", "near"], "its memory can be read all the same"
    assert boundaries.lost() == []
    boundaries._last[5] = boundary([near, far], [near])
    boundaries._dead = {id(far)}
    assert boundaries.lost() == []
    boundaries._dead = {id(near)}
    assert boundaries.lost() == [handle], "one of its ranks has no copy any more"


def test_states_of_a_model_take_two_memories_in_turn_and_one_is_made_at_a_time(
    holders: list[HolderHere], monkeypatch: pytest.MonkeyPatch
) -> None:
    boundaries, sent = memory_boundary.MemoryBoundaries(lambda text: None), list[Any]()
    infos = [RankInfo(rank, "here", "127.0.0.1", 1, "1") for rank in range(2)]
    boundaries.place(infos)

    def dispatch(name: str, calls: Sequence[bytes]) -> Any:
        sent.append((name, [cloudpickle.loads(call).args[1] for call in calls]))
        return OperationHeader(len(sent), name), [(None, "no memory is free")] * 2

    ranks: Any = SimpleNamespace(infos=infos, dispatch=dispatch)
    one, two = (HandleRef("group", key, f"model {key}", False, (0, 1), (0, 1)) for key in (5, 6))
    assert boundaries.make(one, ranks) == 1 and boundaries.make(one, ranks) is None and boundaries.make(two, ranks) == 2
    assert boundaries.making == {5, 6} and sent == [("hold_state", [0, 0])] * 2
    for generation in (0, 1):
        boundaries._asked.clear()
        boundaries._last[5] = memory_boundary.Boundary(one, 1, generation, ())
        boundaries.make(one, ranks)
        assert sent[-1] == ("hold_state", [1 - generation] * 2)
    boundaries.forget(5)
    assert not boundaries.making and not boundaries._last
