"""How the ranks of a pipeline agree on a pass of which none waits for those after it."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rl_backend.contracts import BatchError
from rl_backend.runtime.native.validated_pass import Agreement, Terms
from tests.support.rank_threads import run_ranks

TERMS = Terms(refused=False, forward_only=False, kind=6, checksum=2**32 - 1, hidden_rows=(5, 300, 7))
REFUSED = TERMS._replace(refused=True, hidden_rows=())
KINDS = "forward_only, router_replay or the LoRA tenants with a loss differ"
DATA = "the ranks of one model replica"

type Found = tuple[str, Terms, bool]


def agreed(
    of_ranks: Mapping[int, Terms], problems: Mapping[int, str], *, pp: int = 3, width: int = 1, replica: bool = False
) -> list[Found]:
    """On each rank of ``pp`` stages of ``width`` ranks, which are a replica or see other data: problem, terms, runs."""

    def of_rank(world: dist.ProcessGroup) -> Found:
        rank, size = world.rank(), pp * width
        stage_ranks = [rank // width * width + each for each in range(width)]
        stage = dist.new_group(stage_ranks)
        pipeline = dist.new_group(list(range(rank % width, size, width)))
        alone = SimpleNamespace(size=lambda: 1)
        groups: Any = SimpleNamespace(
            validation=(world, stage),
            pp_group=pipeline,
            token_group=stage if replica else alone,
            device=torch.device("cpu"),
        )
        problem = BatchError(problems[rank]) if rank in problems else None
        agreement = Agreement(of_ranks.get(rank, TERMS), problem, groups)
        found = agreement.problem()
        return "" if found is None else str(found), agreement.terms, agreement.runs

    return run_ranks(of_rank, pp * width)


def test_terms_of_the_first_rank_go_down_the_pipeline() -> None:
    for terms in (
        TERMS,
        TERMS._replace(forward_only=True, hidden_rows=(1,)),
        TERMS._replace(kind=0, checksum=0, hidden_rows=()),
    ):
        assert agreed(dict.fromkeys(range(3), terms), {}) == [("", terms, True)] * 3


@pytest.mark.parametrize("refusing", [0, 1, 2])
def test_a_rank_that_refuses_is_named_on_all_others(refusing: int) -> None:
    found = agreed({refusing: REFUSED}, {refusing: "too long"})
    for rank, (problem, terms, runs) in enumerate(found):
        assert problem == (
            "too long" if rank == refusing else f"rank {refusing} refused its micro-batches; nothing ran on any rank"
        )
        # Ranks behind one in the middle begin what the first has asked for; all abandon it.
        assert terms == (TERMS if refusing else REFUSED)
        assert runs is (refusing > 0 and rank != refusing)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": 7}, KINDS),
        ({"checksum": 1}, DATA),
        ({"hidden_rows": (5, 300, 8)}, DATA),
        ({"hidden_rows": (5, 300)}, DATA),
        ({"forward_only": True}, DATA),
    ],
    ids=str,
)
def test_a_rank_with_other_terms_than_the_first_says_in_what(changes: dict[str, Any], message: str) -> None:
    found = agreed({2: TERMS._replace(**changes)}, {})
    assert found[2][0].startswith(message) and found[2][1:] == (TERMS, False)
    assert [problem for problem, _, _ in found[:2]] == ["rank 2 refused its micro-batches; nothing ran on any rank"] * 2
    assert [each[1:] for each in found[:2]] == [(TERMS, True)] * 2


@pytest.mark.parametrize("refusing", [1, 2])
def test_ranks_of_a_stage_stop_with_one_of_them_that_refuses(refusing: int) -> None:
    found = agreed({refusing: REFUSED}, {refusing: "too long"}, pp=2, width=2)
    for rank, (problem, terms, runs) in enumerate(found):
        assert problem == (
            "too long" if rank == refusing else f"rank {refusing} refused its micro-batches; nothing ran on any rank"
        )
        same_stage = rank // 2 == refusing // 2
        assert runs is (refusing == 2 and not same_stage)
        assert terms.refused is (refusing == 1)


def test_ranks_of_a_stage_with_other_numbers_of_micro_batches_say_so_themselves() -> None:
    found = agreed({1: TERMS._replace(hidden_rows=(5, 300)), 3: TERMS._replace(hidden_rows=(5, 300))}, {}, pp=2, width=2)
    for rank, (problem, _, runs) in enumerate(found):
        assert problem.startswith(f"this rank ({rank}) has {3 - rank % 2} micro-batches, others have 2 to 3") and not runs


def test_ranks_of_a_replica_with_other_data_are_found_in_their_stage() -> None:
    found = agreed({1: TERMS._replace(checksum=3), 3: TERMS._replace(checksum=3)}, {}, pp=2, width=2, replica=True)
    assert all(problem.startswith(DATA) and not runs for problem, _, runs in found)
