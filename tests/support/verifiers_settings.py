"""Settings of an environment of verifiers, every field away from its default."""

from __future__ import annotations

import sys

from adapters.verifiers import VerifiersSettings

SETTINGS = VerifiersSettings(
    python=sys.executable,
    environment={"taskset": {"id": "mine"}, "judge": {"harness": {"id": "own"}}},
    roles=("player", "judge"),
    tokenizer="some/tokenizer",
    path=("/one", "/two"),
    most_tasks=3,
    start_seconds=30.0,
)
