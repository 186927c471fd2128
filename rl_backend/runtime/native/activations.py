"""Hidden states between the modules of a model, on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rl_backend.contracts import PackedBatch, UnsupportedError, stored_tensors
from rl_backend.runtime.module_outputs import record_outputs
from rl_backend.runtime.native.forward_backward import run_micro_batches
from rl_backend.runtime.native.handle import NativeHandle


def record_activations(handle: NativeHandle, data: Sequence[PackedBatch]) -> list[Mapping[str, Tensor]]:
    """Runs checked micro-batches forward; see :meth:`rl_backend.runtime.Runtime.activations`.

    Raises:
        UnsupportedError: ``config.json`` has no ``hidden_size`` to know hidden states by.
    """
    hidden_size = handle.hf_config.get("hidden_size")
    if not isinstance(hidden_size, int):
        raise UnsupportedError(
            f"activations of {handle.name!r}: config.json has hidden_size={hidden_size!r}, by which hidden states are "
            "known; it must be a whole number",
            hidden_size=hidden_size,
        )
    hf_names = {
        parameter: tuple(stored for _, stored in stored_tensors(name)) for parameter, name in handle.weight_names.items()
    }
    activations: list[Mapping[str, Tensor]] = []
    for batch in data:
        with record_outputs(handle.model, hf_names, hidden_size) as outputs:
            run_micro_batches(handle, [batch], None, forward_only=True, keep_gathered=False)
        shape = (batch.num_tokens, hidden_size)
        activations.append(
            {path: output.to("cpu", torch.float32) for path, output in outputs.items() if output.shape == shape}
        )
    return activations
