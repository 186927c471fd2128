"""Fixtures of the tests that run on several ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.rank_pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Four ranks that stay; a test takes the first two or all of them."""
    pool = RankPool(4, preload=["tests.support.native", "tests.support.bridge_runs"])
    yield pool
    pool.close()
