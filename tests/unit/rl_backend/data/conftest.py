"""Fixtures of the tests of reward functions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.rewards import FILE


@pytest.fixture
def reward_file(tmp_path: Path) -> Path:
    """A user's file with the functions of :mod:`tests.support.rewards`."""
    path = tmp_path / "my_rewards.py"
    path.write_text(FILE)
    return path


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    """What a test opens in it is closed when the test ends."""
    with ExitStack() as stack:
        yield stack
