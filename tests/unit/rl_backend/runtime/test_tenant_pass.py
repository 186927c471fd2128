"""One pass for several tenants: whose sequences are whose, what is refused, and what each is told of its own part."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rl_backend.contracts import BatchError, ForwardResult, Metric, ModelOutput, PackedBatch
from rl_backend.contracts.lora import LORA_FIELD
from rl_backend.primitive.adapters import AdapterRun
from rl_backend.runtime.tenants.passes import (
    LossOfTenants,
    PassTenants,
    agree_on_failures,
    metrics_by_name,
    own_outputs,
    results_of_tenants,
    runs_of_equal,
    sequences_of,
)


class Optimizer:
    """Of a tenant on rank 1 of 3 with other data."""

    def __init__(self) -> None:
        self.expected = 0
        self.groups = SimpleNamespace(dense=SimpleNamespace(data=SimpleNamespace(size=lambda: 3, rank=lambda: 1)))

    def expect_gradients(self) -> None:
        self.expected += 1


def tenant(lora_id: int, name: str, *, dropout: float = 0.0, training: bool = True, draws: int = 0, **changes: Any) -> Any:
    optimizer = Optimizer()
    rows = SimpleNamespace(training=training, num_draws=draws, modules={f"module of {name}": lora_id})
    rows.run = lambda start, stop, draw, key: AdapterRun(start, stop, rows.modules, draw, None, key)
    facts: dict[str, Any] = {"head": "log_probs", "kinds": {"q_proj": "attention"}, **changes}
    return SimpleNamespace(
        lora_id=lora_id,
        name=name,
        rows=rows,
        lora=SimpleNamespace(dropout=dropout),
        optimizer=optimizer,
        trainer=optimizer,
        groups=SimpleNamespace(device=torch.device("cpu"), world_size=1, world_group=None),
        **facts,
    )


def batch(owners: Sequence[int] | None, lengths: Sequence[int], first: int = 0, **meta: Any) -> PackedBatch:
    """Tokens are numbered from ``first``, and so is what each has beside it."""
    ids = torch.arange(first, first + sum(lengths))
    fields = {} if owners is None else {LORA_FIELD: torch.tensor(owners)}
    of_sequences = {**fields, "advantages": torch.arange(len(lengths)) + 0.5}
    return PackedBatch(ids, torch.tensor(lengths), {"weights": ids / 10}, of_sequences, meta, payload="the caller's")


def passing(*tenants: Any, **options: Any) -> PassTenants:
    losses: Any = {each.name: loss_of(1.0) for each in tenants}
    given: dict[str, Any] = {"trains": True, "heads": ("log_probs",), "losses": losses, **options}
    return PassTenants({each.lora_id: each for each in tenants}, **given)


PAIR = [batch([4, -1, 4], [2, 3, 1]), batch([9, 4], [5, 2])]


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (PAIR, {}, None),
        ([PAIR[0], batch(None, [2])], {}, r"^micro-batch 1, sequence field 'lora': missing; it says whose .*, or -1 for"),
        ([batch([4, 9], [1, 1]), batch([9, 5], [1, 2])], {}, r"^micro-batch 1, .*: 5 is no tenant .* are 4 \(a\), 9 \(b\)$"),
        ([batch([-2], [1])], {}, r"^micro-batch 0, .*: -2 is no tenant of this model"),
        (PAIR, {"losses": ["a"]}, r"^loss_fn has no loss for 'b', whose sequences are in the data$"),
        (PAIR[:1], {"losses": ["a"]}, None),
        (PAIR, {"losses": (), "trains": False}, None),
    ],
)
def test_sequences_that_are_nobodys_or_have_no_loss_are_refused(
    data: list[PackedBatch], options: Mapping[str, Any], message: str | None
) -> None:
    problem = passing(tenant(4, "a"), tenant(9, "b"), **options).problem(data)
    assert (problem is None) is (message is None)
    if problem is not None and message is not None:
        with pytest.raises(BatchError, match=message):
            raise problem
    if problem is not None and "micro-batch" in str(problem):
        assert problem.details["micro_batch"] == int(str(problem).split()[1][0])


def test_a_pass_of_one_tenant_takes_sequences_without_a_field_and_refuses_those_of_others() -> None:
    alone = tenant(4, "a")
    sole = passing(alone, sole=alone, losses=None)
    assert sole.problem([batch(None, [2]), batch([4, 4], [1, 2])]) is None
    assert sole.ids(batch(None, [2, 1, 5])) == [4, 4, 4]
    for owner in (-1, 9):
        problem = sole.problem([batch(None, [1]), batch([4, owner], [2, 2])])
        assert str(problem) == f"micro-batch 1, sequence field 'lora': {owner} in a pass of 4 (a)"
    none = PassTenants({}, trains=True, heads=())
    assert str(none.problem([batch([0], [1])])).endswith("0 is no tenant of this model; there are none")


def test_tenants_with_sequences_come_by_number_and_are_trained_in_a_backward_pass_alone() -> None:
    late, early, absent = tenant(9, "b"), tenant(4, "a"), tenant(6, "c")
    tenants = passing(late, early, absent)
    assert tenants.present(PAIR) == [early, late] == tenants.trained(PAIR)
    assert tenants.present(PAIR[:1]) == [early]
    assert passing(late, early, trains=False).trained(PAIR) == []
    assert passing(late, early, trains=False).present(PAIR) == [early, late]


def test_ranks_compare_the_tenants_that_have_a_loss() -> None:
    first, second = tenant(4, "a"), tenant(9, "b")

    def crc(text: str) -> int:
        return zlib.crc32(text.encode())

    assert passing(first, second).fingerprint(PAIR) == crc("4,9")
    assert passing(first, second, losses={"b": loss_of(1.0)}).fingerprint(PAIR) == crc("9")
    assert passing(first, second).fingerprint(PAIR[:1]) == crc("4")
    assert passing(first, sole=first, losses=None).fingerprint([batch(None, [3])]) == crc("4")


def test_failures_are_compared_of_the_tenants_that_have_a_loss_as_others_may_be_on_one_rank_alone() -> None:
    first, second = tenant(4, "a"), tenant(9, "b")
    looking = passing(first, second, trains=False, losses={"a": loss_of(1.0)})
    assert looking.with_loss(PAIR) == [first] == looking.with_loss(PAIR[:1])
    assert looking.with_loss([batch([9], [3])]) == []
    assert passing(first, sole=first, losses=None).with_loss([batch(None, [3])]) == [first]


def test_dropout_is_drawn_once_for_each_run_of_a_tenant_that_has_it_and_trains() -> None:
    wet, dry, still = tenant(4, "a", dropout=0.1, draws=7), tenant(9, "b"), tenant(5, "c", dropout=0.1, training=False)
    data = [batch([4, -1, 4, 9], [1, 1, 1, 1]), batch([9, 5], [1, 1]), batch([4], [1])]
    for trains in (True, False):
        tenants = passing(wet, dry, still, trains=trains)
        assert not tenants.begun
        tenants.begin(data)
        assert tenants.begun
        draws = [
            [run.draw for run in tenants.runs(index, each, [1] * each.num_sequences)] for index, each in enumerate(data)
        ]
        # Run r of pass 7 on rank 1 of 3 has a draw that no other rank, no other run and no other pass has.
        first, second, third = (3 * (7 * 2**20 + run) + 1 for run in range(3))
        drawn = [[first, second, None], [None, None], [third]]
        assert draws == (drawn if trains else [[None] * 3, [None] * 2, [None]])
        assert [each.rows.num_draws for each in (wet, dry, still)] == [8, 0, 0]
        assert [each.optimizer.expected for each in (wet, dry, still)] == [1, 1, 1]


def test_runs_are_the_rows_of_neighbours_of_one_tenant_without_those_of_the_base() -> None:
    dense, mixed = tenant(4, "a"), tenant(9, "b", kinds={"q_proj": "attention", "up_proj": "experts"})
    tenants = passing(dense, mixed)
    data = batch([4, 4, -1, 9, 4], [2, 1, 5, 3, 7])
    runs = tenants.runs(0, data, [2, 0, 3, 4, 1])
    assert [(run.key, run.start, run.stop) for run in runs] == [(4, 0, 2), (9, 5, 9), (4, 9, 10)]
    assert [run.modules for run in runs] == [dense.rows.modules, mixed.rows.modules, dense.rows.modules]
    assert all(run.of_experts == {9: mixed.rows.modules} for run in runs)
    # Sequences of which this rank has no rows, and those of the base alone, still leave one to go back to.
    for owners, rows in (([4, 9], [0, 0]), ([-1, -1], [2, 3])):
        (only,) = tenants.runs(0, batch(owners, [2, 3]), rows)
        assert (only.start, only.stop, dict(only.modules), only.key) == (0, 0, {}, -1)
        assert only.of_experts == {9: mixed.rows.modules}


class NumbersRead(TorchDispatchMode):
    """Counts reads of single numbers, for each of which a GPU is waited for."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_the_tenants_of_a_batch_are_read_at_once() -> None:
    tenants = passing(tenant(4, "a"), tenant(9, "b"))
    with NumbersRead() as reads:
        assert tenants.ids(PAIR[0]) == [4, -1, 4]
        assert tenants.problem(PAIR) is None
    assert reads.count == 0


def test_neighbours_of_one_number_become_one_and_others_stay_apart() -> None:
    assert runs_of_equal([3, 3, -1, 3, 0, 0, 0], [1, 2, 4, 8, 16, 0, 32]) == [(3, 3), (-1, 4), (3, 8), (0, 48)]
    assert runs_of_equal([], []) == []
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        runs_of_equal([1, 1], [2])


@pytest.mark.parametrize(
    ("chosen", "tokens"), [([0], [0, 1]), ([2], [5]), ([1, 2], [2, 3, 4, 5]), ([0, 2, 3], [0, 1, 5, 6, 7, 8, 9])], ids=str
)
def test_chosen_sequences_keep_their_tokens_their_fields_and_facts_of_their_own(
    chosen: list[int], tokens: list[int]
) -> None:
    facts = {"batch_num_tokens": 99.0, "dp_size": 2, "tenants": {7: {"batch_num_tokens": 6.0}, 8: {"dp_size": 0}}}
    data = batch([7, 8, 7, 7], [2, 3, 1, 4], first=20, **facts)
    own, rows = sequences_of(data, chosen, 7)
    assert own.input_ids.tolist() == [20 + token for token in tokens] == data.input_ids[rows].tolist()
    assert own.seq_lens.tolist() == [[2, 3, 1, 4][index] for index in chosen]
    torch.testing.assert_close(own.token_fields["weights"], own.input_ids / 10)
    assert own.sequence_fields["advantages"].tolist() == [index + 0.5 for index in chosen]
    assert own.meta == {**facts, "batch_num_tokens": 6.0} and own.payload == "the caller's"
    assert data.meta == facts and data.num_sequences == 4
    assert sequences_of(data, chosen, 9)[0].meta == facts


def loss_of(weight: float, **metrics: Any) -> Any:
    def loss(output: ModelOutput, data: PackedBatch, dp_group: Any = None) -> tuple[Tensor, dict[str, Any]]:
        assert output.log_probs is not None and output.log_probs.shape == data.input_ids.shape
        return weight * (output.log_probs * data.input_ids).sum(), {"group": dp_group or 0, **metrics}

    return loss


def test_losses_are_added_up_kept_apart_by_tenant_and_one_that_failed_is_not_asked_again() -> None:
    asked: list[str] = []

    def failing(model_output: ModelOutput, data: PackedBatch, dp_group: Any = None) -> Any:
        asked.append("failing")
        if len(asked) == 2:
            raise ValueError("no such column")
        return model_output.log_probs.sum(), {"n": 1}  # type: ignore[union-attr]

    first, second, third = tenant(4, "a"), tenant(9, "b"), tenant(5, "c")
    loss = LossOfTenants(passing(first, second, third, losses={"a": loss_of(2.0, kl=3), "b": failing}))
    totals = []
    for data in (batch([4, 9, -1, 5, 4], [1, 2, 1, 1, 2]), batch([9, 4], [2, 1]), batch([9], [3])):
        log_probs = torch.full(data.input_ids.shape, 0.5, requires_grad=True)
        total, metrics = loss(ModelOutput(log_probs=log_probs), data, 7)
        assert total is not None and total.requires_grad
        totals.append((float(total.detach()), dict(metrics)))
    # Of tokens 0, 5 and 6, each 2 * 0.5, and of two others 0.5 each.
    assert totals == [
        (12.0, {"4/group": 7, "4/kl": 3, "9/n": 1}),
        (2.0, {"4/group": 7, "4/kl": 3}),
        (0.0, {}),
    ]
    assert [value for value, _ in loss.results[4]] == [11.0, 2.0]
    assert [value for value, _ in loss.results[9]] == [1.0] and 5 not in loss.results
    assert loss.failures == {9: "ValueError: no such column"} and len(asked) == 2


TRAINABLE = torch.ones((), requires_grad=True)


@pytest.mark.parametrize(
    ("returned", "forward_only", "failure"),
    [
        ((1.0, {}), False, "returned 1.0; expected a 0-d tensor"),
        ((1.0, {}), True, "returned 1.0; expected a 0-d tensor"),
        ((torch.ones(2, requires_grad=True), {}), False, "returned tensor([1., 1.], requires_grad=True); expected"),
        ((torch.ones(2), {}), True, "returned tensor([1., 1.]); expected a 0-d tensor"),
        ((torch.ones(()), {}), False, "returned tensor(1.); expected a 0-d tensor with a gradient"),
        ((None, {}), False, "returned None; expected a 0-d tensor"),
        ((TRAINABLE, None), False, "metrics must be a dict of numbers or (sum, weight) pairs; found None"),
        ((None, None), True, "metrics must be a dict"),
        ((TRAINABLE, {"x": torch.ones(2)}), False, "pairs; found {'x': tensor"),
        ((TRAINABLE, {"x": (1, 2, 3)}), False, "pairs; found {'x': (1, 2, 3)}"),
    ],
    ids=str,
)
def test_what_a_tenants_loss_returns_wrong_is_its_own_failure(returned: Any, forward_only: bool, failure: str) -> None:
    bad, good = tenant(4, "a"), tenant(9, "b")
    losses = {"a": lambda *_: returned, "b": loss_of(1.0)}
    loss = LossOfTenants(passing(bad, good, trains=not forward_only, losses=losses))
    log_probs = torch.ones(2, requires_grad=True)
    total, metrics = loss(ModelOutput(log_probs=log_probs), batch([4, 9], [1, 1]))
    assert total is not None and total.item() == 1.0 and metrics == {"9/group": 0}
    assert list(loss.failures) == [4] and list(loss.results) == [9]
    assert failure in loss.failures[4] and loss.failures[4].startswith("BatchError: the loss of 'a'")


def test_a_tenant_without_a_loss_in_a_forward_only_pass_has_metrics_alone() -> None:
    without = LossOfTenants(passing(tenant(4, "a"), trains=False, losses={"a": lambda *_: (None, {"n": 2})}))
    assert float(without(ModelOutput(log_probs=torch.zeros(2)), batch([4], [2]))[0]) == 0.0  # type: ignore[arg-type]
    assert without.results == {4: [(None, {"n": 2})]} and not without.failures


def test_failures_are_those_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    tenants = [tenant(4, "a"), tenant(9, "b"), tenant(5, "c")]
    assert agree_on_failures({}, []) == {}
    assert agree_on_failures({9: "mine"}, tenants) == {9: "mine"}
    for each in tenants:
        each.groups.world_size = 2
        each.groups.world_group = "all ranks"

    def with_another_rank(flags: Tensor, operation: Any, group: Any) -> None:
        assert group == "all ranks" and operation == torch.distributed.ReduceOp.MAX
        flags.copy_(torch.maximum(flags, torch.tensor([1.0, 1.0, 0.0])))

    monkeypatch.setattr(torch.distributed, "all_reduce", with_another_rank)
    assert agree_on_failures({9: "mine"}, tenants) == {4: "its loss failed on another rank", 9: "mine"}


def test_each_tenant_is_told_its_own_losses_metrics_and_outputs() -> None:
    actor, critic = tenant(4, "a"), tenant(44, "v", head="values")
    tenants = passing(actor, critic, tenant(6, "absent"))
    data = [batch([4, -1, 44], [1, 1, 1]), batch([44, 4], [1, 1])]
    outputs = {name: [torch.tensor([float(n)]) for n in range(5)] for name in ("log_probs", "entropy", "values", "routes")}
    metrics = {"4/kl": Metric(1.0, 2.0), "44/kl": Metric(3.0, 4.0), "44/a/b": Metric(5.0, 6.0)}
    result = ForwardResult((9.0, 8.0), metrics, outputs)
    loss = LossOfTenants(tenants, {4: [(torch.tensor(1.5), {}), (torch.tensor(2.5), {})], 44: [(torch.tensor(0.5), {})]})
    found = results_of_tenants(loss, tenants, data, result)
    assert list(found) == ["a", "v"]
    assert {name: [value.item() for value in values] for name, values in found["a"].outputs.items()} == {
        "log_probs": [0.0, 4.0],
        "entropy": [0.0, 4.0],
        "routes": [0.0, 4.0],
    }
    assert {name: [value.item() for value in values] for name, values in found["v"].outputs.items()} == {
        "values": [2.0, 3.0],
        "routes": [2.0, 3.0],
    }
    assert (found["a"].losses, found["v"].losses) == ((1.5, 2.5), (0.5,))
    assert found["a"].metrics == {"kl": Metric(1.0, 2.0)}
    assert found["v"].metrics == {"kl": Metric(3.0, 4.0), "a/b": Metric(5.0, 6.0)}
    assert [(each.error, each.lora_id) for each in found.values()] == [("", 4), ("", 44)]
    loss.failures[44] = "it broke"
    failed = results_of_tenants(loss, tenants, data, result)
    assert (failed["v"].error, failed["v"].losses, failed["v"].metrics) == ("it broke", (), {})
    assert failed["v"].outputs["values"] == found["v"].outputs["values"] and failed["a"].error == ""
    assert results_of_tenants(None, tenants, data, result)["a"].losses == ()
    assert metrics_by_name(metrics, tenants) == {
        "a/kl": metrics["4/kl"],
        "v/kl": metrics["44/kl"],
        "v/a/b": metrics["44/a/b"],
    }


def test_outputs_are_those_of_a_model_with_the_head() -> None:
    outputs = {"log_probs": 1, "entropy": 2, "values": 3, "routed_experts": 4}
    assert own_outputs(outputs, "log_probs") == {"log_probs": 1, "entropy": 2, "routed_experts": 4}
    assert own_outputs(outputs, "values") == {"values": 3, "routed_experts": 4}


def test_what_is_of_words_is_no_output_of_a_tenant_with_values() -> None:
    names = ("log_probs", "entropy", "top_ids", "top_log_probs", "mask_disagreement", "values", "routed_experts")
    outputs = {name: number for number, name in enumerate(names)}
    assert own_outputs(outputs, "values") == {"values": 5, "routed_experts": 6}
    assert own_outputs(outputs, "log_probs") == {name: outputs[name] for name in names if name != "values"}


def test_sequences_of_one_tenant_share_prefixes_unless_it_drops_inputs() -> None:
    dry, wet, other = tenant(4, "a"), tenant(9, "b", dropout=0.1), tenant(6, "c")
    tenants = passing(dry, wet, other)
    owners = [4, 9, -1, 9, 4, 6, -1]
    found = tenants.sharing(batch(owners, [1] * 7))
    assert found[0] == found[4] and found[2] == found[6]
    assert len(set(found)) == 5, "each of the wet one is its own"
    assert {found[0], found[2], found[5]}.isdisjoint({found[1], found[3]})
    assert len(set(passing(wet, sole=wet, losses=None).sharing(batch(None, [1, 2, 3])))) == 3
    assert len(set(passing(dry, sole=dry, losses=None).sharing(batch(None, [1, 2, 3])))) == 1


def test_a_critics_loss_is_given_the_values_of_its_own_rows_and_nothing_else() -> None:
    seen: list[ModelOutput] = []

    def loss(output: ModelOutput, data: PackedBatch, dp_group: Any = None) -> Any:
        seen.append(output)
        found = output.values if output.log_probs is None else output.log_probs
        assert found is not None
        return (found * data.input_ids).sum(), {}

    actor, critic = tenant(4, "a"), tenant(9, "v", head="values")
    tenants = passing(actor, critic, losses={"a": loss, "v": loss})
    data = batch([9, 4, 9], [2, 1, 3])
    rows = torch.arange(6.0)
    output = ModelOutput(
        log_probs=(rows + 10).requires_grad_(), entropy=rows + 20, values=(rows + 30).requires_grad_(), top_ids=rows[:, None]
    )
    LossOfTenants(tenants)(output, data)
    of_critic, of_actor = seen
    assert of_critic.values is not None and of_critic.values.tolist() == [30.0, 31.0, 33.0, 34.0, 35.0]
    assert (of_critic.log_probs, of_critic.entropy, of_critic.top_ids) == (None, None, None)
    assert of_actor.values is None and of_actor.log_probs is not None and of_actor.log_probs.tolist() == [12.0]
    assert of_actor.entropy is not None and of_actor.entropy.tolist() == [22.0]
    assert of_actor.top_ids is not None and of_actor.top_ids.tolist() == [[2.0]]
