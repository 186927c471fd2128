"""One rank of a side that is a registered runtime: only the atoms are used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from rl_backend.algorithm import sft_loss
from rl_backend.checkpoint.hf_reader import read_hf_config
from rl_backend.contracts import ModelHandle, PackedBatch
from rl_backend.data import pack_plan
from rl_backend.parity.batches import make_sequences, plan_batch
from rl_backend.parity.config import ParityConfig, ParitySide
from rl_backend.parity.record import NamedTensors, RankRecord
from rl_backend.parity.versions import package_versions
from rl_backend.runtime import Runtime, create_runtime


def record_runtime(config: ParityConfig, side: ParitySide, rank: int) -> RankRecord:
    """Trains and records; a collective over the ranks of the side.

    After an error the runtime stays open: closing may wait for ranks that are elsewhere, and the error must get out first.
    """
    runtime = create_runtime(config.runtime_config(side))
    handle = runtime.build_model()
    sequences = make_sequences(config, read_hf_config(config.model))
    share = pack_plan(sequences, plan_batch(config, handle.data_parallel_size))[handle.data_parallel_rank]
    record = _train(runtime, handle, share, config.steps, keep=rank == 0)
    runtime.close()
    return record


def _train(
    runtime: Runtime[Any], handle: ModelHandle, share: Sequence[PackedBatch], steps: int, *, keep: bool
) -> RankRecord:
    is_source = runtime.is_mp_src_rank_with_outputs(handle)
    loaded = _on_host(runtime.export_weights(handle, dtype=torch.float32), keep=keep)
    activations = [
        sequence
        for batch, recorded in zip(share, runtime.activations(handle, share), strict=False)
        for sequence in _by_sequence(batch, recorded)
    ]
    losses, norms = [], []
    log_probs: Sequence[Tensor] = ()
    gradients, weights = {}, {}
    for step in range(steps):
        with runtime.train_mode(handle):
            runtime.zero_grad(handle)
            result = runtime.forward_backward(handle, share, sft_loss)
        losses.append(result.loss)
        if step == 0:
            log_probs = [part.to("cpu", torch.float32) for part in result.output("log_probs")] if is_source else ()
            gradients = _on_host(runtime.export_gradients(handle), keep=keep)
        norms.append(runtime.optimizer_step(handle).grad_norm)
        if step == 0:
            weights = _on_host(runtime.export_weights(handle, dtype=torch.float32), keep=keep)
        runtime.lr_scheduler_step(handle)
    return RankRecord(
        data_parallel_rank=handle.data_parallel_rank,
        is_source=is_source,
        activations=activations,
        log_probs=log_probs,
        losses=losses,
        grad_norms=norms,
        loaded_weights=loaded,
        gradients=gradients,
        weights=weights,
        versions=package_versions(),
    )


def _by_sequence(batch: PackedBatch, recorded: NamedTensors) -> list[dict[str, Tensor]]:
    split = {path: batch.split(tensor) for path, tensor in recorded.items()}
    return [{path: parts[index] for path, parts in split.items()} for index in range(batch.num_sequences)]


def _on_host(stream: Iterable[tuple[str, Tensor]], *, keep: bool) -> dict[str, Tensor]:
    """Copies of all tensors where ``keep`` is set; the other ranks only take part."""
    kept = {}
    for name, tensor in stream:
        if keep:
            kept[name] = tensor.detach().to("cpu", torch.float32, copy=True)
    return kept
