"""What of a handle is in host memory."""

from __future__ import annotations

from typing import Any

from rl_backend.contracts.atoms import PARTS
from rl_backend.runtime.handle import Offload


def parts_away(offload: Offload) -> list[str]:
    return [part for part in PARTS if part in offload._moved]


def host_bytes(offload: Offload, part: Any) -> int:
    return sum(host.nbytes for _, host in offload._moved.get(part, ()))
