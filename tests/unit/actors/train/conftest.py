"""What the tests of a rank's worker share."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from actors.train import worker


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What Prometheus is told."""
    told: list[tuple[Any, ...]] = []
    stand_in = SimpleNamespace(
        set_gauge=lambda name, value, **tags: told.append((name, value, tags)),
        count=lambda name, value, **tags: told.append((name, value, tags)),
    )
    monkeypatch.setattr(worker, "prometheus", stand_in)
    return told
