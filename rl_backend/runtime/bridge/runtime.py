"""The bridge runtime: every atom on Megatron-Core."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, Literal

import torch
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch import Tensor

from rl_backend.contracts import (
    BatchError,
    BridgeConfig,
    ForwardResult,
    HandleError,
    Head,
    LossFn,
    OptimizerConfig,
    PackedBatch,
    RuntimeConfig,
    StepResult,
    TensorInfo,
)
from rl_backend.parallel.groups import training_device
from rl_backend.runtime.base import RouterReplay, Runtime
from rl_backend.runtime.batch_checks import check_micro_batches
from rl_backend.runtime.bridge.build import build_handle
from rl_backend.runtime.bridge.forward_backward import require_micro_batches, require_no_replay, run_micro_batches
from rl_backend.runtime.bridge.groups import close_groups, open_groups
from rl_backend.runtime.bridge.handle import BridgeHandle
from rl_backend.runtime.bridge.megatron_cpu import iterate_on_cpu, on_cpu
from rl_backend.runtime.handle_config import handle_config


def _with_megatron[**P, R](
    atom: Callable[Concatenate[BridgeRuntime, P], R],
) -> Callable[Concatenate[BridgeRuntime, P], R]:
    """Runs an atom where Megatron finds its device."""

    @wraps(atom)
    def run(self: BridgeRuntime, *args: P.args, **kwargs: P.kwargs) -> R:
        with on_cpu(self.groups.device):
            return atom(self, *args, **kwargs)

    return run


class BridgeRuntime(Runtime[BridgeHandle]):
    """Megatron-Core's data, tensor, expert and pipeline parallelism, with models and weights by Megatron-Bridge.

    Building one seeds torch's generators of this process and Megatron's with ``seed``. A process has one layout: a second
    runtime must have the same.

    Raises:
        ConfigError: the world size, the device or the environment does not fit ``config``.
    """

    def __init__(self, config: RuntimeConfig) -> None:
        super().__init__(config)
        assert isinstance(config.backend_cfg, BridgeConfig), "RuntimeConfig resolves backend_cfg by backend"
        self.bridge = config.backend_cfg
        self.groups = open_groups(self.bridge.parallel, training_device(self.bridge.device))
        self._handles: list[BridgeHandle] = []
        self._num_built = 0
        self._closed = False
        with on_cpu(self.groups.device):
            torch.manual_seed(config.seed + self.groups.dp_rank)
            model_parallel_cuda_manual_seed(config.seed)

    @_with_megatron
    def build_model(
        self,
        *,
        forward_only: bool = False,
        name: str = "",
        head: Head = "log_probs",
        hf_path: Path | str | None = None,
        optimizer: OptimizerConfig | None = None,
    ) -> BridgeHandle:
        self._require_open()
        config = handle_config(self.config, hf_path, optimizer, head, forward_only=forward_only)
        self._num_built += 1
        name = name or f"model-{self._num_built}"
        handle = build_handle(self, config, self.groups, forward_only=forward_only, name=name, head=head)
        self._handles.append(handle)
        return handle

    @contextmanager
    def train_mode(self, handle: BridgeHandle) -> Generator[None]:
        self._use(handle)
        handle.trainer("train_mode")
        with _mode(handle, True):
            yield

    @contextmanager
    def eval_mode(self, handle: BridgeHandle) -> Generator[None]:
        self._use(handle)
        with _mode(handle, False):
            yield

    @_with_megatron
    def zero_grad(self, handle: BridgeHandle) -> None:
        self._use(handle)
        optimizer = handle.trainer("zero_grad")
        for chunk in handle.chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        handle.has_gradients = False
        handle.broken = ""

    @_with_megatron
    def forward_backward(
        self,
        handle: BridgeHandle,
        data: Sequence[PackedBatch],
        loss_fn: LossFn | None,
        *,
        forward_only: bool = False,
        router_replay: RouterReplay = "off",
    ) -> ForwardResult:
        """See the base class. Every rank of a model replica is given the same ``data``.

        Losses and metrics are on the ranks of the last pipeline stage. After an error in the middle the handle takes
        forward-only passes; backward passes and steps are refused until ``zero_grad``.
        """
        self._use(handle)
        require_no_replay(handle, router_replay)
        if not forward_only:
            handle.trainer("forward_backward with a backward pass")
            self._require_whole_gradients(handle, "forward_backward")
            if loss_fn is None:
                raise BatchError("forward_backward without loss_fn; pass one, or forward_only=True")
        self._check(handle, data, forward_only=forward_only)
        if forward_only:
            with torch.no_grad():
                return run_micro_batches(handle, data, loss_fn, forward_only=True)
        try:
            result = run_micro_batches(handle, data, loss_fn, forward_only=False)
        except BaseException:
            handle.broken = "forward_backward raised an error in the middle, so its gradients are incomplete"
            raise
        handle.has_gradients = True
        return result

    @_with_megatron
    def optimizer_step(self, handle: BridgeHandle) -> StepResult:
        self._use(handle)
        optimizer = handle.trainer("optimizer_step")
        self._require_whole_gradients(handle, "optimizer_step")
        result = optimizer.step(handle.name, has_gradients=handle.has_gradients)
        if result.ok:
            handle.weight_version += 1
        return result

    @_with_megatron
    def lr_scheduler_step(self, handle: BridgeHandle) -> float:
        self._use(handle)
        return handle.trainer("lr_scheduler_step").schedule_step()

    def is_mp_src_rank_with_outputs(self, handle: BridgeHandle) -> bool:
        self._use(handle)
        return self.groups.has_outputs

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for handle in self._handles:
            handle.release()
        self._handles.clear()
        close_groups(self.groups)

    def _check(self, handle: BridgeHandle, data: Sequence[PackedBatch], *, forward_only: bool) -> None:
        require_micro_batches(handle, len(data))
        check_micro_batches(
            data,
            self.groups.all_ranks,
            self.groups.device,
            max_tokens=self.config.max_tokens_per_micro_batch,
            vocab_size=handle.vocab_size,
            max_length=handle.max_length,
            forward_only=forward_only,
        )

    def _use(self, handle: BridgeHandle, *, damaged_too: bool = False) -> None:
        self._require_open()
        if not isinstance(handle, BridgeHandle) or handle.owner is not self:
            raise HandleError(
                f"handle {getattr(handle, 'name', handle)!r} is closed or belongs to another runtime; use the runtime that "
                "built it"
            )
        if handle.damaged and not damaged_too:
            raise HandleError(f"{handle.name!r} has no usable weights: {handle.damaged}; load a complete checkpoint")

    def _require_open(self) -> None:
        if self._closed:
            raise HandleError("this runtime is closed; create another one")

    def _require_whole_gradients(self, handle: BridgeHandle, operation: str) -> None:
        if handle.broken:
            raise HandleError(f"{operation} on {handle.name!r}: {handle.broken}; call zero_grad first", handle=handle.name)


@contextmanager
def _mode(handle: BridgeHandle, training: bool) -> Generator[None]:
    before = [(module, module.training) for chunk in handle.chunks for module in chunk.modules()]
    for chunk in handle.chunks:
        chunk.train(training)
    try:
        yield
    finally:
        for module, was_training in before:
            module.training = was_training
