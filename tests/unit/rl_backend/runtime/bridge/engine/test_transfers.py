"""The shapes that each rank of a pipeline receives, in the order in which Megatron asks for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from rl_backend.runtime.bridge.engine.forward_backward import KnownShapes

SHAPES = [(length, 1, 8) for length in (10, 20, 30, 40)]


def transfers(rank: int, size: int, chunks: int, monkeypatch: pytest.MonkeyPatch) -> KnownShapes:
    group: Any = SimpleNamespace(rank=lambda: rank, size=lambda: size)
    monkeypatch.setattr(dist, "get_global_rank", lambda _, number: number)
    config = SimpleNamespace(
        microbatch_group_size_per_vp_stage=size, virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None
    )
    return KnownShapes(group, config, SHAPES, chunks)


ALL = [10, 20, 30, 40]
# Two of a group through one chunk after the other.
BOTH = [10, 20, 10, 20, 30, 40, 30, 40]


@pytest.mark.parametrize(
    ("rank", "size", "chunks", "activations", "gradients"),
    [
        (0, 2, 1, [], ALL),
        (1, 2, 1, ALL, []),
        (1, 3, 1, ALL, ALL),
        # The first rank has nobody before its first chunk, the last nobody behind its last.
        (0, 2, 2, ALL, BOTH),
        (1, 2, 2, BOTH, ALL),
    ],
)
def test_every_rank_knows_what_it_receives(
    monkeypatch: pytest.MonkeyPatch, rank: int, size: int, chunks: int, activations: list[int], gradients: list[int]
) -> None:
    known = transfers(rank, size, chunks, monkeypatch)
    found: tuple[list[int], list[int]] = ([], [])
    for step in range(max(len(activations), len(gradients))):
        wanted = [step < len(activations), step < len(gradients)]
        for lengths, asked, shape in zip(found, wanted, known._communicate_shapes(None, None, *wanted), strict=True):
            assert tuple(shape) == (0, 0, 0) or asked
            lengths.extend([shape[0]] * asked)
    assert found == (activations, gradients)
    for more in ((True, False), (False, True)):
        with pytest.raises(StopIteration):
            known._communicate_shapes(None, None, *more)
