"""What a pipeline schedule cannot do is refused with the arithmetic before anything is made."""

from __future__ import annotations

import pytest

from rl_backend.contracts import BatchError, ConfigError
from rl_backend.pipeline import SCHEDULES, make_schedule, require_stages


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("forward_only", [False, True])
def test_no_micro_batches_are_refused(name: str, forward_only: bool) -> None:
    with pytest.raises(BatchError, match=r"^0 micro-batches: a step needs at least 1$"):
        make_schedule(name, 2, 0, forward_only=forward_only)


@pytest.mark.parametrize(("count", "use"), [(3, "use 4"), (6, "use 4 or 8"), (1, "use 4")])
def test_micro_batches_that_are_not_whole_groups_are_refused_with_the_nearest_numbers(count: int, use: str) -> None:
    with pytest.raises(BatchError, match=rf"pp=4 takes them in groups of pp, and {count} % 4 = {count % 4}; {use}$"):
        make_schedule("interleaved-1f1b", 4, count)


def test_too_few_micro_batches_for_dualpipev_are_refused_but_not_without_backward() -> None:
    with pytest.raises(BatchError, match=r"^7 micro-batches: dualpipev with pp=4 needs at least 2 \* pp = 8; use 8 or more"):
        make_schedule("dualpipev", 4, 7)
    assert make_schedule("dualpipev", 4, 7, forward_only=True).num_micro_batches == 7
    assert make_schedule("interleaved-1f1b", 4, 7, forward_only=True).num_micro_batches == 7


@pytest.mark.parametrize("name", ["zbv", "dualpipev"])
@pytest.mark.parametrize("stages", [0, 1, 3])
def test_a_v_needs_two_stages_per_rank(name: str, stages: int) -> None:
    with pytest.raises(ConfigError, match=rf"^vpp={stages}: {name} needs 2 stages per rank, 2 \* 4 = 8 in all"):
        make_schedule(name, 4, 8, stages_per_rank=stages)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-h2"])
def test_a_schedule_of_one_stage_per_rank_refuses_more(name: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^vpp=2: {name} has 1 stage per rank; set vpp=1, or a schedule of interleaved-1f1b"
    ):
        require_stages(name, 4, 2)


def test_interleaving_needs_two_stages_per_rank() -> None:
    with pytest.raises(ConfigError, match=r"^vpp=1: interleaved-1f1b needs at least 2 stages per rank"):
        make_schedule("interleaved-1f1b", 4, 8, stages_per_rank=1)


def test_an_unknown_schedule_and_no_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^schedule='gpipe': unknown; known: 1f1b, interleaved-1f1b, zb-h1"):
        make_schedule("gpipe", 2, 4)
    with pytest.raises(ConfigError, match=r"^pp=0: must be at least 1$"):
        make_schedule("zbv", 0, 4)
