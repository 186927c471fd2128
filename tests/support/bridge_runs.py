"""Training runs of the bridge runtime, as jobs for the ranks of a pool."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl_backend.contracts import ModelOutput, OptimizerConfig, PackedBatch, RuntimeConfig
from rl_backend.runtime.bridge.config import BridgeConfig
from rl_backend.runtime.bridge.engine.engine import BridgeRuntime, bridge_runtime
from rl_backend.runtime.bridge.engine.handle import BridgeHandle
from tests.support.native import LENGTHS, assert_near, micro_batches, token_loss


@dataclass
class Run:
    """What one training run gave on this rank.

    Attributes:
        losses: of each step, averaged over the data-parallel ranks; last stage only.
        norms: gradient norm of each step.
        log_probs: sequence -> its log-probs in the first step; source ranks only.
        gradients: Hugging Face name -> gradient of the first step; rank 0 only.
        weights: Hugging Face name -> weight after the last step; rank 0 only.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    log_probs: dict[int, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)


def bridge_config(
    model: Path | str,
    parallel: Mapping[str, int] | None = None,
    *,
    optimizer: OptimizerConfig | None = None,
    **options: Any,
) -> RuntimeConfig:
    backend_cfg = BridgeConfig(
        device="cpu", parallel=dict(parallel or {}), optimizer=optimizer or OptimizerConfig(lr=1e-3), **options
    )
    return RuntimeConfig(backend="bridge", hf_path=str(model), backend_cfg=backend_cfg)


@contextmanager
def open_bridge(model: Path | str, parallel: Mapping[str, int] | None = None, **settings: Any) -> Iterator[BridgeRuntime]:
    runtime = bridge_runtime(bridge_config(model, parallel, **settings))
    try:
        yield runtime
    finally:
        runtime.close()


def share(handle: BridgeHandle) -> list[list[int]]:
    """Sequences of this rank's micro-batches: four of them, or two where there are four data-parallel ranks."""
    mine = list(range(len(LENGTHS)))[handle.data_parallel_rank :: handle.data_parallel_size]
    size = max(1, len(mine) // 4)
    return [mine[start : start + size] for start in range(0, len(mine), size)]


def train_job(model: str, parallel: Mapping[str, int], steps: int, settings: Mapping[str, Any]) -> Run:
    """Trains on the sequences of :mod:`tests.support.native`."""
    run = Run()
    with open_bridge(model, parallel, **settings) as runtime:
        handle = runtime.build_model()
        split = share(handle)
        for step in range(steps):
            runtime.zero_grad(handle)
            data = micro_batches(split, dp_size=handle.data_parallel_size, seed=step)
            result = runtime.forward_backward(handle, data, token_loss)
            if step == 0:
                indices = [index for micro_batch in split for index in micro_batch]
                if result.outputs:
                    run.log_probs = dict(zip(indices, result.output("log_probs"), strict=True))
                gradients = {name: value.clone() for name, value in runtime.export_gradients(handle)}
                run.gradients = gradients if dist.get_rank() == 0 else {}
            ok, norm, _ = runtime.optimizer_step(handle)
            assert ok
            runtime.lr_scheduler_step(handle)
            run.norms.append(norm)
            stages = handle.groups.pg.pp
            if stages.rank() == stages.size() - 1:
                loss = torch.tensor(result.loss / handle.data_parallel_size, dtype=torch.float64)
                dist.all_reduce(loss, group=handle.groups.dp_group)
                run.losses.append(loss.item())
        weights = {name: value.clone() for name, value in runtime.export_weights(handle)}
        run.weights = weights if dist.get_rank() == 0 else {}
    return run


def whole(runs: Sequence[Run]) -> Run:
    """What the ranks know together."""
    source = next(run for run in runs if run.losses)
    log_probs = {index: value for run in runs for index, value in run.log_probs.items()}
    return Run(source.losses, source.norms, log_probs, runs[0].gradients, runs[0].weights)


def assert_same(run: Run, expected: Run) -> None:
    """What all ranks know together is what one rank computes."""
    torch.testing.assert_close(run.losses, expected.losses, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(run.norms, expected.norms, rtol=1e-5, atol=0.0)
    assert run.log_probs.keys() == set(range(len(LENGTHS)))
    for index, log_probs in run.log_probs.items():
        torch.testing.assert_close(log_probs, expected.log_probs[index], rtol=1e-5, atol=1e-5)
    assert_near(run.gradients, expected.gradients)
    assert_near(run.weights, expected.weights)


def poisoned_loss(model_output: ModelOutput, data: PackedBatch, dp_group: Any = None) -> Any:
    """The loss with gradients that are not finite."""
    loss, metrics = token_loss(model_output, data, dp_group)
    return loss * float("nan"), metrics


def state(handle: BridgeHandle) -> dict[str, Tensor]:
    """Copies of all that a step may change on this rank: parameters, masters, moments and step counts."""
    assert handle.optimizer is not None
    megatron = handle.optimizer.megatron
    tensors: dict[str, Any] = {
        f"{index}.{name}": value for index, chunk in enumerate(handle.chunks) for name, value in chunk.named_parameters()
    }
    for part, optimizer in enumerate(getattr(megatron, "chained_optimizers", [megatron])):
        for group, settings in enumerate(optimizer.optimizer.param_groups):
            tensors[f"optimizer.{part}.{group}.step"] = settings.get("step", -1)
            for index, parameter in enumerate(settings["params"]):
                tensors[f"optimizer.{part}.{group}.{index}"] = parameter
                for name, value in optimizer.optimizer.state.get(parameter, {}).items():
                    tensors[f"optimizer.{part}.{group}.{index}.{name}"] = value
    return {name: torch.as_tensor(value).detach().clone() for name, value in tensors.items()}
