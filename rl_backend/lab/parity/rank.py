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
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from rl_backend.algorithm import sft_loss
from rl_backend.checkpoint.hf_reader import read_hf_config
from rl_backend.contracts import ConfigError, ModelHandle, RLBackendError, UnsupportedError
from rl_backend.data import pack_plan
from rl_backend.lab.parity.compare import NamedTensors, RankRecord, package_versions
from rl_backend.lab.parity.config import TRANSFORMERS, ParityConfig, ParitySide, make_sequences, plan_batch, start_of
from rl_backend.parallel.groups import join_default_group, leave_default_group, training_device
from rl_backend.runtime import create_runtime


class Trainer(Protocol):
    """One rank of a side, with its share of the batch. Calls are collectives over the ranks of the side."""

    data_parallel_rank: int
    is_source: bool

    def weights(self) -> NamedTensors:
        """On the host, by their Hugging Face names; of an adapter those of the base too. Empty on other ranks than 0."""

    def activations(self) -> Sequence[NamedTensors]: ...

    def forward_backward(self) -> tuple[float, Sequence[Tensor]]:
        """Loss of all micro-batches, and log-probs by sequence."""

    def gradients(self) -> NamedTensors:
        """Of the last pass, as :meth:`weights`."""

    def optimizer_step(self) -> float:
        """The norm before clipping."""

    def save(self, state: Path) -> None:
        """What :data:`Open` starts from."""

    def close(self) -> None: ...


type Open = Callable[..., Trainer]
"""``(config, side, state=None, *, otherwise=False)``: at the model of ``config``, or at a saved ``state``; ``otherwise`` in
an order that changes only rounding."""


def main(config_file: str, role: str, output: str, states: str = "") -> int:
    """Exit status 0 when the record is there."""
    try:
        config = ParityConfig.model_validate_json(Path(config_file).read_text())
        torch.set_num_threads(config.threads)
        side = config.side("reference" if role in ("reference", "again") else "candidate")
        if role == "again":
            record = record_again(config, side, Path(states))
        elif role == "alone":
            record = record_alone(config, side, Path(states))
        else:
            record = record_training(config, side)
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


def opener(side: ParitySide) -> Open:
    if side.runtime != TRANSFORMERS:
        return RuntimeTrainer
    from rl_backend.lab.parity.transformers_side import open_trainer

    return open_trainer


def record_training(config: ParityConfig, side: ParitySide) -> RankRecord:
    """Trains, and records all that is compared of the first step, and the loss and gradient norm of each."""
    # After an error the trainer stays open: closing may wait for other ranks, and the error must get out first.
    trainer = opener(side)(config, side)
    loaded, activations = trainer.weights(), trainer.activations()
    loss, log_probs = trainer.forward_backward()
    gradients = trainer.gradients()
    losses, norms = [loss], [trainer.optimizer_step()]
    weights = trainer.weights()
    for _ in range(1, config.steps):
        losses.append(trainer.forward_backward()[0])
        norms.append(trainer.optimizer_step())
    trainer.close()
    rank, is_source = trainer.data_parallel_rank, trainer.is_source
    numbers = (activations, log_probs, losses, norms)
    return RankRecord(rank, is_source, *numbers, loaded, gradients, weights, package_versions())


def record_again(config: ParityConfig, side: ParitySide, states: Path) -> RankRecord:
    """Trains in another order, and writes what the model has before each step but the first."""
    trainer = opener(side)(config, side, otherwise=True)
    losses, norms = [], []
    for step in range(config.steps):
        if step:
            trainer.save(states / str(step))
        losses.append(trainer.forward_backward()[0])
        norms.append(trainer.optimizer_step())
    trainer.close()
    return RankRecord(trainer.data_parallel_rank, trainer.is_source, (), (), losses, norms)


def record_alone(config: ParityConfig, side: ParitySide, states: Path) -> RankRecord:
    """Takes each step but the first from what the reference had before it."""
    # Kept for all trainers: ranks meet once.
    join_default_group(training_device(config.device))
    losses, norms = [], []
    for step in range(1, config.steps):
        trainer = opener(side)(config, side, states / str(step))
        losses.append(trainer.forward_backward()[0])
        norms.append(trainer.optimizer_step())
        trainer.close()
        rank, is_source = trainer.data_parallel_rank, trainer.is_source
        del trainer
        gc.collect()
    leave_default_group()
    return RankRecord(rank, is_source, (), (), losses, norms)


class RuntimeTrainer:
    """A :class:`Trainer` of a registered runtime, by its atoms alone."""

    def __init__(
        self, config: ParityConfig, side: ParitySide, state: Path | None = None, *, otherwise: bool = False
    ) -> None:
        whole = state is not None and config.lora is None
        self._runtime = create_runtime((config.replace(model=str(state)) if whole else config).runtime_config(side))
        handle: ModelHandle = self._runtime.build_model(trainable=config.lora is None)
        if config.lora is not None:
            handle = self._runtime.create_lora_adapter(handle, config.lora, name="parity")
            if state is None:
                shapes = {name: tensor.shape for name, tensor in self._runtime.export_lora_adapter(handle)}
                factors = {name: start_of(name, shape, config.seed) for name, shape in shapes.items()}
            else:
                factors = torch.load(state, weights_only=True)
            self._runtime.import_lora_adapter(handle, factors)
        self._handle = handle
        self.data_parallel_rank = handle.data_parallel_rank
        self.is_source = self._runtime.is_mp_src_rank_with_outputs(handle)
        sequences = make_sequences(config, read_hf_config(config.model))
        plan = plan_batch(config, handle.data_parallel_size, otherwise=otherwise)
        self._share = pack_plan(sequences, plan)[handle.data_parallel_rank]

    def weights(self) -> dict[str, Tensor]:
        handle = self._handle
        whole: Iterator[tuple[str, Tensor]] = self._runtime.export_weights(handle.base or handle, dtype=torch.float32)
        factors = () if handle.base is None else self._runtime.export_lora_adapter(handle)
        return _on_host(itertools.chain(whole, factors))

    def activations(self) -> list[NamedTensors]:
        found: list[NamedTensors] = []
        for batch, recorded in zip(self._share, self._runtime.activations(self._handle, self._share), strict=False):
            split = {path: batch.split(tensor) for path, tensor in recorded.items()}
            found += [{path: parts[index] for path, parts in split.items()} for index in range(batch.num_sequences)]
        return found

    def forward_backward(self) -> tuple[float, Sequence[Tensor]]:
        with self._runtime.train_mode(self._handle):
            self._runtime.zero_grad(self._handle)
            result = self._runtime.forward_backward(self._handle, self._share, sft_loss)
        log_probs = result.output("log_probs") if self.is_source else ()
        return result.loss, [part.to("cpu", torch.float32) for part in log_probs]

    def gradients(self) -> dict[str, Tensor]:
        return _on_host(self._runtime.export_gradients(self._handle))

    def optimizer_step(self) -> float:
        norm = self._runtime.optimizer_step(self._handle).grad_norm
        self._runtime.lr_scheduler_step(self._handle)
        return norm

    def save(self, state: Path) -> None:
        if self._handle.base is None:
            self._runtime.save_checkpoint(self._handle, state, hf=True)
        elif factors := _on_host(self._runtime.export_lora_adapter(self._handle)):
            torch.save(factors, state)

    def close(self) -> None:
        self._runtime.close()


def _on_host(stream: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    # Ranks that keep nothing take part in the collectives all the same.
    keep = os.environ.get("RANK", "0") == "0"
    return {name: tensor.detach().to("cpu", torch.float32, copy=True) for name, tensor in stream if keep}


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
