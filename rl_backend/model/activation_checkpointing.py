"""Activation checkpointing: layers are computed again in the backward pass."""

from collections.abc import Sequence
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint


def checkpoint_layers(layers: Sequence[nn.Module]) -> None:
    """Makes every layer keep only its inputs and compute the rest again in the backward pass.

    Wraps each layer's ``forward`` in place, so that parameter names stay as they are. Call it before
    :func:`~rl_backend.parallel.fsdp.apply_fsdp`: the gathered parameters then outlive the recomputation. Layers must be
    deterministic: the state of the random number generators is not kept for the recomputation.
    """
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
