"""The bridge runtime: every atom on Megatron-Core."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
    Head,
    LossFn,
    OptimizerConfig,
    PackedBatch,
    RuntimeConfig,
    StepResult,
    TensorInfo,
)
from rl_backend.parallel.groups import training_device
from rl_backend.runtime.base import RankPlace
from rl_backend.runtime.batch_checks import check_micro_batches
from rl_backend.runtime.bridge import export, gradients
from rl_backend.runtime.bridge.activations import record_activations
from rl_backend.runtime.bridge.build import build_handle
from rl_backend.runtime.bridge.checkpoints import all_tensors, load_training_checkpoint, training_manifest
from rl_backend.runtime.bridge.forward_backward import require_micro_batches, run_micro_batches
from rl_backend.runtime.bridge.gradients import held_gradients
from rl_backend.runtime.bridge.groups import close_groups, open_groups
from rl_backend.runtime.bridge.handle import BridgeHandle
from rl_backend.runtime.bridge.installed import quiet
from rl_backend.runtime.bridge.megatron_cpu import iterate_on_cpu, on_cpu
from rl_backend.runtime.bridge.optimizer_state import part_tensors
from rl_backend.runtime.bridge.routes import require_replayable
from rl_backend.runtime.handle_config import handle_config
from rl_backend.runtime.held import HeldRuntime
from rl_backend.runtime.placement import move_parts
from rl_backend.runtime.router_replay import RouterReplay


def _with_megatron[**P, R](
    atom: Callable[Concatenate[BridgeRuntime, P], R],
) -> Callable[Concatenate[BridgeRuntime, P], R]:
    """Runs an atom where Megatron finds its device."""

    @wraps(atom)
    def run(self: BridgeRuntime, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with on_cpu(self.groups.device):
            return atom(self, *args, **kwargs)

    return run


class BridgeRuntime(HeldRuntime[BridgeHandle]):
    """Megatron-Core's data, tensor, expert and pipeline parallelism, with models and weights by Megatron-Bridge.

    Building one seeds torch's generators of this process with ``seed + data-parallel rank`` and Megatron's, which differ by
    tensor- and expert-parallel rank, with ``seed``. A process has one layout: a second runtime must have the same.

    Raises:
        ConfigError: the world size, the device or the environment does not fit ``config``.
    """

    def __init__(self, config: RuntimeConfig) -> None:
        super().__init__(config)
        assert isinstance(config.backend_cfg, BridgeConfig), "RuntimeConfig resolves backend_cfg by backend"
        self.bridge = config.backend_cfg
        self.groups = open_groups(self.bridge.parallel, training_device(self.bridge.device))
        self._open_writer(self.groups.host_group)
        try:
            with on_cpu(self.groups.device):
                model_parallel_cuda_manual_seed(config.seed, force_reset_rng=True)
            torch.manual_seed(config.seed + self.groups.dp_rank)
        except BaseException:
            close_groups(self.groups)
            raise

    @property
    def place(self) -> RankPlace:
        groups = self.groups
        return RankPlace(groups.device, groups.dp_rank, groups.dp_size, groups.dp_group, is_source=groups.has_outputs)

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
        name = self._name_model(name)
        with quiet():
            handle = build_handle(self, config, self.groups, forward_only=forward_only, name=name, head=head)
        self._handles.append(handle)
        return handle

    @_with_megatron
    def zero_grad(self, handle: BridgeHandle) -> None:
        self._use(handle)
        optimizer = handle.trainer("zero_grad")
        handle.placement.clear("grad")
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
        forward-only passes; backward passes and steps are refused until ``zero_grad``. An error of one rank alone (in a
        loss, say) leaves the others in a collective until that times out; a ``TrainGroup`` stops them at once.
        """
        self._use(handle)
        require_replayable(handle, router_replay)
        if forward_only:
            handle.placement.require("forward_backward", "model")
        else:
            handle.trainer("forward_backward with a backward pass")
            handle.placement.require("forward_backward", "model", "grad")
            self._require_whole_gradients(handle, "forward_backward")
            if loss_fn is None:
                raise BatchError("forward_backward without loss_fn; pass one, or forward_only=True")
        self._check(handle, data, router_replay, forward_only=forward_only)
        if forward_only:
            with torch.no_grad():
                return run_micro_batches(handle, data, loss_fn, forward_only=True, router_replay=router_replay)
        try:
            with held_gradients(handle.chunks, has_gradients=handle.has_gradients):
                result = run_micro_batches(handle, data, loss_fn, forward_only=False, router_replay=router_replay)
        except BaseException:
            handle.broken = "forward_backward raised an error in the middle, so its gradients are incomplete"
            raise
        handle.has_gradients = True
        return result

    @_with_megatron
    def optimizer_step(self, handle: BridgeHandle) -> StepResult:
        self._use(handle)
        optimizer = handle.trainer("optimizer_step")
        handle.placement.require("optimizer_step", "model", "optimizer", "grad")
        self._require_whole_gradients(handle, "optimizer_step")
        result = optimizer.step(handle.name, has_gradients=handle.has_gradients)
        if result.ok:
            handle.weight_version += 1
        return result

    @_with_megatron
    def lr_scheduler_step(self, handle: BridgeHandle) -> float:
        self._use(handle)
        return handle.trainer("lr_scheduler_step").schedule_step()

    @_with_megatron
    def to(
        self,
        handle: BridgeHandle,
        device: Literal["cpu", "device"],
        *,
        model: bool = True,
        optimizer: bool = True,
        grad: bool = True,
    ) -> None:
        """See the base class. A part that a handle does not have (a forward-only one has a model only) is nothing to move.

        In float32 the optimizer's masters are the parameters, so they move with the model. On a CPU runtime the same
        bookkeeping and copies happen, without saving memory.

        Raises:
            HandleError: ``device`` is neither ``cpu`` nor ``device``.
        """
        self._use(handle, damaged_too=True)
        move_parts(handle.placement, part_tensors(handle), device, model=model, optimizer=optimizer, grad=grad)

    def weight_infos(self, handle: BridgeHandle, *, dtype: torch.dtype | None = None) -> tuple[TensorInfo, ...]:
        self._use(handle)
        return export.describe_weights(handle, dtype)

    def export_weights(
        self,
        handle: BridgeHandle,
        *,
        dtype: torch.dtype | None = None,
        byte_budget: int | None = None,
        names: Collection[str] | None = None,
    ) -> Iterator[tuple[str, Tensor]]:
        """See the base class; tensors are on the training device, by default in ``param_dtype``.

        What Megatron keeps as one parameter (query, key and value; gate and up) is gathered as one, and so counts as one
        in the budget. The result is a generator: ``close()`` ends it early.
        """
        self._use(handle)
        handle.placement.require("export_weights", "model")
        with on_cpu(self.groups.device):
            stream = export.export_weights(handle, dtype=dtype, byte_budget=byte_budget, only=names)
        return iterate_on_cpu(self.groups.device, stream)

    def export_gradients(
        self, handle: BridgeHandle, *, names: Collection[str] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """See the base class; tensors are on the training device. A weight that no loss reached has a gradient of zeros."""
        self._use(handle)
        handle.trainer("export_gradients")
        handle.placement.require("export_gradients", "grad")
        self._require_whole_gradients(handle, "export_gradients")
        with on_cpu(self.groups.device):
            stream = gradients.export_gradients(handle, only=names)
        return iterate_on_cpu(self.groups.device, stream)

    @_with_megatron
    def activations(self, handle: BridgeHandle, data: Sequence[PackedBatch]) -> list[Mapping[str, Tensor]]:
        """See the base class. With Transformer Engine some norms are a part of the projection behind them, and missing."""
        self._use(handle)
        handle.placement.require("activations", "model")
        self._check(handle, data, "off", forward_only=True)
        with self.eval_mode(handle), torch.no_grad():
            return record_activations(handle, data)

    @_with_megatron
    def save_checkpoint(
        self,
        handle: BridgeHandle,
        path: Path | str,
        *,
        hf: bool = False,
        asynchronous: bool = False,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """See the base class. ``hf`` writes ``param_dtype``; with ``asynchronous`` it is refused."""
        self._use(handle)
        handle.placement.require("save_checkpoint", "model", *(() if hf else ("optimizer",)))
        if hf:
            self._writer.save_hf(
                handle,
                Path(path),
                export.describe_weights(handle, None),
                lambda: export.export_weights(handle, dtype=None, byte_budget=None, only=None),
                source=handle.config.hf_path,
                hf_config=handle.hf_config,
                asynchronous=asynchronous,
                extra=extra,
            )
            return
        handle.trainer("save_checkpoint of training state")
        self._writer.save_training_state(
            handle,
            Path(path),
            lambda: (all_tensors(handle), training_manifest(handle)),
            asynchronous=asynchronous,
            extra=extra,
        )

    @_with_megatron
    def load_checkpoint(self, handle: BridgeHandle, path: Path | str) -> dict[str, Any]:
        """See the base class. The layout and the world size may differ from those that saved.

        Random state is that of :func:`~rl_backend.runtime.random_sources.source_rank`; where there is none it stays.
        """
        self._use(handle, damaged_too=True)
        handle.placement.require("load_checkpoint", "model", *(() if handle.forward_only else ("optimizer",)))
        self._writer.wait()
        manifest = load_training_checkpoint(handle, Path(path))
        if not handle.forward_only:
            self.zero_grad(handle)
        return manifest.extra

    def is_mp_src_rank_with_outputs(self, handle: BridgeHandle) -> bool:
        self._use(handle)
        return self.groups.has_outputs

    def _close_groups(self) -> None:
        close_groups(self.groups)

    def _check(
        self, handle: BridgeHandle, data: Sequence[PackedBatch], router_replay: RouterReplay, *, forward_only: bool
    ) -> None:
        check_micro_batches(
            data,
            self.groups.all_ranks,
            self.groups.device,
            max_tokens=self.config.max_tokens_per_micro_batch,
            vocab_size=handle.vocab_size,
            max_length=handle.max_length,
            forward_only=forward_only,
            router_replay=router_replay,
            routers=handle.routed_layers,
            replica=self.groups.pg.mp,
        )
        # Afterwards, because by then all ranks have the same number, so that none raises alone.
        require_micro_batches(handle, len(data))
