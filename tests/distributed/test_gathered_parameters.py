"""Parameters that are kept gathered are gathered once in a pass."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.test_reductions import counting_job, gathers
from tests.support.rank_pool import RankPool


def test_parameters_that_stay_are_gathered_once_whatever_the_number_of_micro_batches(
    ranks: RankPool, untied_model: Path
) -> None:
    one, three = ranks.run(counting_job, str(untied_model), [1, 3], {"reshard_after_forward": False})[0]
    assert gathers(three) == gathers(one) > 0
