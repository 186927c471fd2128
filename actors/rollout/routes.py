"""Routes of samples: which experts the engine's routers chose, on their way from vLLM to a training sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_backend.contracts import RolloutError

type ExpertIds = NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """The experts of one sample's tokens.

    Attributes:
        experts: (L - 1, MoE layers, top_k) ids, of the smallest unsigned type that vLLM has for them, for prompt and
            response together: no forward pass has seen the last token. The second axis counts the layers that have experts
            alone, first to last (``EngineInfo.moe_layers`` has their numbers in the model); the experts of a row are in the
            router's order. A read-only view of what the engine put into Ray's object store.
        weight_version: of the weights whose routers chose, for every row. A push empties the engine's prefix cache, so a
            prompt is never answered with routes of older weights.
    """

    experts: ExpertIds
    weight_version: int


def pack_routes(completions: Sequence[Any], lengths: Sequence[int], moe_layers: Sequence[int], engine: str) -> ExpertIds:
    """Routes of several samples end to end, (sum of the lengths - 1, MoE layers, top_k), so that they travel as one array.

    Args:
        completions: vLLM's, which have a row for every hidden layer, dense ones too.
        lengths: tokens of prompt and response of each.
        moe_layers: numbers of the layers with experts.
        engine: for messages.

    Raises:
        RolloutError: vLLM returned none, or not a row for every token but the last.
    """
    parts = []
    for completion, length in zip(completions, lengths, strict=True):
        routes = completion.routed_experts
        if routes is None or len(routes) != length - 1:
            found = "no routes" if routes is None else f"routes of {len(routes)} tokens"
            raise RolloutError(
                f"{engine}: vLLM returned {found} for {length} tokens of prompt and response; expected {length - 1}",
                engine=engine,
            )
        parts.append(routes[:, list(moe_layers)])
    return np.concatenate(parts)


def split_routes(packed: ExpertIds, lengths: Sequence[int], version: int) -> list[Routes]:
    """Views of :func:`pack_routes`' array, one for each sample."""
    ends = np.cumsum([length - 1 for length in lengths])
    return [Routes(part, version) for part in np.split(packed, ends[:-1])]
