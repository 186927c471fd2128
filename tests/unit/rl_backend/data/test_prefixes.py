"""Which tokens sequences share, and how those that share are kept together."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations

import pytest
import torch
from torch import Tensor

from rl_backend.contracts import PackedBatch
from rl_backend.data import plan_micro_batches, plan_shared, prefixes
from rl_backend.data.balance import ATTENTION_CROSSOVER_TOKENS, MicroBatchPlan
from rl_backend.data.prefixes import _Part, _room, compared_tokens, grow, shared_prefixes
from rl_backend.primitive.prefix_tree import PrefixTree
from tests.support.random_trees import distinct_beginnings, sequences_of_a_tree


def check(tree: PrefixTree, sequences: Sequence[Tensor]) -> None:
    """Each row stands for one token after the same ones."""
    tokens, places = torch.cat(list(sequences)), tree.rows_of_tokens
    rows = torch.empty(tree.num_rows, dtype=torch.int64)
    rows[places] = tokens
    assert torch.equal(rows[places], tokens) and set(places.tolist()) == set(range(tree.num_rows))
    assert torch.equal(tree.position_ids[places], torch.cat([torch.arange(len(ids)) for ids in sequences]))
    assert all(parent < run for run, parent in enumerate(tree.parents))


def test_equal_beginnings_are_one_run_and_nothing_else_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "SHORTEST_RUN", 1)
    for seed in range(100):
        sequences = sequences_of_a_tree(seed, vocab_size=3 if seed % 2 else 128)
        tree = grow(sequences)
        check(tree, sequences)
        assert tree.num_rows == distinct_beginnings(sequences)
        assert grow(sequences[::-1]).num_rows == tree.num_rows


def test_shared_runs_are_long_enough_to_be_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "SHORTEST_RUN", 3)
    for seed in range(60):
        sequences = sequences_of_a_tree(seed, vocab_size=4)
        tree = grow(sequences)
        check(tree, sequences)
        users = [
            set(range(len(sequences))) & {b for b, end in enumerate(tree.ends) if run in tree.path(end)}
            for run in range(len(tree.lengths))
        ]
        rows = torch.empty(tree.num_rows, dtype=torch.int64)
        rows[tree.rows_of_tokens] = torch.cat(sequences)
        beginnings = [rows[start : start + 3].tolist() for start in tree.starts]
        for run, (length, of_run) in enumerate(zip(tree.lengths, users, strict=True)):
            assert length >= 3 or len(of_run) == 1
            for other in range(run):
                if tree.parents[run] == tree.parents[other] and min(length, tree.lengths[other]) >= 3:
                    assert beginnings[run] != beginnings[other], "two runs that could have been one"


def test_a_batch_without_shared_beginnings_has_no_tree() -> None:
    alone = [torch.arange(index, index + 50) for index in range(4)]
    short = [torch.arange(31)] * 2
    for sequences, rows in ((alone, None), (short, None), ([torch.arange(32)] * 2, 32)):
        batch = PackedBatch(torch.cat(sequences), torch.tensor([len(ids) for ids in sequences]))
        tree = shared_prefixes(batch, replays=False)
        assert (None if tree is None else tree.num_rows) == rows


def test_replayed_tokens_are_shared_where_their_routes_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "SHORTEST_RUN", 1)
    routes = torch.zeros(12, 2, 1, dtype=torch.uint8)
    routes[8] = 1  # the third token of the second sequence
    mask = torch.ones(12, dtype=torch.bool)
    batch = PackedBatch(
        torch.arange(6).repeat(2), torch.tensor([6, 6]), {"routed_experts": routes, "routed_experts_mask": mask}
    )
    trees = [shared_prefixes(batch, replays=replays) for replays in (False, True)]
    assert [tree and tree.num_rows for tree in trees] == [6, 10]
    mask[7] = False
    tree = shared_prefixes(batch, replays=True)
    assert tree is not None and tree.num_rows == 11
    assert shared_prefixes(batch, replays=True, owners=[4, 4]) == tree
    assert shared_prefixes(batch, replays=True, owners=[4, 5]) is None
    # Malformed routes are refused elsewhere.
    compared = compared_tokens(torch.arange(3), {"routed_experts": torch.zeros(3)}, replays=True)
    assert compared.shape == (3, 8 + 4)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_tokens_are_shared_where_their_recorded_keys_are_equal(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(prefixes, "SHORTEST_RUN", 1)
    keys = torch.arange(6, dtype=dtype).repeat(2)[:, None, None].expand(12, 2, 3).clone()
    fields = {"indexed_keys": keys}
    batch = PackedBatch(torch.arange(6).repeat(2), torch.tensor([6, 6]), fields)

    def num_rows() -> int | None:
        tree = shared_prefixes(batch, replays=False)
        return tree and tree.num_rows

    assert num_rows() == 6
    keys[9, 1, 2] = -1  # of the fourth token of the second sequence
    assert num_rows() == 9
    keys[:] = torch.arange(12, dtype=dtype)[:, None, None]
    assert num_rows() is None
    assert compared_tokens(batch.input_ids, fields, replays=False).shape == (12, 8 + 16)


def test_compared_routes_take_no_more_memory_than_they_are_and_every_byte_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "SHORTEST_RUN", 1)
    for dtype, size in ((torch.uint8, 1), (torch.int16, 2), (torch.int32, 4)):
        routes = torch.zeros(8, 3, 2, dtype=dtype)
        mask = torch.ones(8, dtype=torch.bool)
        given = {"routed_experts": routes, "routed_experts_mask": mask}
        batch = PackedBatch(torch.arange(4).repeat(2), torch.tensor([4, 4]), given)
        compared = compared_tokens(batch.input_ids, given, replays=True)
        assert (compared.dtype, compared.shape) == (torch.uint8, (8, 8 + 6 * size + 1))
        routes[6, 2, 1] = 1 << (8 * size - 2)
        tree = shared_prefixes(batch, replays=True)
        assert tree is not None and tree.num_rows == 6


def group(prompt: int, count: int, length: int = 40, answer: int = 10) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(prompt)
    beginning = torch.randint(0, 1000, (length,), generator=drawn)
    return [torch.cat((beginning, torch.randint(0, 1000, (answer,), generator=drawn))) for _ in range(count)]


def computed(plan: MicroBatchPlan, sequences: Sequence[Tensor]) -> list[list[int]]:
    return [
        [grow([sequences[index] for index in micro_batch]).num_rows for micro_batch in rank] for rank in plan.micro_batches
    ]


def test_groups_stay_together_and_count_what_is_computed() -> None:
    sequences = [*group(1, 4), *group(2, 4), *group(3, 4), *group(4, 4)]
    random.Random(0).shuffle(sequences)
    plan = plan_shared(sequences, 2, 160)
    # Without sharing a micro-batch has room for three sequences; each group is 40 + 4 * 10 tokens.
    assert plan is not None and computed(plan, sequences) == [[160], [160]]
    assert plan_micro_batches([50] * 16, 2, 160, multiple_of=1).num_micro_batches == 3
    assert sorted(plan.rank_indices(0) + plan.rank_indices(1)) == list(range(16)) and not plan.fillers


def test_a_group_is_cut_where_it_has_no_room_or_ranks_would_wait() -> None:
    sequences = group(1, 8)
    plan = plan_shared(sequences, 1, 100)
    assert plan is not None and computed(plan, sequences) == [[80, 80]]
    two = plan_shared(sequences, 2, 1000)
    assert two is not None and computed(two, sequences) == [[80], [80]]
    three = [*group(1, 8), *group(2, 8), *group(3, 8)]
    even = plan_shared(three, 2, 10_000)
    assert even is not None and computed(even, three) == [[200], [200]], "two groups beside one would let a rank wait"
    several = plan_shared(group(1, 8), 1, 1000, multiple_of=2)
    assert several is not None and several.num_micro_batches == 2


def test_a_group_without_room_is_cut_between_its_branches() -> None:
    """All begin with the same 40 tokens: each of five prompts stays with its six answers."""
    system = torch.arange(2000, 2040)
    sequences = [torch.cat((system, ids)) for prompt in range(5) for ids in group(prompt, 6, 100)]
    random.Random(0).shuffle(sequences)
    plan = plan_shared(sequences, 1, 600)
    # 40 + 2 * (100 + 6 * 10), and of three; in halves of 15 it would be 490 twice.
    assert plan is not None and sorted(computed(plan, sequences)[0]) == [360, 520]


def test_a_micro_batch_keeps_no_more_keys_than_it_has_room_for() -> None:
    """Where nearly all of every sequence is one prompt, few tokens are computed, and attention keeps the keys of all."""
    sequences = group(1, 64, 200, 5)
    plan = plan_shared(sequences, 1, 520)
    assert plan is not None
    for micro_batch in plan.micro_batches[0]:
        tree = grow([sequences[index] for index in micro_batch])
        assert 2000 < sum(tree.key_lens) <= 8 * 520
    assert computed(plan, sequences) == [[280] * 4], "520 were enough for 64 sequences"


def test_plans_are_todays_where_nothing_is_shared_or_there_is_no_room() -> None:
    assert plan_shared([torch.arange(index, index + 50) for index in range(4)], 1, 100) is None
    assert plan_shared(group(1, 2), 1, 49) is None, "a sequence alone is too long"
    assert plan_shared(group(1, 2), 3, 100) is None, "fewer sequences than ranks"


@pytest.mark.parametrize("dp_size", [1, 2, 3])
def test_any_shared_plan_has_every_sequence_once_within_the_budget(dp_size: int) -> None:
    drawn = random.Random(dp_size)
    found = 0
    for _ in range(40):
        groups = [
            group(prompt, drawn.randint(1, 6), drawn.randint(20, 60), drawn.randint(1, 40))
            for prompt in range(drawn.randint(1, 5))
        ]
        sequences = [ids for each in groups for ids in each]
        drawn.shuffle(sequences)
        most = drawn.randint(100, 400)
        plan = plan_shared(sequences, dp_size, most)
        if plan is None:
            continue
        found += 1
        assert sorted(index for rank in range(dp_size) for index in plan.rank_indices(rank)) == list(range(len(sequences)))
        assert all(0 < rows <= most for rank in computed(plan, sequences) for rows in rank)
        assert len({len(rank) for rank in plan.micro_batches}) == 1
        assert plan_shared(sequences, dp_size, most) == plan
    assert found > 20


def test_sequences_that_share_do_so_for_their_whole_common_beginning() -> None:
    for first, second in combinations(group(7, 5), 2):
        common = int((first != second).to(torch.uint8).argmax())
        assert grow([first, second]).lengths == (common, 50 - common, 50 - common)


def test_owners_are_told_apart_by_their_whole_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "SHORTEST_RUN", 1)
    fields = {
        "routed_experts": torch.zeros(8, 1, 1, dtype=torch.uint8),
        "routed_experts_mask": torch.ones(8, dtype=torch.bool),
    }
    batch = PackedBatch(torch.arange(4).repeat(2), torch.tensor([4, 4]), fields)
    for replays in (False, True):
        assert shared_prefixes(batch, replays=replays, owners=[0, 256]) is None
        assert shared_prefixes(batch, replays=replays, owners=[-1, 255]) is None
        tree = shared_prefixes(batch, replays=replays, owners=[256, 256])
        assert tree is not None and tree.num_rows == 4


@pytest.mark.parametrize(("changed", "rows"), [(None, 4), ("routed_experts", 6), ("indexed_keys", 6)])
def test_tokens_are_shared_where_routes_and_recorded_keys_are_both_equal(
    monkeypatch: pytest.MonkeyPatch, changed: str | None, rows: int
) -> None:
    monkeypatch.setattr(prefixes, "SHORTEST_RUN", 1)
    fields = {
        "routed_experts": torch.zeros(8, 2, 1, dtype=torch.uint8),
        "routed_experts_mask": torch.ones(8, dtype=torch.bool),
        "indexed_keys": torch.arange(4, dtype=torch.int32).repeat(2)[:, None, None].repeat(1, 2, 3),
    }
    if changed is not None:
        fields[changed][6, 1, 0] += 1
    batch = PackedBatch(torch.arange(4).repeat(2), torch.tensor([4, 4]), fields)
    tree = shared_prefixes(batch, replays=True)
    assert tree is not None and tree.num_rows == rows
    # Routes that are not replayed are those that the model makes of equal tokens.
    other = shared_prefixes(batch, replays=False)
    assert other is not None and other.num_rows == (rows if changed == "indexed_keys" else 4)


def test_what_stays_together_counts_what_is_computed_of_it_and_halves_in_its_order() -> None:
    sequences = [*group(1, 2), *group(2, 3)]
    part = _Part.of(sequences, [4, 0, 2, 3, 1])
    # Every token by the keys that it sees, as of a whole sequence: (n + 1) ** 2 - n ** 2 of the n-th.
    places = 2 * [*range(40)] + 5 * [*range(40, 50)]
    assert part.work == pytest.approx(sum(1 + (2 * place + 1) / ATTENTION_CROSSOVER_TOKENS for place in places), rel=1e-12)
    assert part.room == len(places) and part.halves == [[4, 0], [2, 3, 1]]
    assert _Part.of(sequences, [2]).work == pytest.approx(50 + 50**2 / ATTENTION_CROSSOVER_TOKENS, rel=1e-12)


def test_the_room_of_keys_is_rounded_up() -> None:
    for answers, room in ((20, 55), (21, 58), (3, 23)):
        tree = PrefixTree((20,) + (1,) * answers, (-1,) + (0,) * answers, tuple(range(1, answers + 1)))
        assert sum(tree.key_lens) == 20 + 21 * answers and _room(tree) == room
