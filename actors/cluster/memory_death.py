"""What Ray says of a process that it killed because its machine ran out of memory."""

from __future__ import annotations

import re

from ray.exceptions import OutOfMemoryError

WHAT_TO_SET = "lower --max-tokens-per-micro-batch, set --activation-checkpointing full, or free memory"

# A line of Ray's table of the largest processes: PID, GB, command.
_USER = re.compile(r"^\s*\d+\s+(\d+(?:\.\d+)?)\s+(\S.*)$", re.MULTILINE)
_KINDS = (("ray::TrainWorker", "training rank"), ("ray::RolloutEngine", "engine"), ("ray::", "Ray's worker"))
_SHOWN, _LEAST = 4, 0.5


def memory_death(error: BaseException) -> str:
    """Who held how much, and what to set; empty for any other error."""
    if not isinstance(error, OutOfMemoryError):
        return ""
    used = re.search(r"(\d+(?:\.\d+)?)\s?GB / (\d+(?:\.\d+)?)\s?GB", str(error))
    of = f", {used[1]} of {used[2]} GB in use" if used else ""
    users = [(float(size), command) for size, command in _USER.findall(str(error)) if float(size) >= _LEAST]
    held = "; ".join(f"{_kind(command)} {size:g} GB" for size, command in sorted(users, reverse=True)[:_SHOWN])
    return f"its machine ran out of memory{of}{f' ({held})' if held else ''}, and Ray killed it; {WHAT_TO_SET}"


def _kind(command: str) -> str:
    return next((kind for start, kind in _KINDS if command.startswith(start)), command.split()[0].rsplit("/", 1)[-1][:40])
