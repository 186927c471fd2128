"""An environment that hangs in its first step, and writes down that it was opened and closed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_backend.environment import Step, Turn


class HangingGame:
    """A line in ``row["log"]`` when it starts, and another one when it is closed; it answers a turn at once where
    ``row["hangs"]`` is not set.
    """

    tools = ()

    def __init__(self, row: Mapping[str, Any], seed: int) -> None:
        self.row = row
        self.log = Path(row["log"])

    def start(self) -> list[dict[str, str]]:
        self._write("opened")
        return [{"role": "user", "content": "?"}]

    async def step(self, turn: Turn) -> Step:
        self._write("stepped")
        if self.row.get("hangs", True):
            await asyncio.Event().wait()
        return Step(reward=float(len(turn.token_ids)), done=True)

    async def close(self) -> None:
        await asyncio.sleep(0.1)
        self._write("closed")

    def _write(self, what: str) -> None:
        with self.log.open("a") as log:
            log.write(f"{what}\n")
