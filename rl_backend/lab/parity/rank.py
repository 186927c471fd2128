"""``python -m rl_backend.lab.parity.rank CONFIG ROLE OUTPUT STATES``: one rank, in a process that the comparison started.

``OUTPUT`` becomes the rank's record, or ``OUTPUT.error`` says in JSON why there is none. ``STATES`` is a folder: the
reference that runs again writes what it has before each step but the first there, and the candidate takes it.
"""

import gc
import itertools
import json
import os
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_backend.algorithm import sft_loss
from rl_backend.checkpoint.hf_reader import read_hf_config
from rl_backend.contracts import ConfigError, ModelHandle, PackedBatch, RLBackendError, UnsupportedError
from rl_backend.data import pack_plan
from rl_backend.lab.parity.compare import NamedTensors, RankRecord, package_versions
from rl_backend.lab.parity.config import TRANSFORMERS, ParityConfig, ParitySide, make_sequences, plan_batch, start_of
from rl_backend.parallel.groups import join_default_group, leave_default_group, training_device
from rl_backend.runtime import Runtime, create_runtime


def main(config_file: str, role: str, output: str, states: str = "") -> int:
    """Exit status 0 when the record is there."""
    try:
        config = ParityConfig.model_validate_json(Path(config_file).read_text())
        torch.set_num_threads(config.threads)
        side = config.side("reference" if role in ("reference", "again") else "candidate")
        rank = int(os.environ.get("RANK", "0"))
        if side.runtime == TRANSFORMERS:
            from rl_backend.lab.parity import transformers_side

            if role == "again":
                record = transformers_side.record_again(config, side, Path(states))
            elif role == "alone":
                record = transformers_side.record_alone(config, side, Path(states))
            else:
                record = transformers_side.record_transformers(config, side)
        elif role == "again":
            record = record_again(config, side, Path(states))
        elif role == "alone":
            record = record_alone(config, side, Path(states))
        else:
            record = record_runtime(config, side, rank)
        record.save(Path(output))
    except Exception as error:  # noqa: BLE001 - the process that started this one shows it
        known = isinstance(error, RLBackendError)
        details = {
            "message": str(error) if known else f"{type(error).__name__}: {error}",
            "expected": known,
            "refused": isinstance(error, ConfigError | UnsupportedError),
            "traceback": traceback.format_exc(),
        }
        Path(f"{output}.error").write_text(json.dumps(details))
        return 1
    return 0


def record_runtime(config: ParityConfig, side: ParitySide, rank: int) -> RankRecord:
    """Trains with a registered runtime, through its atoms alone; a collective over the ranks of the side."""
    # After an error the runtime stays open: closing may wait for other ranks, and the error must get out first.
    runtime, handle = _build(config, side)
    share = _share(config, handle)
    is_source = runtime.is_mp_src_rank_with_outputs(handle)
    keep = rank == 0
    loaded = _on_host(_weights(runtime, handle), keep=keep)
    activations: list[NamedTensors] = []
    for batch, recorded in zip(share, runtime.activations(handle, share), strict=False):
        split = {path: batch.split(tensor) for path, tensor in recorded.items()}
        activations += [{path: parts[index] for path, parts in split.items()} for index in range(batch.num_sequences)]
    losses, norms = [], []
    log_probs: Sequence[Tensor] = ()
    gradients, weights = {}, {}
    for step in range(config.steps):
        with runtime.train_mode(handle):
            runtime.zero_grad(handle)
            result = runtime.forward_backward(handle, share, sft_loss)
        losses.append(result.loss)
        if step == 0:
            log_probs = [part.to("cpu", torch.float32) for part in result.output("log_probs")] if is_source else ()
            gradients = _on_host(runtime.export_gradients(handle), keep=keep)
        norms.append(runtime.optimizer_step(handle).grad_norm)
        if step == 0:
            weights = _on_host(_weights(runtime, handle), keep=keep)
        runtime.lr_scheduler_step(handle)
    runtime.close()
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


def record_again(config: ParityConfig, side: ParitySide, states: Path) -> RankRecord:
    """Trains in other micro-batches, and writes what the model has before each step but the first."""
    runtime, handle = _build(config, side)
    share = _share(config, handle, otherwise=True)
    losses, norms = [], []
    for step in range(config.steps):
        if step and config.lora is None:
            runtime.save_checkpoint(handle, states / str(step), hf=True)
        elif step:
            factors = {name: tensor.cpu() for name, tensor in runtime.export_lora_adapter(handle)}
            if os.environ.get("RANK", "0") == "0":
                torch.save(factors, states / str(step))
        loss, norm = _step(runtime, handle, share)
        losses.append(loss)
        norms.append(norm)
        runtime.lr_scheduler_step(handle)
    is_source = runtime.is_mp_src_rank_with_outputs(handle)
    runtime.close()
    return RankRecord(handle.data_parallel_rank, is_source, (), (), losses, norms)


def record_alone(config: ParityConfig, side: ParitySide, states: Path) -> RankRecord:
    """Takes each step but the first from what the reference had before it."""
    # Kept for all runtimes: ranks meet once.
    join_default_group(training_device(config.device))
    losses, norms = [], []
    for step in range(1, config.steps):
        runtime, handle = _build(config, side, states / str(step))
        loss, norm = _step(runtime, handle, _share(config, handle))
        losses.append(loss)
        norms.append(norm)
        is_source = runtime.is_mp_src_rank_with_outputs(handle)
        runtime.close()
        rank = handle.data_parallel_rank
        del runtime, handle
        gc.collect()
    leave_default_group()
    return RankRecord(rank, is_source, (), (), losses, norms)


def _build(config: ParityConfig, side: ParitySide, state: Path | None = None) -> tuple[Runtime[Any], ModelHandle]:
    at_state = config if state is None or config.lora is not None else config.replace(model=str(state))
    runtime = create_runtime(at_state.runtime_config(side))
    handle: ModelHandle = runtime.build_model(trainable=config.lora is None)
    if config.lora is not None:
        handle = runtime.create_lora_adapter(handle, config.lora, name="parity")
        if state is None:
            shapes = {name: tensor.shape for name, tensor in runtime.export_lora_adapter(handle)}
            factors = {name: start_of(name, shape, config.seed) for name, shape in shapes.items()}
        else:
            factors = torch.load(state, weights_only=True)
        runtime.import_lora_adapter(handle, factors)
    return runtime, handle


def _share(config: ParityConfig, handle: ModelHandle, *, otherwise: bool = False) -> list[PackedBatch]:
    sequences = make_sequences(config, read_hf_config(config.model))
    plan = plan_batch(config, handle.data_parallel_size, otherwise=otherwise)
    return pack_plan(sequences, plan)[handle.data_parallel_rank]


def _step(runtime: Runtime[Any], handle: ModelHandle, share: Sequence[PackedBatch]) -> tuple[float, float]:
    """Loss and gradient norm."""
    with runtime.train_mode(handle):
        runtime.zero_grad(handle)
        result = runtime.forward_backward(handle, share, sft_loss)
    return result.loss, runtime.optimizer_step(handle).grad_norm


def _weights(runtime: Runtime[Any], handle: ModelHandle) -> Iterator[tuple[str, Tensor]]:
    whole = runtime.export_weights(handle.base or handle, dtype=torch.float32)
    return itertools.chain(whole, runtime.export_lora_adapter(handle)) if handle.base is not None else whole


def _on_host(stream: Iterable[tuple[str, Tensor]], *, keep: bool) -> dict[str, Tensor]:
    # Ranks that keep nothing take part in the collectives all the same.
    return {name: tensor.detach().to("cpu", torch.float32, copy=True) for name, tensor in stream if keep}


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
