"""Attention sinks in the gradient norm."""

from collections.abc import Iterable

from torch import nn


def mark_sinks(chunks: Iterable[nn.Module]) -> None:
    """Marks the sinks of a rank's heads as a part of all; before Megatron's optimizer, which copies marks to its masters."""
    # Megatron and Transformer Engine leave them unmarked, and the global gradient norm would have the first rank's alone
    # (Megatron-LM #7452, finding 8).
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if name.endswith("softmax_offset"):
                vars(parameter).update(tensor_model_parallel=True, partition_dim=0, partition_stride=1)
