"""Ray actors around the backend: training groups, rollout groups of vLLM engines, and weight sync between them.

Names are imported when they are first used, so that a training script does not import vLLM.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actors.loss import Loss as Loss
    from actors.train_context import HandleRef as HandleRef
    from actors.train_context import RankContext as RankContext
    from actors.train_group import TrainGroup as TrainGroup
    from actors.train_operation import GroupFuture as GroupFuture

_MODULES = {
    "GroupFuture": "actors.train_operation",
    "HandleRef": "actors.train_context",
    "Loss": "actors.loss",
    "RankContext": "actors.train_context",
    "TrainGroup": "actors.train_group",
}

__all__ = ["GroupFuture", "HandleRef", "Loss", "RankContext", "TrainGroup"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'actors' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
