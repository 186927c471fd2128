"""Which rank has which rectangle of a tensor, and which of those that have the same one counts."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from rl_backend.contracts import ParallelConfig, UnsupportedError
from rl_backend.parallel.groups import fake_rank
from rl_backend.parallel.shards import ShardLayout, choose_senders, chunk, layout_of, local_region, local_tensor, owns

# Ranks 10 to 15 as 2 by 3; the second dimension is cut over the 3, then what is left over the 2.
NESTED = ShardLayout((4, 7), (2, 3), (10, 11, 12, 13, 14, 15), ((1, 1), (0, 1)))
COPIES = ShardLayout((5, 2), (3, 2), (0, 1, 2, 3, 4, 5), ((0, 0),))
"""Cut over three; each part is on two ranks."""


def region(layout: ShardLayout, rank: int) -> list[tuple[int, int]]:
    return [(part.start, part.stop) for part in layout.region(rank)]


@pytest.mark.parametrize(
    ("whole", "ranks", "expected"),
    [
        (slice(0, 10), 4, [(0, 3), (3, 6), (6, 9), (9, 10)]),
        (slice(5, 11), 4, [(5, 7), (7, 9), (9, 11), (11, 11)]),
        (slice(0, 2), 3, [(0, 1), (1, 2), (2, 2)]),
        (slice(3, 3), 2, [(3, 3), (3, 3)]),
        (slice(1, 8), 1, [(1, 8)]),
    ],
    ids=str,
)
def test_a_run_is_cut_as_torch_cuts_it(whole: slice, ranks: int, expected: list[tuple[int, int]]) -> None:
    found = [chunk(whole, ranks, rank) for rank in range(ranks)]
    assert [(part.start, part.stop) for part in found] == expected
    numbers = torch.arange(whole.start, whole.stop)
    for part, other in zip(found, numbers.chunk(ranks), strict=False):
        assert list(range(part.start, part.stop)) == other.tolist()


def test_each_cut_divides_what_those_before_it_left() -> None:
    assert [region(NESTED, rank)[1] for rank in range(10, 16)] == [(0, 2), (3, 5), (6, 7), (2, 3), (5, 6), (7, 7)]
    assert {region(NESTED, rank)[0] for rank in range(10, 16)} == {(0, 4)}
    # The empty one is no part.
    assert list(NESTED.copies().values()) == [[10], [11], [12], [13], [14]]
    assert sum((part.stop - part.start) for _, part in NESTED.copies()) == 7
    assert all(NESTED.counts(rank) for rank in range(10, 16))


def test_of_ranks_with_the_same_rectangle_the_first_counts() -> None:
    assert [region(COPIES, rank)[0] for rank in range(6)] == [(0, 2), (0, 2), (2, 4), (2, 4), (4, 5), (4, 5)]
    assert [COPIES.counts(rank) for rank in range(6)] == [True, False] * 3
    assert [(ranks, part.start) for (part, _), ranks in COPIES.copies().items()] == [([0, 1], 0), ([2, 3], 2), ([4, 5], 4)]
    whole = ShardLayout((3,), (2, 2), (4, 5, 6, 7), ())
    assert [whole.counts(rank) for rank in (4, 5, 6, 7)] == [True, False, False, False]
    assert whole.copies() == {(slice(0, 3),): [4, 5, 6, 7]}


def test_of_copies_each_rank_sends_about_as_much_as_the_others() -> None:
    everyone = (0, 1, 2, 3)
    assert choose_senders([]) == []
    assert choose_senders([(6, everyone)] * 8) == [0, 1, 2, 3, 0, 1, 2, 3]
    # What one rank alone has counts first, wherever it stands; then the largest of the others.
    assert choose_senders([(5, everyone), (2, (0, 1)), (9, everyone), (7, (1,)), (4, (3,))]) == [2, 1, 0, 1, 3]
    assert choose_senders([(1, (3, 2))]) == [2], "of equals the first"
    sizes = [3 + 7 * number % 23 for number in range(200)]
    sent = [0] * 4
    for size, rank in zip(sizes, choose_senders([(size, everyone) for size in sizes]), strict=True):
        sent[rank] += size
    assert max(sent) - min(sent) <= max(sizes)


@pytest.mark.parametrize(
    ("placements", "cuts", "rank", "shape"),
    [
        ([Replicate(), Shard(1)], ((1, 1),), 3, (4, 3)),
        ([Shard(1), Shard(0)], ((0, 1), (1, 0)), 3, (2, 3)),
        ([Shard(0), Replicate()], ((0, 0),), 0, (2, 6)),
        # FSDP2 on the first mesh dimension cuts what tensor parallelism on the second has left.
        ([_StridedShard(0, split_factor=2), Shard(0)], ((1, 0), (0, 0)), 2, (1, 6)),
        ([_StridedShard(1, split_factor=1), Shard(0)], ((1, 0), (0, 1)), 3, (2, 3)),
    ],
    ids=str,
)
def test_a_layout_is_that_of_the_placements(
    placements: list[Placement], cuts: tuple[tuple[int, int], ...], rank: int, shape: tuple[int, int]
) -> None:
    with fake_rank(ParallelConfig(tp=2), rank, 4) as groups:
        local = torch.zeros(shape)
        tensor = DTensor.from_local(local, groups.mesh, placements, run_check=False, shape=torch.Size((4, 6)), stride=(6, 1))
        layout = layout_of(tensor)
        assert layout == ShardLayout((4, 6), (2, 2), (0, 1, 2, 3), cuts)
        assert tuple(part.stop - part.start for part in local_region(tensor)) == shape
        assert local_region(tensor) == layout.region(rank)
        assert local_tensor(tensor).data_ptr() == local.data_ptr()
        assert owns(tensor) is layout.counts(rank)


@pytest.mark.parametrize(
    "placements",
    [
        [Partial(), Shard(0)],
        [Shard(0), Partial()],
        [_StridedShard(0, split_factor=3), Shard(0)],
        [_StridedShard(0, split_factor=2), Shard(1)],
    ],
    ids=str,
)
def test_what_is_no_rectangle_is_refused(placements: list[Placement]) -> None:
    with fake_rank(ParallelConfig(tp=2), 0, 4) as groups:
        mesh: DeviceMesh = groups.mesh
        tensor = DTensor.from_local(
            torch.zeros(2, 6), mesh, placements, run_check=False, shape=torch.Size((4, 6)), stride=(6, 1)
        )
        with pytest.raises(
            UnsupportedError, match=r"^a tensor has the placements \(.*; expected Replicate, Shard"
        ) as failure:
            layout_of(tensor)
        assert failure.value.details["placements"] == str(tuple(placements))


def test_a_plain_tensor_is_this_ranks_alone() -> None:
    plain = torch.zeros(2, 3, requires_grad=True)
    assert layout_of(plain) == ShardLayout((2, 3), (), (0,), ())
    assert local_region(plain) == (slice(0, 2), slice(0, 3)) and owns(plain)
    assert not local_tensor(plain).requires_grad and local_tensor(plain).data_ptr() == plain.data_ptr()
    with fake_rank(ParallelConfig(), 2, 3):
        assert layout_of(plain).ranks == (2,) and owns(plain)
