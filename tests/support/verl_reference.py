"""Shared parts of comparisons with verl's own functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def actor_config(meta: dict[str, Any], **changes: Any) -> Any:
    from verl.workers.config import ActorConfig

    settings = {"strategy": "fsdp", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1, "global_batch_info": dict(meta)}
    return ActorConfig(**{**settings, **changes})


def gradient(loss: Tensor, leaf: Tensor) -> Tensor:
    (result,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    return result


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    """Equal up to the rounding of ``ours``'s dtype."""
    rtol, atol = (1e-6, 1e-9) if ours.dtype == torch.float64 else (1e-5, 1e-6)
    torch.testing.assert_close(ours, theirs.to(ours.dtype), rtol=rtol, atol=atol)
