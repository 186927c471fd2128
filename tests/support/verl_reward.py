"""A reward that samples of an untrained model differ in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> float:
    """The share of even digits; verl's reward signature."""
    return sum(character in "02468" for character in solution_str) / max(1, len(solution_str))
