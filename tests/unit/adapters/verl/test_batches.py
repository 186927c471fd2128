"""verl's batch in micro-batches: what rides in each, and what is said of positions and sizes that do not fit."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from verl.utils import tensordict_utils as tu

from adapters.verl import batches
from adapters.verl.batches import BatchRoutes, cut_batch, router_replay
from rl_backend.contracts import BatchError, UnsupportedError
from rl_backend.runtime import RankPlace
from tests.support.verl_batches import GROUPS, grouped_rows, make_batch, rows

ONE_RANK = RankPlace(torch.device("cpu"), 0, 1, None, True)  # type: ignore[arg-type]
LENGTHS = [8, 3, 30, 4, 13, 13, 12, 25]


def jagged(values: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(values, layout=torch.jagged)


def test_micro_batches_have_their_sequences_in_order_and_what_verls_losses_read() -> None:
    found = rows()
    batch = make_batch(found, "full", micro_batch_size_per_gpu=2, calculate_entropy=True, temperature=0.5)
    cut = cut_batch(batch, ONE_RANK, multiple=1, cp_size=3)
    assert cut.order == list(range(8)) and len(cut.packed) == 4
    masked = sum(float(row["response_mask"].sum()) for row in found)
    for index, each in enumerate(cut.packed):
        pair = found[2 * index : 2 * index + 2]
        assert each.input_ids.tolist() == torch.cat([row["input_ids"] for row in pair]).tolist()
        assert each.seq_lens.tolist() == LENGTHS[2 * index : 2 * index + 2]
        assert each.meta == {"calculate_entropy": True, "temperature": 0.5}
        assert not each.sequence_fields and not each.token_fields
        assert each.payload.index == index and len(each.payload.data) == 2
        for data in (batch, each.payload.data):
            facts = {name: tu.get(data, name) for name in ("dp_size", "batch_num_tokens", "num_micro_batch", "sp_size")}
            assert facts == {"dp_size": 1, "batch_num_tokens": masked, "num_micro_batch": 4, "sp_size": 3}


def test_a_batch_cut_by_tokens_says_which_row_each_sequence_is_and_takes_its_temperature_along() -> None:
    found = rows()
    batch = make_batch(found, "response", use_dynamic_bsz=True, max_token_len_per_gpu=20)
    temperatures = torch.stack([row["temperature"] for row in found])
    batch["temperature"] = temperatures[:, None]
    cut = cut_batch(batch, ONE_RANK, multiple=1, cp_size=2)
    assert sorted(cut.order) == list(range(8)) and len(cut.packed) > 2
    sequences = [ids for each in cut.packed for ids in each.input_ids.split(each.seq_lens.tolist())]
    assert [each.tolist() for each in sequences] == [found[row]["input_ids"].tolist() for row in cut.order]
    taken = torch.cat([each.sequence_fields["temperature"] for each in cut.packed])
    assert torch.equal(taken, temperatures[cut.order]) and taken.dim() == 1
    assert all(each.meta == {"calculate_entropy": False} and each.num_tokens <= 40 for each in cut.packed)


def test_tokens_and_refusals_of_all_data_parallel_ranks_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [100.0, 0.0]

    def all_reduce(facts: torch.Tensor, group: Any) -> None:
        assert group == "dp"
        facts += torch.tensor(others).to(facts.dtype)

    monkeypatch.setattr(batches, "dist", SimpleNamespace(all_reduce=all_reduce))
    place = RankPlace(torch.device("cpu"), 1, 3, "dp", True)  # type: ignore[arg-type]
    monkeypatch.setattr(batches, "prepare_micro_batches", lambda data, dp_group, **options: ([data], [[*range(len(data))]]))
    batch = make_batch(rows(), "full")
    own = float(sum(row["response_mask"].sum() for row in rows()))
    cut_batch(batch, place, multiple=1, cp_size=1)
    assert tu.get(batch, "batch_num_tokens") == own + 100 and tu.get(batch, "dp_size") == 3
    others[1] = 2.0
    with pytest.raises(BatchError, match=r"^2 of 3 data-parallel ranks refused their batches; nothing ran on any$"):
        cut_batch(make_batch(rows(), "full"), place, multiple=1, cp_size=1)
    with pytest.raises(UnsupportedError, match="distillation_only=True: top-k distillation reads logits"):
        cut_batch(make_batch(rows(), "full", distillation_only=True), place, multiple=1, cp_size=1)


def text_positions(length: int, scale: int = 1, row: int = 3) -> torch.Tensor:
    positions = torch.arange(length).expand(4, length).clone()
    positions[row] *= scale
    return positions


@pytest.mark.parametrize(
    ("positions", "error", "problem"),
    [
        (None, None, ""),
        (jagged([torch.arange(length) for length in LENGTHS]), None, ""),
        (jagged([text_positions(length) for length in LENGTHS]), None, ""),
        (
            jagged([torch.arange(length) + (length == 25) for length in LENGTHS]),
            BatchError,
            "do not count the tokens of each",
        ),
        (
            jagged([text_positions(length, 2 if length == 25 else 1) for length in LENGTHS]),
            BatchError,
            "as those of text do",
        ),
        (jagged([text_positions(length, 2, 0) for length in LENGTHS]), BatchError, "as those of text do"),
        (torch.zeros(8, 4, 30, dtype=torch.int64), BatchError, "as those of text do"),
        (torch.zeros(8, 30, dtype=torch.int64), None, ""),
    ],
    ids=str,
)
def test_positions_count_the_tokens_of_each_sequence(positions: Any, error: Any, problem: str) -> None:
    batch = make_batch(rows(), "full")
    if positions is None:
        del batch["position_ids"]
    else:
        batch["position_ids"] = positions
    if error is None:
        assert len(cut_batch(batch, ONE_RANK, multiple=1, cp_size=1).packed) == 1
        return
    with pytest.raises(error, match=problem) as caught:
        cut_batch(batch, ONE_RANK, multiple=1, cp_size=1)
    assert caught.value.details["name"] == "position_ids"


@pytest.mark.parametrize(
    ("facts", "cp_size", "problem"),
    [
        ({"use_dynamic_bsz": True, "max_token_len_per_gpu": 15}, 2, None),
        ({"use_dynamic_bsz": True, "max_token_len_per_gpu": 30}, 1, None),
        ({"use_dynamic_bsz": True, "max_token_len_per_gpu": 14}, 2, "14 times 2 context-parallel ranks does not hold .* 30"),
        ({"use_dynamic_bsz": True, "max_token_len_per_gpu": None}, 1, "max_token_len_per_gpu=None times 1"),
        ({"micro_batch_size_per_gpu": 2, "force_group_size": 2}, 1, None),
        (
            {"micro_batch_size_per_gpu": 2, "force_group_size": 3},
            1,
            "micro_batch_size_per_gpu=2 times force_group_size=3 does",
        ),
        ({"micro_batch_size_per_gpu": None}, 1, "micro_batch_size_per_gpu=None times force_group_size=1 does not divide 8"),
        ({"micro_batch_size_per_gpu": 0}, 1, "micro_batch_size_per_gpu=0 times"),
    ],
)
def test_sizes_that_do_not_divide_a_batch_are_refused(facts: dict[str, Any], cp_size: int, problem: str | None) -> None:
    batch = make_batch(rows(), "full", **facts)
    if problem is None:
        cut_batch(batch, ONE_RANK, multiple=1, cp_size=cp_size)
        return
    with pytest.raises(BatchError, match=problem) as caught:
        cut_batch(batch, ONE_RANK, multiple=1, cp_size=cp_size)
    assert caught.value.details["name"] == next(iter(facts.keys() - {"use_dynamic_bsz", "force_group_size"}))


@pytest.mark.parametrize(
    ("mode", "forward_only", "asked", "routes", "expected"),
    [
        ("disabled", True, True, True, "off"),
        ("R2", True, False, False, "off"),
        ("R2", True, True, False, "record"),
        ("R2", True, True, True, "replay"),
        ("R2", False, True, False, "replay"),
        ("R3", True, True, False, "replay"),
        ("R3", False, False, True, "off"),
    ],
)
def test_a_pass_records_or_replays_as_the_mode_says(
    mode: Any, forward_only: bool, asked: bool, routes: bool, expected: str
) -> None:
    batch = make_batch(rows(), "full", enable_routing_replay=asked)
    if routes:
        batch["routed_experts"] = jagged([torch.zeros(length, 2, 1, dtype=torch.uint8) for length in LENGTHS])
    assert router_replay(batch, mode, forward_only=forward_only) == expected


def test_each_micro_batch_gets_the_routes_of_its_own_tokens() -> None:
    batch = make_batch(rows(), "response", micro_batch_size_per_gpu=4)
    routes = [torch.full((length - 1, 2, 1), index, dtype=torch.uint8) for index, length in enumerate(LENGTHS)]
    batch["routed_experts"] = jagged(routes)
    cut = cut_batch(batch, ONE_RANK, multiple=1, cp_size=1, routes=BatchRoutes("R3", 2))
    for index, each in enumerate(cut.packed):
        assert each.meta["routed_experts_layers"] == "all"
        parts = each.token_fields["routed_experts_mask"].split(each.seq_lens.tolist())
        assert [part.tolist() for part in parts] == [[True] * (length - 1) + [False] for length in LENGTHS[4 * index :][:4]]
        taken = each.token_fields["routed_experts"].split(each.seq_lens.tolist())
        assert [int(part[0, 0, 0]) for part in taken] == list(range(4 * index, 4 * index + 4))
    batch["routed_experts"] = jagged(
        [torch.zeros(length - 2 * (length == 25), 2, 1, dtype=torch.uint8) for length in LENGTHS]
    )
    with pytest.raises(BatchError, match="of sequence 7 has 23 rows for 25 tokens; expected as many, or one less") as caught:
        cut_batch(batch, ONE_RANK, multiple=1, cp_size=1, routes=BatchRoutes("R3", 2))
    assert caught.value.details["sequence"] == 7


@pytest.mark.parametrize(("multiple", "expected"), [(1, 3), (2, 4), (4, 4)])
def test_a_schedule_that_takes_groups_of_micro_batches_gets_whole_groups(multiple: int, expected: int) -> None:
    batch = make_batch(rows(), "full", use_dynamic_bsz=True, max_token_len_per_gpu=38)
    place = RankPlace(torch.device("cpu"), 0, 1, None, True)  # type: ignore[arg-type]
    cut = cut_batch(batch, place, multiple=multiple, cp_size=1)
    assert len(cut.packed) == expected
    assert sorted(cut.order) == list(range(8))


BY_COMPUTED: dict[str, Any] = {"use_dynamic_bsz": True, "max_token_len_per_gpu": 150}
GROUPED: dict[str, Any] = {"multiple": 1, "cp_size": 1, "by_computed": True}


def distinct_prefixes(sequences: Sequence[torch.Tensor]) -> int:
    """Tokens to compute where all that sequences begin alike in is computed once."""
    return len({tuple(each[:end].tolist()) for each in sequences for end in range(1, len(each) + 1)})


def test_groups_stay_together_and_what_they_share_counts_once() -> None:
    found = grouped_rows()
    batch = make_batch(found, "response", **BY_COMPUTED)
    cut = cut_batch(batch, ONE_RANK, multiple=1, cp_size=1, by_computed=True)
    assert len(cut.packed) == 3 and sorted(cut.order) == list(range(8))
    assert len(cut_batch(make_batch(found, "response", **BY_COMPUTED), ONE_RANK, multiple=1, cp_size=1).packed) > 5
    places = iter(cut.order)
    of_groups = []
    for index, each in enumerate(cut.packed):
        mine = [next(places) for _ in each.seq_lens]
        sequences = each.input_ids.split(each.seq_lens.tolist())
        assert [ids.tolist() for ids in sequences] == [found[row]["input_ids"].tolist() for row in mine]
        assert distinct_prefixes(sequences) <= 150
        of_groups.append({GROUPS[row] for row in mine})
        data = each.payload.data
        assert each.payload.index == index and tu.get(data, "num_micro_batch") == 3
        assert data["advantages"].values().tolist() == torch.cat([found[row]["advantages"] for row in mine]).tolist()
    assert sorted(of_groups, key=min) == [{0}, {1}, {2}] and max(each.num_tokens for each in cut.packed) == 362
    assert len(cut_batch(batch, ONE_RANK, multiple=2, cp_size=1, by_computed=True).packed) == 4


def test_a_cut_that_is_not_by_tokens_alone_stays_verls() -> None:
    for facts, order in (
        ({"micro_batch_size_per_gpu": 2}, [2, 2, 2, 2]),
        ({"use_dynamic_bsz": True, "max_token_len_per_gpu": 200, "force_group_size": 2}, [2, 2, 2, 2]),
    ):
        cut = cut_batch(make_batch(grouped_rows(), "full", **facts), ONE_RANK, multiple=1, cp_size=1, by_computed=True)
        assert [len(each.seq_lens) for each in cut.packed] == order
    # Nothing is alike: every sequence counts, and none is lost.
    cut = cut_batch(make_batch(rows(), "full", **{**BY_COMPUTED, "max_token_len_per_gpu": 38}), ONE_RANK, **GROUPED)
    assert sorted(cut.order) == list(range(8)) and all(each.num_tokens <= 38 for each in cut.packed)


def test_tokens_with_other_routes_count_as_others() -> None:
    found = grouped_rows()
    ones = [torch.ones(len(row["input_ids"]), 2, 1, dtype=torch.uint8) for row in found]
    alike, differing = jagged(ones), jagged([number * each for number, each in enumerate(ones)])
    for routes, expected in ((alike, 3), (differing, 7)):
        batch = make_batch(found, "response", **BY_COMPUTED)
        batch["routed_experts"] = routes
        cut = cut_batch(batch, ONE_RANK, **GROUPED, routes=BatchRoutes("R2", 2))
        assert len(cut.packed) == expected


@pytest.mark.parametrize(("of_others", "expected"), [([3], 3), ([4], 4), ([5, 8], 8), ([0], 7)])
def test_every_rank_cuts_as_many_micro_batches_of_groups_and_as_verl_where_one_cannot(
    monkeypatch: pytest.MonkeyPatch, of_others: list[int], expected: int
) -> None:
    answers = iter(of_others)

    def all_reduce(facts: torch.Tensor, op: str = "sum", group: Any = None) -> None:
        assert group == "dp"
        if op == "max":
            other = next(answers, int(facts[0]))
            facts.copy_(torch.maximum(facts, torch.tensor([other, -other])))

    monkeypatch.setattr(batches, "dist", SimpleNamespace(all_reduce=all_reduce, ReduceOp=SimpleNamespace(MAX="max")))
    place = RankPlace(torch.device("cpu"), 1, 2, "dp", True)  # type: ignore[arg-type]
    monkeypatch.setattr(
        batches, "prepare_micro_batches", lambda data, dp_group, **options: ([data] * 7, [[*range(len(data))]])
    )
    cut = cut_batch(make_batch(grouped_rows(), "response", **BY_COMPUTED), place, **GROUPED)
    assert len(cut.packed) == expected and next(answers, None) is None
