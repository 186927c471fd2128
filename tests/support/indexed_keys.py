"""Keys that indexers choose, kept as a rollout would return them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from rl_backend.contracts import PackedBatch
from rl_backend.contracts.replay import KEYS
from rl_backend.model.mixers.mla import SparseLatentAttention


@contextmanager
def kept_keys(model: nn.Module) -> Iterator[list[Tensor]]:
    """What each layer with an indexer attends to in the passes meanwhile, in their order; (T, top_k) each."""
    kept: list[Tensor] = []

    def keep(_: nn.Module, __: object, output: tuple[Tensor, Tensor | None]) -> None:
        assert output[1] is not None, "these sequences are longer than top_k"
        kept.append(output[1])

    layers = [each for each in model.modules() if isinstance(each, SparseLatentAttention) and each.indexer is not None]
    hooks = [layer.register_forward_hook(keep) for layer in layers]
    try:
        yield kept
    finally:
        for hook in hooks:
            hook.remove()


def with_keys(batch: PackedBatch, keys: Tensor) -> PackedBatch:
    fields = {**batch.token_fields, KEYS: keys}
    return PackedBatch(batch.input_ids, batch.seq_lens, fields, batch.sequence_fields, batch.meta)


def first_keys(batch: PackedBatch, layers: int, top_k: int) -> Tensor:
    """The first ``top_k`` tokens of each sequence, for all that see as many; (T, layers, top_k) int32."""
    numbers = torch.arange(top_k, dtype=torch.int32).expand(batch.num_tokens, layers, top_k)
    return numbers.masked_fill(numbers > batch.position_ids.view(-1, 1, 1), -1)
