"""The dtype of training and sampling, which GPUs decide where nobody chooses."""

from __future__ import annotations

from typing import Literal

import ray

ChosenDtype = Literal["auto", "float32", "bfloat16"]


def resolve_dtype(dtype: ChosenDtype) -> Literal["float32", "bfloat16"]:
    """``auto`` is bfloat16 on a cluster with GPUs, else float32."""
    if dtype == "auto":
        return "bfloat16" if ray.cluster_resources().get("GPU", 0) > 0 else "float32"
    return dtype
