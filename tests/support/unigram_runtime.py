"""A third party's runtime, registered from outside the package: a unigram language model trained by plain SGD.

``log_probs[t]`` is ``log_softmax(weight)[input_ids[t + 1]]``. Gradients are averaged over all ranks with gloo.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from rl_backend.contracts import (
    BackendConfig,
    BatchError,
    ForwardResult,
    HandleError,
    Head,
    LossFn,
    Metric,
    ModelOutput,
    OptimizerConfig,
    PackedBatch,
    RuntimeConfig,
    StepResult,
    TensorInfo,
    UnsupportedError,
    merge_metrics,
)
from rl_backend.runtime import RouterReplay, Runtime, register_runtime
from tests.support.plain_handle import PlainHandle


class UnigramConfig(BackendConfig):
    """Its own options, typed.

    Attributes:
        vocab_size: entries of the weight.
    """

    vocab_size: int = 16


@dataclass(eq=False)
class UnigramHandle(PlainHandle):
    weight: Tensor | None = None


class UnigramRuntime(Runtime[UnigramHandle]):
    """Every atom, in the fewest lines that are right."""

    def __init__(self, config: RuntimeConfig) -> None:
        super().__init__(config)
        if "RANK" in os.environ:
            dist.init_process_group("gloo")
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1

    def _weight(self, handle: UnigramHandle) -> Tensor:
        assert handle.weight is not None
        return handle.weight

    def build_model(
        self,
        *,
        forward_only: bool = False,
        name: str = "",
        head: Head = "log_probs",
        hf_path: Path | str | None = None,
        optimizer: OptimizerConfig | None = None,
    ) -> UnigramHandle:
        if head != "log_probs" or hf_path is not None or optimizer is not None:
            raise UnsupportedError("a unigram model has log-probs, no directory and the configuration's optimizer")
        options = self.config.backend_cfg
        assert isinstance(options, UnigramConfig)
        weight = torch.linspace(-1.0, 1.0, options.vocab_size).requires_grad_(not forward_only)
        return UnigramHandle(name or "unigram", forward_only, 0, self.rank, self.world_size, weight=weight)

    def train_mode(self, handle: UnigramHandle) -> AbstractContextManager[None]:
        return nullcontext()

    def eval_mode(self, handle: UnigramHandle) -> AbstractContextManager[None]:
        return nullcontext()

    def zero_grad(self, handle: UnigramHandle) -> None:
        self._weight(handle).grad = None

    def forward_backward(
        self,
        handle: UnigramHandle,
        data: Sequence[PackedBatch],
        loss_fn: LossFn | None,
        *,
        forward_only: bool = False,
        router_replay: RouterReplay = "off",
    ) -> ForwardResult:
        if router_replay != "off":
            raise BatchError(f"router_replay={router_replay!r}: a unigram model has no routers; use 'off'")
        losses: list[float] = []
        metrics: list[dict[str, Metric]] = []
        outputs: list[Tensor] = []
        weight = self._weight(handle)
        for batch in data:
            scores = torch.log_softmax(weight, 0)
            log_probs = torch.where(batch.labels >= 0, scores[batch.labels.clamp(min=0)], 0.0)
            outputs.extend(batch.split(log_probs.detach()))
            if loss_fn is None:
                continue
            loss, found = loss_fn(ModelOutput(log_probs=log_probs), batch, None)
            assert loss is not None
            if not forward_only:
                loss.backward()
            losses.append(float(loss.detach()))
            metrics.append({key: value for key, value in found.items() if isinstance(value, Metric)})
        if not forward_only and weight.grad is not None and self.world_size > 1:
            dist.all_reduce(weight.grad)
            weight.grad /= self.world_size
        return ForwardResult(tuple(losses), merge_metrics(metrics), {"log_probs": outputs})

    def optimizer_step(self, handle: UnigramHandle) -> StepResult:
        weight = self._weight(handle)
        if handle.forward_only or weight.grad is None:
            raise HandleError("nothing to step")
        with torch.no_grad():
            weight -= self.config.backend_cfg.optimizer.lr * weight.grad
        handle.weight_version += 1
        return StepResult(True, float(weight.grad.norm()), None)

    def lr_scheduler_step(self, handle: UnigramHandle) -> float:
        return self.config.backend_cfg.optimizer.lr

    def to(
        self,
        handle: UnigramHandle,
        device: Literal["cpu", "device"],
        *,
        model: bool = True,
        optimizer: bool = True,
        grad: bool = True,
    ) -> None:
        return None

    def weight_infos(self, handle: UnigramHandle, *, dtype: torch.dtype | None = None) -> tuple[TensorInfo, ...]:
        weight = self._weight(handle)
        return (TensorInfo(name="weight", shape=tuple(weight.shape), dtype="float32", nbytes=weight.nbytes),)

    def export_weights(
        self,
        handle: UnigramHandle,
        *,
        dtype: torch.dtype | None = None,
        byte_budget: int | None = None,
        names: Collection[str] | None = None,
    ) -> Iterator[tuple[str, Tensor]]:
        yield "weight", self._weight(handle).detach()

    def save_checkpoint(
        self,
        handle: UnigramHandle,
        path: Path | str,
        *,
        hf: bool = False,
        asynchronous: bool = False,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        if self.rank == 0:
            torch.save((self._weight(handle).detach(), handle.weight_version, dict(extra or {})), path)

    def wait_for_checkpoint(self, handle: UnigramHandle) -> None:
        return None

    def checkpoint_is_pending(self, handle: UnigramHandle) -> bool:
        return False

    def load_checkpoint(self, handle: UnigramHandle, path: Path | str) -> dict[str, Any]:
        weight, handle.weight_version, extra = torch.load(path)
        with torch.no_grad():
            self._weight(handle).copy_(weight)
        return dict(extra)

    def is_mp_src_rank_with_outputs(self, handle: UnigramHandle) -> bool:
        return True

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


register_runtime("unigram", UnigramConfig, UnigramRuntime)
