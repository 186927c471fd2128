"""Layouts as test parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest


def layouts(by_world_size: Mapping[int, Sequence[Mapping[str, int]]]) -> list[object]:
    """(world size, layout) for each layout, with a name that says both."""

    def name(world: int, layout: Mapping[str, int]) -> str:
        sizes = "-".join(f"{key}{size}" for key, size in layout.items()) or "dp"
        return f"{world}-ranks-{sizes}"

    return [
        pytest.param(world, dict(layout), id=name(world, layout))
        for world, found in by_world_size.items()
        for layout in found
    ]
