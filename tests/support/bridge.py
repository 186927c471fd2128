"""Bridge runtimes and the jobs that the distributed tests run on the ranks of a pool."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl_backend.contracts import BridgeConfig, OptimizerConfig, PackedBatch, ParallelConfig, RuntimeConfig
from rl_backend.runtime.bridge.runtime import BridgeRuntime
from tests.support.native import deal, micro_batches, token_loss

# The models are so small that a second thread only costs time.
torch.set_num_threads(1)

SPLIT = [[0, 1], [2, 3], [4, 5], [6, 7]]

type Layout = Mapping[str, int]


@dataclass(frozen=True)
class Run:
    """What a training run gave: one rank's part, or all of it.

    Attributes:
        losses, norms: (steps,) float64.
        log_probs: index of a sequence -> its log-probs after the last step.
        gradients: Hugging Face name -> whole gradient of one more backward pass.
    """

    losses: Tensor
    norms: Tensor
    log_probs: Mapping[int, Tensor]
    gradients: Mapping[str, Tensor]


def bridge_config(
    model: Path | str, layout: Layout | None = None, *, optimizer: OptimizerConfig | None = None, **bridge: Any
) -> RuntimeConfig:
    options = BridgeConfig(
        device="cpu",
        parallel=ParallelConfig(**(layout or {})),
        optimizer=optimizer or OptimizerConfig(lr=1e-3),
        **bridge,
    )
    return RuntimeConfig(backend="bridge", hf_path=str(model), backend_cfg=options)


@contextmanager
def open_bridge_runtime(model: Path | str, layout: Layout | None = None, **settings: Any) -> Iterator[BridgeRuntime]:
    runtime = BridgeRuntime(bridge_config(model, layout, **settings))
    try:
        yield runtime
    finally:
        runtime.close()


def bridge_data(runtime: BridgeRuntime, seed: int = 0) -> list[PackedBatch]:
    """This data-parallel rank's micro-batches of one fixed batch."""
    groups = runtime.groups
    return micro_batches(deal(SPLIT, groups.dp_size)[groups.dp_rank], dp_size=groups.dp_size, seed=seed)


def train_job(model: str, layout: dict[str, int], steps: int, settings: dict[str, Any]) -> Run:
    """Trains ``steps`` steps on new data each; this rank's part of the run."""
    losses, norms = [], []
    with open_bridge_runtime(model, layout, **settings) as runtime:
        handle = runtime.build_model()
        source = runtime.is_mp_src_rank_with_outputs(handle)
        for step in range(steps):
            runtime.zero_grad(handle)
            result = runtime.forward_backward(handle, bridge_data(runtime, step), token_loss)
            ok, norm, _ = runtime.optimizer_step(handle)
            assert ok
            runtime.lr_scheduler_step(handle)
            losses.append(result.loss / runtime.groups.dp_size if source else 0.0)
            norms.append(norm)
        outputs = runtime.forward_backward(handle, bridge_data(runtime), None, forward_only=True)
        indices = [index for part in deal(SPLIT, runtime.groups.dp_size)[runtime.groups.dp_rank] for index in part]
        log_probs = dict(zip(indices, outputs.output("log_probs"), strict=True)) if source else {}
        runtime.zero_grad(handle)
        runtime.forward_backward(handle, bridge_data(runtime), token_loss)
        gradients = {name: tensor.clone() for name, tensor in runtime.export_gradients(handle)}
        rank = dist.get_rank()
    return Run(
        torch.tensor(losses, dtype=torch.float64),
        torch.tensor(norms, dtype=torch.float64),
        log_probs,
        gradients if rank == 0 else {},
    )


def whole(parts: Sequence[Run]) -> Run:
    """The run of all ranks."""
    log_probs = {index: tensor for part in parts for index, tensor in part.log_probs.items()}
    losses = torch.stack([part.losses for part in parts]).sum(0)
    return Run(losses, parts[0].norms, log_probs, parts[0].gradients)
