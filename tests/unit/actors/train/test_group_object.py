"""What a group object says of its ranks, how copies of it come about, and its operations on ranks that are stand-ins."""

from __future__ import annotations

import gc
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray import cloudpickle

from actors.train import group as module
from actors.train import passes
from actors.train.context import HandleRef, RankContext, RankFunction
from actors.train.group import TrainGroup
from actors.train.order import Driver, OperationHeader
from actors.train.outcome import Apart, RankInfo
from actors.train.passes import forward_backward
from actors.train.ranks import GroupMembers, TrainRanks
from rl_backend.contracts import BatchError, HandleError, RLBackendError, RuntimeConfig, TokenSequence
from rl_backend.contracts.atoms import Operation
from rl_backend.runtime import Runtime
from tests.support.tensordicts import tensordict_of
from tests.support.told_ranks import FIRST, SECOND

CONFIG = RuntimeConfig(hf_path="model", max_tokens_per_micro_batch=7)
KILLED: list[str] = []


class Members(GroupMembers):
    """Tells when its ranks are stopped."""

    def kill(self) -> None:
        KILLED.append(self.name)


class Ranks(TrainRanks):
    """Answers what it is told to. Keeps what it is sent."""

    def __init__(self, count: int = 2) -> None:
        workers: Any = tuple(f"worker {rank}" for rank in range(count))
        placement: Any = None
        super().__init__(Members("group", "ours", workers, placement, 1.0), FIRST, owned=True)
        self.infos = (RankInfo(0, "a", "10.0.0.1", 7), RankInfo(1, "b", "10.0.0.2", 8))
        self.sent: list[tuple[str, list[Operation], Any]] = []
        self.answers: list[Any] = []
        self.collected: list[tuple[Any, ...]] = []
        self.forgotten: list[int] = []
        self.come = False

    def dispatch(self, name: str, pickled_calls: Any, loss: Any = None) -> Any:
        self.check_usable()
        self.sent.append((name, [cloudpickle.loads(call) for call in pickled_calls], loss))
        number = len(self.sent)
        return OperationHeader(number, name), [(f"outcome {rank}", f"stored {rank}") for rank in range(len(pickled_calls))]

    def collect(self, title: str, number: int, refs: Any, timeout: float | None) -> list[Any]:
        self.collected.append((title, number, list(refs), timeout))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return list(answer)

    def ready(self, refs: Any) -> bool:
        return self.come and list(refs) == ["outcome 0", "outcome 1"]

    def keep(self, operation: Operation) -> None:
        self.journal.append(operation)

    def forget(self, key: int) -> None:
        self.forgotten.append(key)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    KILLED.clear()
    made = Ranks()
    monkeypatch.setattr(Driver, "here", lambda: SECOND)
    return made


@pytest.fixture
def group(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> TrainGroup:
    monkeypatch.setattr(module, "start_ranks", lambda config, **asked: ranks)
    return TrainGroup(CONFIG, 2)


def ref(key: int, group_id: str = "group") -> HandleRef:
    return HandleRef(group_id, key, f"model {key}", False, (0, 1), (0, 1))


def test_all_that_a_group_is_given_goes_to_its_start(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, dict[str, Any]]] = []

    def start(config: RuntimeConfig, **given: Any) -> Ranks:
        asked.append((config, given))
        return ranks

    monkeypatch.setattr(module, "start_ranks", start)
    TrainGroup(CONFIG)
    own: dict[str, Any] = {"placement": "spread", "failure_grace": 1.5, "placement_timeout": 2.5, "start_timeout": 3.5}
    TrainGroup(CONFIG, 3, 4, 0.5, name="mine", **own)
    (_, first), (config, second) = asked
    assert first.pop("name") == f"train-{first['group_id'][:8]}" and first.pop("group_id") != second.pop("group_id")
    assert first == {
        "num_ranks": 1,
        "cores_per_rank": 1,
        "gpus_per_rank": 0,
        "placement": "pack",
        "failure_grace": 5.0,
        "placement_timeout": 10.0,
        "start_timeout": 300.0,
    }
    assert second == {"name": "mine", "num_ranks": 3, "cores_per_rank": 4, "gpus_per_rank": 0.5, **own} and config is CONFIG


def test_a_group_says_what_its_ranks_are(group: TrainGroup, ranks: Ranks) -> None:
    ranks.peak_memory = 99
    assert (group.name, group.num_ranks, group.ranks, group.peak_memory) == ("ours", 2, ranks.infos, 99)
    assert group.trace_actors() == {"rank 0": "worker 0", "rank 1": "worker 1"} and not group.ended
    group._ranks.end()
    assert group.ended and group.trace_actors() == {}


@pytest.mark.parametrize("copied", [True, False])
def test_a_group_that_nobody_holds_stops_its_ranks_unless_it_was_copied(
    copied: bool, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "start_ranks", lambda config, **asked: ranks)
    made = TrainGroup(CONFIG)
    if copied:
        ranks.operator = "whoever has it"
        ranks.keep(Operation("build_model", {}, 4))
        copy = pickle.loads(pickle.dumps(made))
        assert copy.config == CONFIG and copy.name == "ours" and copy.ranks == ranks.infos
        assert copy.journal == made.journal == (Operation("build_model", {}, 4),)
        with pytest.raises(RLBackendError, match="is operated by whoever has it, and this is the second"):
            copy.zero_grad(ref(1))
        del copy
    assert KILLED == []
    del made
    gc.collect()
    expected = [] if copied else ["ours"]
    assert expected == KILLED


def test_the_end_of_a_block_ends_the_group(group: TrainGroup, ranks: Ranks) -> None:
    ranks.answers = [[None, None]]
    with group as entered:
        assert entered is group
    assert ranks.collected == [("operation 1 (shutdown)", 1, ["outcome 0", "outcome 1"], 30.0)] and KILLED == ["ours"]
    with group:
        pass
    assert len(ranks.sent) == 1


def test_an_error_of_closing_is_noted_beside_the_one_that_ended_the_block(ranks: Ranks, group: TrainGroup) -> None:
    ranks.answers = [BatchError("cannot close")]
    with pytest.raises(KeyError) as caught, group:
        raise KeyError("the cause")
    assert caught.value.__notes__ == ["TrainGroup.shutdown() failed as well: cannot close"] and KILLED == ["ours"]


def test_an_error_of_closing_is_raised_where_it_is_the_only_one(ranks: Ranks, group: TrainGroup) -> None:
    ranks.answers = [BatchError("cannot close")]
    with pytest.raises(BatchError, match="cannot close"), group:
        pass
    assert KILLED == ["ours"]


def test_an_operation_is_sent_titled_and_waited_for(group: TrainGroup, ranks: Ranks) -> None:
    ranks.answers = [["first", "second"]]
    future = group.list_lora_adapters.submit(ref(3))
    assert ranks.sent == [("list_lora_adapters", [Operation("list_lora_adapters", {"handle": ref(3)})] * 2, None)]
    assert not future.done() and not ranks.collected
    ranks.come = True
    assert future.done()
    assert future.result(4.0) == "first" and future.name == "operation 1 (list_lora_adapters)"
    assert ranks.collected == [("operation 1 (list_lora_adapters)", 1, ["outcome 0", "outcome 1"], 4.0)]


def test_a_model_of_another_group_is_refused_before_anything_is_sent(group: TrainGroup, ranks: Ranks) -> None:
    for handle in (ref(1, "other"), [ref(2), ref(1, "other")]):
        with pytest.raises(HandleError) as caught:
            group.zero_grad(handle)
        assert str(caught.value) == "model 'model 1' belongs to another training group"
        assert caught.value.details == {"name": "model 1"}
    assert not ranks.sent


def test_several_models_are_sent_as_they_are_held(group: TrainGroup, ranks: Ranks) -> None:
    ranks.answers = [[None, None]] * 2
    group.zero_grad((ref(1), ref(2)))
    group.zero_grad(ref(1))
    assert [calls[0].arguments["handle"] for _, calls, _ in ranks.sent] == [(ref(1), ref(2)), ref(1)]


def test_each_rank_is_sent_the_pass_of_its_data_parallel_rank(group: TrainGroup, ranks: Ranks) -> None:
    """Given as a list or as a TensorDict."""
    rows = [
        TokenSequence(torch.arange(each, each + 4), {"loss_mask": torch.tensor([1.0, 1.0, 1.0, 0.0])}) for each in (10, 20)
    ]
    two = HandleRef("group", 1, "policy", False, (1, 0), (1, 0))
    for given in (rows, tensordict_of(rows)):
        group.forward.submit(two, given, meta={"temperature": 0.5}, router_replay="replay")
    for title, calls, loss in ranks.sent:
        assert (title, loss) == ("forward_backward", None)
        assert [call.function for call in calls] == [forward_backward] * 2
        assert [call.kwargs for call in calls] == [{"forward_only": True, "router_replay": "replay"}] * 2
        assert [call.args[0] for call in calls] == [two] * 2
        batches = [call.args[1] for call in calls]
        assert sorted(batch.input_ids.tolist() for (batch,) in batches) == [[10, 11, 12, 13], [20, 21, 22, 23]]
        shares = passes.spread(two, rows, passes.PassOptions(7, False, True, "off", {})).batches
        assert [batch.input_ids.tolist() for (batch,) in batches] == [shares[each][0].input_ids.tolist() for each in (1, 0)]
        assert all(batch.meta["temperature"] == 0.5 for (batch,) in batches)


def test_a_pass_is_cut_by_the_tokens_that_it_asks_for(group: TrainGroup, ranks: Ranks) -> None:
    sender: Any = SimpleNamespace(send=lambda loss: loss)
    group._losses, given = sender, sender
    rows = [TokenSequence(torch.arange(3), {"loss_mask": torch.tensor([1.0, 1.0, 0.0])}) for _ in range(4)]
    for most in (None, 3):
        group.forward.submit(ref(1), rows, max_tokens_per_micro_batch=most)
        group.forward_backward.submit(ref(1), rows, given, max_tokens_per_micro_batch=most)
    assert [len(calls[0].args[1]) for _, calls, _ in ranks.sent] == [1, 1, 2, 2]


def test_results_of_the_ranks_become_one(group: TrainGroup, ranks: Ranks) -> None:
    ranks.answers = [["a", "b"], [False, True], [False, False], [3, 3], [3, 4], [{"f": 1}, {}]]
    assert group.lr_scheduler_step(ref(1)) == "a"
    assert group.checkpoint_is_pending(ref(1)) is True and group.checkpoint_is_pending(ref(1)) is False
    assert group.weight_version(ref(1)) == 3
    with pytest.raises(RLBackendError, match=r"^ranks disagree on the weight version of 'model 1': \[3, 4\]$"):
        group.weight_version(ref(1))
    assert group.export_lora_adapter(ref(1)) == {"f": 1}


def test_what_cannot_leave_a_rank_is_not_started(group: TrainGroup, ranks: Ranks) -> None:
    with pytest.raises(AssertionError, match="what export_weights gives cannot leave a rank; call it in run_on_ranks"):
        group.submit(Runtime[HandleRef].export_weights, ref(1))
    assert not ranks.sent


def collect(context: RankContext, number: int, *, plus: int) -> int:
    return number + plus


class Called:
    """A callable without a name of its own."""

    def __call__(self, context: RankContext) -> None:
        pass


def test_a_function_is_titled_by_its_name_and_large_results_stay_apart(group: TrainGroup, ranks: Ranks) -> None:
    ranks.answers = [[5, Apart("small", None)], [None, None]]
    assert group.run_on_ranks(collect, 4, plus=1) == [5, Apart("small", "stored 1")]
    group.run_on_ranks(Called())
    (first, (call, _), _), (second, _, _) = ranks.sent
    assert call == RankFunction(collect, (4,), {"plus": 1})
    assert (first, second) == ("run_on_ranks(collect)", "run_on_ranks(Called)")
    assert ranks.collected[0][0] == "operation 1 (run_on_ranks(collect))"


def test_a_tenant_that_is_removed_leaves_the_journal(group: TrainGroup, ranks: Ranks) -> None:
    ranks.answers = [[None, None], BatchError("odd")]
    group.remove_lora_adapter(ref(5))
    with pytest.raises(BatchError):
        group.remove_lora_adapter(ref(6))
    assert ranks.forgotten == [5]


def test_a_loss_is_sent_beside_its_operation(group: TrainGroup, ranks: Ranks) -> None:
    sent: list[Any] = []

    def send(loss: Any) -> str:
        sent.append(loss)
        return "sent loss"

    sender: Any = SimpleNamespace(send=send)
    group._losses = sender
    given: Any = "a loss"
    rows = [TokenSequence(torch.arange(3), {"loss_mask": torch.tensor([1.0, 1.0, 0.0])})]
    group.forward_backward.submit(ref(1), rows, given)
    group.forward.submit(ref(1), rows)
    assert [loss for *_, loss in ranks.sent] == ["sent loss", None] and sent == ["a loss"]


def test_a_group_is_taken_over_with_the_given_patience(
    group: TrainGroup, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float] = []
    monkeypatch.setattr(ranks, "take_over", given.append)
    group.take_over()
    group.take_over(3.0)
    assert given == [60.0, 3.0]


def test_the_tenants_of_a_pass_are_those_that_have_a_loss_in_it(group: TrainGroup, ranks: Ranks) -> None:
    base, other = ref(1), ref(9)
    for handle, name, number in ((base, "ann", 4), (base, "bob", 5), (other, "carl", 6)):
        ranks.keep(Operation("create_lora_adapter", {"handle": handle, "name": name}, number))
    ranks.keep(Operation("build_model", {"name": "dan"}, 7))
    losses: Any = dict.fromkeys(("ann", "bob", "carl", "dan", "nobody"))
    for names, found in (
        (("ann",), {4}),
        (("bob", "ann"), {4, 5}),
        (("ann", "nobody"), set()),
        (("carl",), set()),
        ((), set()),
    ):
        assert group._tenants_with({name: losses[name] for name in names}, base) == found
    one: Any = len
    assert group._tenants_with(one, base) == group._tenants_with(None, base) == frozenset()


def test_a_step_of_several_models_is_told_to_the_recovery(group: TrainGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    stepped: list[Any] = []
    monkeypatch.setattr(group._recovery, "stepped", stepped.append)
    group.optimizer_step.submit([ref(1), ref(2)])
    group.zero_grad.submit([ref(3)])
    group.optimizer_step.submit(ref(4))
    assert stepped == [[ref(1), ref(2)], [ref(4)]]


def test_pinned_ranks_are_those_of_one_epoch_and_layout(group: TrainGroup) -> None:
    before = group.pinned()
    assert group.pinned() == before
    group._recovery.num_layouts += 1
    assert group.pinned() != before
