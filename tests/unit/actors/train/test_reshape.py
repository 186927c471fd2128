"""A group that gets other ranks between two steps, with real models in this process; only their places are not real."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.train import memory_boundary
from actors.train import recovery as recovery_module
from actors.train.group import TrainGroup
from actors.train.layout import Layout, check_fewest
from actors.train.recovery import MOST_HOLDS, Recovery, StateNotHeldError
from rl_backend.algorithm import sft_loss
from rl_backend.contracts import (
    ConfigError,
    HandleError,
    ParallelConfig,
    RLBackendError,
    RuntimeConfig,
    UnsupportedError,
)
from rl_backend.contracts.lora import LoRAConfig
from tests.support.models import write_tiny
from tests.support.ranks_in_process import (
    HolderHere,
    assert_same,
    group_that_recovers,
    sequences,
    train_step,
    use_ranks_here,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("qwen3", tmp_path_factory.mktemp("reshape") / "model")


@pytest.fixture
def holders(monkeypatch: pytest.MonkeyPatch) -> list[HolderHere]:
    return use_ranks_here(monkeypatch)[1]


def trained(group: TrainGroup, after: Callable[[int], None] = lambda step: None) -> list[Any]:
    """Four steps of a model and a tenant; what was asked before ``after`` is read after it."""
    policy, base = group.build_model(name="policy"), group.build_model(name="base", trainable=False)
    tenant = group.create_lora_adapter(base, LoRAConfig(rank=4, dropout=0.25))
    found: list[Any] = []
    for step in range(1, 5):
        found += [*train_step(group, policy, step), *train_step(group, tenant, step)]
        asked = group.forward.submit(policy, sequences(step))
        after(step)
        found.append(torch.cat(list(asked.result().output("log_probs"))))
    outputs = [torch.cat(list(group.forward(handle, sequences(0)).output("log_probs"))) for handle in (policy, tenant)]
    return [*found, *outputs, group.weight_version(policy)]


def recovery_of(group: TrainGroup) -> Any:
    return group._recovery


@pytest.fixture(scope="module")
def undisturbed(model: Path) -> list[Any]:
    with pytest.MonkeyPatch.context() as patch:
        use_ranks_here(patch)
        with group_that_recovers(model) as (group, _):
            return trained(group)


@pytest.mark.parametrize("in_memory", [True, False], ids=["memory", "checkpoint"])
def test_a_group_that_moves_trains_on_with_the_same_bits_and_recovers_from_there(
    model: Path, holders: list[HolderHere], undisturbed: list[Any], in_memory: bool
) -> None:
    with group_that_recovers(model, in_memory=in_memory) as (group, ranks):

        def after(step: int) -> None:
            if step == 2:
                event = group.reshape(1)
                assert event.describe().startswith("training group 'ours' went from 1 rank to 1 rank in ")
            if step == 3:
                ranks[-1].is_dead = True

        assert_same(trained(group, after), undisturbed)
        assert (group.epoch, len(ranks), len(group.reshapes)) == (2, 3, 1)
        assert ranks[0].ended
        # Nothing ran again on the second: what the first had was in memory.
        moved = [name for _, name in ranks[1].ran]
        moved = moved[: moved.index("recovered")]
        assert "optimizer_step" not in moved and moved.count("load_held_state") == 2
        assert group.recoveries[0].steps == (0 if in_memory else 2)


def test_a_model_whose_build_nobody_has_read_yet_moves_too(model: Path, holders: list[HolderHere]) -> None:
    with group_that_recovers(model, in_memory=True) as (group, _):
        recovery, asked = recovery_of(group), group.build_model.submit(name="policy")
        group.reshape(1)
        assert recovery.models.keys() == {1}
        moved = recovery.models[1] = dataclasses.replace(recovery.models[1], name="as it is laid out now")
        policy = asked.result()
        assert recovery.models[policy.key] is moved and len(group.journal) == 1


def test_a_build_whose_ranks_get_another_layout_while_it_is_read_is_read_again(
    model: Path, holders: list[HolderHere], monkeypatch: pytest.MonkeyPatch
) -> None:
    with group_that_recovers(model) as (group, (rank,)):
        recovery, collect, read = recovery_of(group), rank.collect, []

        def collect_late(*given: Any) -> list[Any]:
            if not read:
                recovery._lay_out(recovery.layout)
            read.append(given[1])
            return collect(*given)

        monkeypatch.setattr(rank, "collect", collect_late)
        policy = group.build_model()
        assert read == [1, 1] and recovery.models == {1: policy}


def test_states_of_a_group_that_has_checkpoints_are_freed_with_the_next(
    model: Path, holders: list[HolderHere], tmp_path: Path
) -> None:
    with group_that_recovers(model) as (group, _):
        policy = group.build_model(name="policy")
        train_step(group, policy, 1)
        group.reshape(1)
        (holder,) = holders
        assert holder.holder._files
        group.save_checkpoint(policy, tmp_path / "draft")
        (tmp_path / "draft").rename(tmp_path / "step")
        group.bound(policy, tmp_path / "draft", tmp_path / "step")
        assert holder.is_dead and not holder.holder._files
        train_step(group, policy, 2)
        group.reshape(1)
        assert len(holders) == 2


def test_a_group_is_reshaped_between_two_steps_alone(model: Path, holders: list[HolderHere], tmp_path: Path) -> None:
    with group_that_recovers(model, in_memory=True) as (group, ranks):
        policy = group.build_model(name="policy")
        group.forward_backward(policy, sequences(1), sft_loss)
        with pytest.raises(HandleError, match="model 'policy' has gradients; a group gets another layout between two steps"):
            group.reshape(1)
        group.optimizer_step(policy)
        with pytest.raises(ConfigError, match=r"world size 3 is not a multiple of tp\*pp\*cp"):
            group.reshape(3, tp=2)
        for num_ranks in (0, -1):
            with pytest.raises(ConfigError, match=rf"^num_ranks={num_ranks}: must be at least 1"):
                group.reshape(num_ranks)
        group._gpus_per_rank = 0.5
        with pytest.raises(ConfigError, match=r"^gpus_per_rank=0\.5: "):
            group.reshape(2)
        assert len(ranks) == 1 and not group.reshapes and group.config.backend_cfg.parallel == ParallelConfig()
    rank: Any = ranks[0]
    off = TrainGroup.__new__(TrainGroup)._over(group.config, Recovery(rank, None, Layout(group.config, 1)))
    with pytest.raises(ConfigError, match=r"^TrainGroup\.recover='off'"):
        off.reshape(1)


@pytest.mark.parametrize("where", ["start", "build"])
def test_ranks_that_do_not_take_over_leave_the_layout_of_before(
    model: Path, holders: list[HolderHere], undisturbed: list[Any], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with group_that_recovers(model, in_memory=True) as (group, _):
        recovery, failed = recovery_of(group), []
        start = recovery._start

        def start_badly(**options: Any) -> Any:
            if options["num_ranks"] == 1:
                return start(**options)
            failed.append(options["num_ranks"])
            if where == "start":
                raise UnsupportedError("there is no room")
            fresh = start(**options)
            monkeypatch.setattr(fresh.context.runtime, "build_model", lambda **_: (_ for _ in ()).throw(KeyError("heads")))
            return fresh

        recovery._start = start_badly

        def after(step: int) -> None:
            if step == 2:
                stays = r"^training group 'ours' stays on 1 rank, because 2 ranks \(dp=2\) could not take over: "
                with pytest.raises(RLBackendError, match=stays + ("there is no room" if where == "start" else "'heads'")):
                    group.reshape(2)

        assert_same(trained(group, after), undisturbed)
        assert failed == [2] and not group.reshapes and not group.recoveries and recovery.layout.num_ranks == 1


def test_a_group_whose_state_finds_no_room_in_memory_stays_as_it_is(
    model: Path, holders: list[HolderHere], monkeypatch: pytest.MonkeyPatch, undisturbed: list[Any]
) -> None:
    said: list[str] = []
    with group_that_recovers(model) as (group, ranks):
        group.say_recoveries(said.append)

        def after(step: int) -> None:
            monkeypatch.setattr(memory_boundary, "read_memory", lambda: (2**30, 0))
            with pytest.raises(RLBackendError, match="the state of 'policy' could not be kept"):
                group.reshape(1)

        assert_same(trained(group, after), undisturbed)
        assert len(ranks) == 1 and not group.reshapes
    assert ["MemoryError" in line for line in said] == [True, True], "said once of each model"


class Room:
    def __init__(self, num_ranks: int) -> None:
        self.num_ranks, self.is_there, self.given_back = num_ranks, False, False

    def give_back(self) -> None:
        self.given_back = True


def hold_nothing() -> None:
    raise StateNotHeldError("no memory is free")


def test_a_group_tries_to_grow_some_times_alone(model: Path, holders: list[HolderHere]) -> None:
    with group_that_recovers(model, in_memory=True) as (group, _):
        recovery = recovery_of(group)
        room = recovery._room = Room(1)
        recovery._wanted, recovery._hold_states = recovery.layout, hold_nothing
        for last in [False] * (MOST_HOLDS - 1) + [True]:
            assert group.grow() is None and room.given_back is last


def test_a_group_without_room_gets_smaller_and_grows_when_there_is_room(
    model: Path, holders: list[HolderHere], undisturbed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    rooms: list[Room] = []
    free = [3.0]
    with group_that_recovers(model, in_memory=True) as (group, ranks):
        group.say_recoveries(said.append)
        recovery = recovery_of(group)
        start, started = recovery._start, []

        def start_in_room(**options: Any) -> Any:
            if (number := options["num_ranks"]) * 2 > free[0]:
                details = {"asked": {"CPU": 2.0 * number}, "free": {"CPU": free[0], "GPU": 0.0}}
                raise UnsupportedError("there is no room", **details)
            started.append(number)
            return start(**options)

        def ask(num_ranks: int) -> Any:
            rooms.append(Room(num_ranks))
            return rooms[-1]

        recovery._start, recovery._ask_room, recovery._min_ranks = start_in_room, ask, 1
        recovery.layout = recovery.layout._replace(num_ranks=4)

        def after(step: int) -> None:
            if step == 1:
                for kept in recovery._kept._kept:  # as ranks of another layout would have answered
                    kept.digest = kept.digest and "with other last bits"
                ranks[0].is_dead = True
            if step == 3:
                assert started == [1] and [room.num_ranks for room in rooms] == [3] and not group.has_room
                assert (recovery.layout.num_ranks, group.wanted_ranks) == (1, 4)
                free[0] = 9.0
                rooms[0].is_there = True
                assert group.has_room
                with monkeypatch.context() as full:
                    full.setattr(recovery, "_hold_states", hold_nothing)
                    assert group.grow() is None and group.has_room and said.pop() == "no memory is free"
                event = group.grow()
                assert event is not None and event.describe().endswith(" (the cluster has room again)")
                assert rooms[0].given_back and not group.has_room and group.grow() is None

        assert_same(trained(group, after), undisturbed)
        assert started == [1, 4] and len(rooms) == 1
    (line,) = said
    assert "all ranks were replaced by 1 rank in place of 4 ranks (dp=4), for which the cluster has no room, in " in line
    assert [(event.before, event.after) for event in group.reshapes] == [
        ("4 ranks (dp=4)", "1 rank"),
        ("1 rank", "4 ranks (dp=4)"),
    ]


def layout(num_ranks: int, **sizes: int) -> Layout:
    return Layout(RuntimeConfig(hf_path="m", backend_cfg={"parallel": sizes}), num_ranks)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("of", "fewest", "most", "found"),
    [
        (layout(8), 1, 7, 7),
        (layout(8), 1, 99, 7),
        (layout(8, tp=2), 1, 7, 6),
        (layout(8, tp=2, ep=4), 1, 7, 4),
        (layout(8, tp=2), 4, 5, 4),
        (layout(8, tp=2), 5, 5, None),
        (layout(8), 3, 2, None),
        (layout(4, pp=2, tp=2), 1, 3, None),
    ],
)
def test_a_smaller_layout_has_fewer_data_parallel_ranks(of: Layout, fewest: int, most: int, found: int | None) -> None:
    smaller = of.smaller(fewest, most)
    assert (None if smaller is None else smaller.num_ranks) == found
    assert smaller is None or smaller.config is of.config


def test_fewest_ranks_are_those_of_a_layout() -> None:
    check_fewest("SFTConfig", ParallelConfig(tp=2), 4, 0)
    check_fewest("SFTConfig", ParallelConfig(tp=2), 4, 2)
    with pytest.raises(ConfigError, match=r"^SFTConfig.min_ranks=3: world size 3 is not a multiple of tp"):
        check_fewest("SFTConfig", ParallelConfig(tp=2), 4, 3)
    with pytest.raises(ConfigError, match=r"^SFTConfig.min_ranks=6: the group has 4 ranks; use at most that"):
        check_fewest("SFTConfig", ParallelConfig(tp=2), 4, 6)
    with pytest.raises(ConfigError, match=r"^TrainGroup\.min_ranks=1: recover=off ends the group at the first death"):
        TrainGroup(RuntimeConfig(hf_path="m"), 2, min_ranks=1)
    assert layout(4, tp=2).describe() == "4 ranks (dp=2, tp=2)" and layout(1).describe() == "1 rank"
    bridge = Layout(RuntimeConfig(backend="bridge", hf_path="m"), 2)
    assert bridge.describe() == "2 ranks of the bridge runtime (dp=2)"


def recovery_on(of: Layout, min_ranks: int) -> Any:
    ranks: Any = None
    return Recovery(ranks, None, of, min_ranks=min_ranks)


@pytest.mark.parametrize(
    ("of", "min_ranks", "asked", "free", "left"),
    [
        (layout(4), 1, {"CPU": 8.0}, {"CPU": 5.9, "GPU": 0.0}, 2),
        (layout(4), 1, {"CPU": 8.0, "GPU": 4.0}, {"CPU": 100.0, "GPU": 1.5}, 1),
        (layout(4), 1, {"CPU": 8.0, "GPU": 4.0}, {"CPU": 7.0, "GPU": 100.0}, 3),
        (layout(4), 2, {"CPU": 8.0}, {"CPU": 3.9}, None),
        (layout(4), 0, {"CPU": 8.0}, {"CPU": 5.9}, None),
        (layout(4), 1, {}, {"CPU": 5.9}, None),
        (layout(4, tp=2), 1, {"CPU": 4.0}, {"CPU": 3.0}, 2),
    ],
    ids=range(7),
)
def test_a_group_gets_as_small_as_the_scarcest_of_what_is_free(
    of: Layout, min_ranks: int, asked: dict[str, float], free: dict[str, float], left: int | None
) -> None:
    recovery = recovery_on(of, min_ranks)
    recovery._holds = 3
    assert recovery._shrink(UnsupportedError("no room", asked=asked, free=free)) is (left is not None)
    assert not recovery._shrink(UnsupportedError("something else"))
    if left is None:
        assert (recovery.layout, recovery.num_layouts, recovery.wanted_ranks) == (of, 0, of.num_ranks)
    else:
        assert (recovery.layout.num_ranks, recovery.num_layouts, recovery._holds) == (left, 1, 0)
        assert recovery.wanted_ranks == of.num_ranks


def test_a_group_that_gets_smaller_twice_wants_what_it_had_at_first() -> None:
    recovery = recovery_on(layout(4), 1)
    for free, left in ((6.0, 3), (2.0, 1)):
        number = recovery.layout.num_ranks
        assert recovery._shrink(UnsupportedError("no room", asked={"CPU": 2.0 * number}, free={"CPU": free}))
        assert (recovery.layout.num_ranks, recovery.wanted_ranks) == (left, 4)
    room = recovery._room = Room(3)
    room.is_there, recovery._off = True, ""
    assert recovery.has_room
    recovery._off = "it recovers no more"
    assert not recovery.has_room


def test_a_save_is_written_again_where_it_is_not_there_without_what_dead_ranks_left(tmp_path: Path) -> None:
    kept: Any = SimpleNamespace(call=b"the save")
    for name in (".saved.incomplete-1", ".other.incomplete-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank0").touch()
    assert recovery_module._call_of_save(kept, tmp_path / "saved") == b"the save"
    assert [path.name for path in tmp_path.iterdir()] == [".other.incomplete-1"]
    (tmp_path / "saved").mkdir()
    assert recovery_module._call_of_save(kept, tmp_path / "saved") == recovery_module._NOTHING
