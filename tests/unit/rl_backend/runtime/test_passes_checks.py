"""Micro-batches that cannot run, and ranks that were given different ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rl_backend.contracts import BatchError, IndexedLayers, PackedBatch, RoutedLayers
from rl_backend.runtime import passes
from rl_backend.runtime.passes import (
    PassRequest,
    check_micro_batches,
    checksum,
    problem_between_ranks,
    problem_in_replica,
    problem_on_rank,
)
from tests.support.rank_threads import run_ranks

CPU = torch.device("cpu")
ROUTED = RoutedLayers(num_experts=6, top_k=2, sparse=(True,))
INDEXED = IndexedLayers(top_k=2, layers=(0,))


def handle(**changes: Any) -> Any:
    facts = {
        "vocab_size": 10,
        "max_length": 4,
        "config": SimpleNamespace(max_tokens_per_micro_batch=6),
        "routed_layers": ROUTED,
        "indexed_layers": INDEXED,
        "shares_prefixes": False,
    }
    return SimpleNamespace(**{**facts, **changes})


def batch(
    ids: Sequence[int], lengths: Sequence[int] | None = None, fields: Mapping[str, Tensor] | None = None, **rest: Any
) -> PackedBatch:
    return PackedBatch(torch.tensor(ids), torch.tensor(lengths or [len(ids)]), fields or {}, **rest)


def request(*data: PackedBatch, **options: Any) -> PassRequest:
    return PassRequest(data, None, **{"forward_only": True, **options})


GOOD = batch([0, 9, 3, 4, 5, 6], [4, 2])
ROUTES = {"routed_experts": torch.tensor([[[0, 5]], [[1, 2]]])}
KEYS = {"indexed_keys": torch.tensor([[[0, -1]], [[1, 0]]])}
MASK = {"sampling_mask": torch.tensor([[3, 5], [-1, -1]])}
MOE = {"routed_experts_layers": "moe"}


@pytest.mark.parametrize(
    ("refused", "message", "details"),
    [
        (batch([1] * 7, [4, 3]), r"has 7 tokens; max_tokens_per_micro_batch=6; split it or raise", {"num_tokens": 7}),
        (batch([1] * 6, [1, 5]), r"has a sequence of 5 tokens; the model has 4 positions$", {"longest": 5}),
        (batch([0, 10]), r"has token 10; the vocabulary has 10 tokens, 0 to 9$", {}),
        (batch([12, -3]), r"has token -3; the vocabulary has 10 tokens", {}),
        (batch([1, 2], meta={"temperature": -0.5}), r": .*temperature.* is -0\.5", {}),
        (
            batch([1, 2, 3], [1, 2], sequence_fields={"temperature": torch.tensor([0.5, -1.0])}),
            r": temperature -1\.0; it must be above 0$",
            {},
        ),
        (batch([1], sequence_fields={"temperature": torch.tensor([0.0])}), r": temperature 0\.0; it must be above 0$", {}),
        (batch([1, 2], None, {"indexed_keys": KEYS["indexed_keys"] + 5}), r": indexed_keys", {"name": "indexed_keys"}),
        (batch([1, 2], None, MASK, meta={"top_k": 2}), r": sampling_mask has no place for", {"name": "sampling_mask"}),
        (
            batch([1, 3], None, {"sampling_mask": MASK["sampling_mask"] + 7}, meta={"top_k": 2}),
            r": .* 0 to 9 at token 0",
            {},
        ),
    ],
    ids=[
        *("tokens", "longest", "beyond", "negative", "temperature", "second temperature", "no temperature", "keys"),
        *("mask", "mask beyond"),
    ],
)
def test_a_micro_batch_that_cannot_run_is_told_by_its_number_and_what_is_wrong_with_it(
    refused: PackedBatch, message: str, details: dict[str, Any]
) -> None:
    assert problem_on_rank(handle(), request(GOOD, batch([1, 2], None, KEYS))) is None
    for data, index in (((refused, GOOD), 0), ((GOOD, GOOD, refused), 2)):
        problem = problem_on_rank(handle(), request(*data))
        assert isinstance(problem, BatchError)
        with pytest.raises(BatchError, match=rf"^micro-batch {index}(:|) ?{message.removeprefix(':')}"):
            raise problem
        assert problem.details == {"micro_batch": index, **problem.details, **details}


def test_what_a_model_sets_no_limit_to_is_taken() -> None:
    assert problem_on_rank(handle(max_length=None), request(batch([1] * 6))) is None
    assert str(problem_on_rank(handle(), request())).startswith("forward_backward without micro-batches")
    tempered = batch([1, 2], [1, 1], sequence_fields={"temperature": torch.tensor([0.1, 2.0])})
    assert problem_on_rank(handle(), request(tempered)) is None


def test_routes_are_checked_where_they_are_replayed_and_keys_wherever_they_are() -> None:
    good, wrong = batch([1, 2], None, ROUTES, meta=MOE), batch([1, 2], None, {"routed_experts": torch.full((2, 1, 2), 6)})
    assert problem_on_rank(handle(), request(good, good, router_replay="replay")) is None
    for mode in ("off", "record"):
        assert problem_on_rank(handle(), request(wrong, router_replay=mode)) is None
    assert problem_on_rank(handle(routed_layers=None), request(wrong, router_replay="replay")) is None
    problem = problem_on_rank(handle(), request(good, wrong, router_replay="replay"))
    assert problem is not None and problem.details["micro_batch"] == 1 and str(problem).startswith("micro-batch 1: meta")
    unread = problem_on_rank(handle(indexed_layers=None), request(batch([1, 2], None, KEYS)))
    assert unread is not None and "this model attends to all keys" in str(unread)


def test_adapters_are_asked_last() -> None:
    asked: list[int] = []

    def problem(data: Sequence[PackedBatch]) -> BatchError:
        asked.append(len(data))
        return BatchError("no tenant")

    adapters: Any = SimpleNamespace(problem=problem)
    assert str(problem_on_rank(handle(), request(GOOD, GOOD, adapters=adapters))) == "no tenant"
    assert "token 99" in str(problem_on_rank(handle(), request(batch([99]), adapters=adapters)))
    assert asked == [2]


def test_a_checksum_is_of_all_that_the_ranks_of_a_replica_must_have_in_common() -> None:
    fields = {**ROUTES, "routed_experts_mask": torch.tensor([True, False]), **KEYS, **MASK, "weights": torch.zeros(2)}
    same = checksum([batch([1, 2], None, fields), batch([3, 4])])
    assert same == checksum([batch([1, 2], None, dict(fields)), batch([3, 4])])
    changed = [
        [batch([1, 2], None, fields)],
        [batch([3, 4]), batch([1, 2], None, fields)],
        [batch([1, 2], None, fields), batch([3, 5])],
        [batch([1, 2], None, fields), batch([3, 4], [1, 1])],
        *(
            [batch([1, 2], None, {**fields, name: fields[name].flip(0)}), batch([3, 4])]
            for name in ("routed_experts", "routed_experts_mask", "indexed_keys", "sampling_mask")
        ),
    ]
    assert same not in (others := [checksum(each) for each in changed]) and len(set(others)) == len(others)
    # What a loss alone reads may differ.
    assert same == checksum([batch([1, 2], None, {**fields, "weights": torch.ones(2)}), batch([3, 4])])
    transposed = ROUTES["routed_experts"].transpose(0, 2).contiguous().transpose(0, 2)
    assert same == checksum([batch([1, 2], None, {**fields, "routed_experts": transposed}), batch([3, 4])])


@pytest.mark.parametrize(("sums", "differ"), [((7, 7, 7), False), ((7, 7, 8), True), ((0, 7, 7), True), ((0, 0, 0), False)])
def test_ranks_of_a_replica_with_other_data_are_found_on_each_of_them(sums: tuple[int, ...], differ: bool) -> None:
    found = run_ranks(lambda group: problem_in_replica(sums[group.rank()], group, CPU), 3)
    assert [problem is not None for problem in found] == [differ] * 3
    assert not differ or "one model replica (tensor, pipeline and context parallel) have different" in str(found[0])


@pytest.mark.parametrize(
    ("of_ranks", "message"),
    [
        ([(2, False, 5), (2, False, 5), (2, False, 5)], None),
        ([(2, True, 5), (2, False, 5), (3, False, 4)], r"^rank 0 refused its micro-batches; nothing ran on any rank$"),
        ([(2, True, 5), (2, True, 5), (2, False, 5)], r"^rank 1 refused"),
        (
            [(2, False, 5), (4, False, 5), (3, False, 6)],
            r"^this rank \(\d\) has \d micro-batches, others have 2 to 4; every",
        ),
        (
            [(2, False, 5), (2, False, 5), (2, False, 4)],
            r"^forward_only, router_replay or the LoRA tenants with a loss differ",
        ),
        (
            [(2, False, 0), (2, False, 5), (2, False, 0)],
            r"^forward_only, router_replay or the LoRA tenants with a loss differ",
        ),
    ],
    ids=str,
)
def test_ranks_with_other_numbers_or_kinds_of_data_or_one_that_refuses_stop_all(
    of_ranks: list[tuple[int, bool, int]], message: str | None
) -> None:
    found = run_ranks(lambda group: problem_between_ranks(*of_ranks[group.rank()], group, CPU), 3)
    for rank, problem in enumerate(found):
        assert (problem is None) is (message is None)
        if problem is None or message is None:
            continue
        with pytest.raises(BatchError, match=message):
            raise problem
        if "micro_batches" in problem.details:
            assert problem.details == {"micro_batches": of_ranks[rank][0], "least": 2, "most": 4}
            assert str(problem).startswith(f"this rank ({rank}) has {of_ranks[rank][0]} micro-batches")


@pytest.mark.parametrize("replicas", [1, 2])
def test_each_rank_has_its_own_problem_or_who_refused_and_the_schedule_is_asked_last(replicas: int) -> None:
    scheduled: list[tuple[int, bool]] = []
    good, bad, other = [GOOD, GOOD], [GOOD, batch([99])], [GOOD, batch([7])]

    def check(of_ranks: Sequence[list[PackedBatch]], forward_only: bool, group: dist.ProcessGroup) -> str:
        alone = SimpleNamespace(size=lambda: 1)
        groups = SimpleNamespace(world_group=group, replica_group=group if replicas == 1 else alone, device=CPU)
        asked = handle(
            groups=groups,
            require_schedulable=lambda count, *, forward_only: scheduled.append((count, forward_only)),
        )
        try:
            check_micro_batches(asked, PassRequest(of_ranks[group.rank()], None, forward_only))
        except BatchError as error:
            return str(error)
        return ""

    assert run_ranks(lambda group: check([good, good], True, group)) == ["", ""]
    assert run_ranks(lambda group: check([good, good], False, group)) == ["", ""]
    assert scheduled == [(2, True), (2, True), (2, False), (2, False)]
    first, second = run_ranks(lambda group: check([good, bad], True, group))
    assert second.startswith("micro-batch 1 has token 99")
    found = run_ranks(lambda group: check([good, other], True, group))
    if replicas == 1:
        assert "different micro-batches" in first
        assert all("different micro-batches" in each for each in found)
    else:
        assert first.startswith("rank 1 refused its micro-batches")
        assert found == ["", ""]
    assert len(scheduled) == (4 if replicas == 1 else 6)


@pytest.mark.parametrize(
    ("targets", "wrong"),
    [
        ([0, 9], None),
        ([-100, -100], None),
        ([[3, 9], [-100, 0]], None),
        ([0, 10], 10),
        ([[0, 1], [2, 12]], 12),
        ([-1, 3], -1),
        ([[-100, -101], [0, 0]], -101),
    ],
    ids=str,
)
def test_targets_are_words_of_the_vocabulary_or_none(targets: list[Any], wrong: int | None) -> None:
    given = batch([1, 2], None, {"target_ids": torch.tensor(targets)})
    problem = problem_on_rank(handle(), request(GOOD, given))
    assert (problem is None) is (wrong is None)
    if problem is not None:
        assert problem.details == {"micro_batch": 1, "name": "target_ids"}
        assert str(problem).startswith(f"micro-batch 1 has target_ids {wrong};")


@pytest.mark.parametrize(("wanted", "refused"), [(0, False), (10, False), (11, True)])
def test_no_more_of_the_likeliest_tokens_are_wanted_than_there_are(wanted: int, refused: bool) -> None:
    problem = problem_on_rank(handle(), request(GOOD, batch([1, 2], meta={"top_log_probs": wanted})))
    assert (problem is not None) is refused
    assert problem is None or (problem.details["micro_batch"] == 1 and f"is {wanted};" in str(problem))


def test_a_checksum_is_of_targets_too() -> None:
    def of(*targets: int) -> int:
        return checksum([batch([1, 2], None, {"target_ids": torch.tensor(targets)})])

    assert of(3, 4) == of(3, 4) and len({of(3, 4), of(4, 3), of(3, -100), checksum([batch([1, 2])])}) == 4


def test_tokens_that_sequences_share_count_once_where_a_micro_batch_has_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    rows: list[int | None] = []

    def shared(given: PackedBatch, *, replays: bool, owners: Sequence[int]) -> Any:
        asked.append((given, replays, owners))
        found = rows.pop(0)
        return None if found is None else SimpleNamespace(num_rows=found)

    monkeypatch.setattr(passes, "shared_prefixes", shared)
    first, second = batch([1] * 8, [4, 4]), batch([2] * 7, [4, 3])
    adapters: Any = SimpleNamespace(sharing=lambda given: ["owners of", given.num_tokens], problem=lambda data: None)
    sharing = handle(shares_prefixes=True, routed_layers=None)
    rows[:] = [6, 5]
    assert problem_on_rank(sharing, request(GOOD, first, second, router_replay="replay")) is None
    assert asked == [(first, True, ()), (second, True, ())], "not where there are few enough"
    asked.clear()
    for found, told in (([6, 7], 7), ([6, None], 7), ([8], 8)):
        rows[:] = found
        problem = problem_on_rank(sharing, request(first, second, router_replay="record", adapters=adapters))
        assert problem is not None and problem.details == {"micro_batch": len(found) - 1, "num_tokens": told}
    assert asked[:2] == [(first, False, ["owners of", 8]), (second, False, ["owners of", 7])]
    asked.clear()
    problem = problem_on_rank(handle(), request(GOOD, first))
    assert problem is not None and problem.details == {"micro_batch": 1, "num_tokens": 8} and not asked
