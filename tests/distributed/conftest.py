"""Fixtures of the tests that run on several ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.rank_pool import RankPool


@pytest.fixture(scope="package")
def ranks() -> Iterator[RankPool]:
    """Four ranks that stay for all tests of this folder, which take the first two or all of them.

    They have grown to 5 GiB by then, which the tests after them need.
    """
    pool = RankPool(4, preload=["tests.support.native", "tests.support.bridge_runs"])
    yield pool
    pool.close()
