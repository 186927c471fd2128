"""Layouts as test parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest


def layouts(by_world_size: Mapping[int, Sequence[Mapping[str, int]]], quick: int = 99) -> list[object]:
    """(world size, layout) for each layout, with a name that says both.

    Args:
        quick: layouts of more ranks are for ``make test-all``.
    """

    def name(world: int, layout: Mapping[str, int]) -> str:
        sizes = "-".join(f"{key}{size}" for key, size in layout.items()) or "dp"
        return f"{world}-ranks-{sizes}"

    return [
        pytest.param(world, dict(layout), id=name(world, layout), marks=[pytest.mark.long] if world > quick else [])
        for world, found in by_world_size.items()
        for layout in found
    ]
