"""Both ways of a backward pass to the logits."""

from __future__ import annotations

import pytest

from rl_backend.primitive import log_prob


@pytest.fixture(params=[True, False], ids=["kept", "computed again"])
def logits_kept(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if not request.param:
        monkeypatch.setattr(log_prob, "KEPT_BYTES", 0)
    return bool(request.param)
