"""The native runtime: every atom, on one or several ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from rl_backend.contracts import (
    BatchError,
    ForwardResult,
    Head,
    LossFn,
    NativeConfig,
    OptimizerConfig,
    PackedBatch,
    RuntimeConfig,
    StepResult,
    TensorInfo,
    WeightShard,
)
from rl_backend.parallel.groups import close_groups, open_groups, training_device
from rl_backend.runtime.base import RankPlace
from rl_backend.runtime.batch_checks import check_micro_batches, problem_on_rank
from rl_backend.runtime.handle_config import handle_config
from rl_backend.runtime.held import HeldRuntime
from rl_backend.runtime.native import export, fsdp_state
from rl_backend.runtime.native.activations import record_activations
from rl_backend.runtime.native.build import build_handle
from rl_backend.runtime.native.checkpoints import all_tensors, load_training_checkpoint, training_manifest
from rl_backend.runtime.native.forward_backward import run_micro_batches
from rl_backend.runtime.native.handle import NativeHandle
from rl_backend.runtime.native.pipeline import require_schedulable, run_pipeline
from rl_backend.runtime.native.stages import has_last_stage
from rl_backend.runtime.native.validated_pass import run_validated
from rl_backend.runtime.placement import move_parts
from rl_backend.runtime.router_replay import RouterReplay, require_routers


class NativeRuntime(HeldRuntime[NativeHandle]):
    """PyTorch alone: tensor, context, expert and pipeline parallelism, FSDP2 over the rest; gloo on a CPU, NCCL on CUDA.

    Building one seeds torch's generators of this process with ``seed + data-parallel rank``. Equal seeds, data and layout
    give equal results on a CPU; on CUDA call ``torch.use_deterministic_algorithms(True)`` as well.

    Raises:
        ConfigError: the world size, the device or the environment does not fit ``config``.
    """

    def __init__(self, config: RuntimeConfig) -> None:
        super().__init__(config)
        assert isinstance(config.backend_cfg, NativeConfig), "RuntimeConfig resolves backend_cfg by backend"
        self.native = config.backend_cfg
        device = training_device(self.native.device)
        self.groups = open_groups(self.native.parallel, device, post_validation=self.native.post_validation)
        self._open_writer(self.groups.host_group)
        torch.manual_seed(config.seed + self.groups.dp_rank)

    @property
    def place(self) -> RankPlace:
        groups = self.groups
        is_source = groups.token_group.rank() == 0 and has_last_stage(self.native, groups.pp_group.rank())
        return RankPlace(groups.device, groups.dp_rank, groups.dp_size, groups.dp_group, is_source)

    def build_model(
        self,
        *,
        forward_only: bool = False,
        name: str = "",
        head: Head = "log_probs",
        hf_path: Path | str | None = None,
        optimizer: OptimizerConfig | None = None,
    ) -> NativeHandle:
        self._require_open()
        config = handle_config(self.config, hf_path, optimizer, head, forward_only=forward_only)
        name = self._name_model(name)
        handle = build_handle(self, config, self.groups, forward_only=forward_only, name=name, head=head)
        self._handles.append(handle)
        return handle

    def zero_grad(self, handle: NativeHandle) -> None:
        self._use(handle)
        handle.trainer("zero_grad")
        for parameter in handle.parameters.values():
            parameter.grad = None
        fsdp_state.drop_unreduced_gradients(handle.model)
        handle.placement.forget("grad")
        handle.broken = ""

    def forward_backward(
        self,
        handle: NativeHandle,
        data: Sequence[PackedBatch],
        loss_fn: LossFn | None,
        *,
        forward_only: bool = False,
        router_replay: RouterReplay = "off",
    ) -> ForwardResult:
        """See the base class. Outputs are on the training device.

        After an error in the middle (in the loss, out of memory) the handle takes forward-only passes; backward passes and
        steps are refused until ``zero_grad``, because its gradients are incomplete.
        """
        self._use(handle)
        require_routers(router_replay, handle.routed_layers, handle.name)
        if forward_only:
            handle.placement.require("forward_backward", "model")
        else:
            handle.trainer("forward_backward with a backward pass")
            handle.placement.require("forward_backward", "model", "grad")
            self._require_whole_gradients(handle, "forward_backward")
            if loss_fn is None:
                raise BatchError("forward_backward without loss_fn; pass one, or forward_only=True")
        run: Callable[..., ForwardResult] = run_pipeline if handle.stages else run_micro_batches
        if self.native.post_validation:
            run = partial(run_validated, problem=self._problem(handle, data, router_replay, forward_only=forward_only))
        else:
            self._check(handle, data, router_replay, forward_only=forward_only)
        return run(
            handle,
            data,
            loss_fn,
            forward_only=forward_only,
            keep_gathered=not self.native.reshard_after_forward,
            router_replay=router_replay,
        )

    def optimizer_step(self, handle: NativeHandle) -> StepResult:
        """See the base class. A skipped step is logged as a warning that names parameters with non-finite gradients."""
        self._use(handle)
        optimizer = handle.trainer("optimizer_step")
        handle.placement.require("optimizer_step", "model", "optimizer", "grad")
        self._require_whole_gradients(handle, "optimizer_step")
        if self.groups.validation is not None:
            return handle.start_step(self.groups.validation.world)
        result = optimizer.step(handle.name)
        if result.ok:
            handle.weight_version += 1
        return result

    def lr_scheduler_step(self, handle: NativeHandle) -> float:
        self._use(handle)
        return handle.trainer("lr_scheduler_step").schedule_step()

    def to(
        self,
        handle: NativeHandle,
        device: Literal["cpu", "device"],
        *,
        model: bool = True,
        optimizer: bool = True,
        grad: bool = True,
    ) -> None:
        """See the base class. A part that a handle does not have (a forward-only one has a model only) is nothing to move.

        On a CPU runtime the same bookkeeping and copies happen, without saving memory. Host buffers of a CUDA runtime are
        pinned and kept for the next trip.

        Raises:
            HandleError: ``device`` is neither ``cpu`` nor ``device``.
        """
        self._use(handle, damaged_too=True)
        handle.settle()
        move_parts(handle.placement, handle.part_tensors(), device, model=model, optimizer=optimizer, grad=grad)

    def weight_infos(self, handle: NativeHandle, *, dtype: torch.dtype | None = None) -> tuple[TensorInfo, ...]:
        self._use(handle)
        return export.describe_weights(handle, dtype)

    def export_weights(
        self,
        handle: NativeHandle,
        *,
        dtype: torch.dtype | None = None,
        byte_budget: int | None = None,
        names: Collection[str] | None = None,
    ) -> Iterator[tuple[str, Tensor]]:
        """See the base class; tensors are on the training device. The result is a generator: ``close()`` ends it early."""
        self._use(handle)
        handle.settle_everywhere()
        handle.placement.require("export_weights", "model")
        return export.export_weights(handle, dtype=dtype, byte_budget=byte_budget, only=names)

    def export_shards(self, handle: NativeHandle, *, dtype: torch.dtype | None = None) -> Iterator[WeightShard]:
        """See the base class; what this rank holds, as far as no earlier rank holds the same."""
        self._use(handle)
        handle.settle_everywhere()
        handle.placement.require("export_shards", "model")
        return export.export_shards(handle, dtype)

    def export_gradients(
        self, handle: NativeHandle, *, names: Collection[str] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """See the base class; tensors are on the training device."""
        self._use(handle)
        handle.settle_everywhere()
        handle.trainer("export_gradients")
        handle.placement.require("export_gradients", "grad")
        self._require_whole_gradients(handle, "export_gradients")
        return export.export_gradients(handle, only=names)

    def activations(self, handle: NativeHandle, data: Sequence[PackedBatch]) -> list[Mapping[str, Tensor]]:
        self._use(handle)
        handle.settle_everywhere()
        handle.placement.require("activations", "model")
        self._check(handle, data, "off", forward_only=True)
        with self.eval_mode(handle):
            return record_activations(handle, data)

    def save_checkpoint(
        self,
        handle: NativeHandle,
        path: Path | str,
        *,
        hf: bool = False,
        asynchronous: bool = False,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """See the base class. ``hf`` with ``asynchronous`` is refused."""
        self._use(handle)
        handle.settle_everywhere()
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

    def load_checkpoint(self, handle: NativeHandle, path: Path | str) -> dict[str, Any]:
        """See the base class. The world size may differ from the one that saved.

        Random state is that of :func:`~rl_backend.runtime.random_sources.source_rank`; where there is none it stays.
        """
        self._use(handle, damaged_too=True)
        handle.settle_everywhere()
        handle.placement.require("load_checkpoint", "model", *(() if handle.forward_only else ("optimizer",)))
        self._writer.wait()
        return load_training_checkpoint(handle, Path(path)).extra

    def is_mp_src_rank_with_outputs(self, handle: NativeHandle) -> bool:
        self._use(handle)
        return handle.has_outputs

    def close(self) -> None:
        """As :meth:`HeldRuntime.close`; a step that other ranks still have a part of is waited for first."""
        try:
            for handle in self._handles:
                handle.settle()
        finally:
            super().close()

    def _close_groups(self) -> None:
        close_groups(self.groups)

    def _check(
        self, handle: NativeHandle, data: Sequence[PackedBatch], router_replay: RouterReplay, *, forward_only: bool
    ) -> None:
        check_micro_batches(
            data,
            self.groups.world_group,
            self.groups.device,
            max_tokens=self.config.max_tokens_per_micro_batch,
            vocab_size=handle.vocab_size,
            max_length=handle.max_length,
            forward_only=forward_only,
            router_replay=router_replay,
            routers=handle.routed_layers,
            replica=self.groups.replica_group,
        )
        require_schedulable(handle, len(data), forward_only=forward_only)

    def _problem(
        self, handle: NativeHandle, data: Sequence[PackedBatch], router_replay: RouterReplay, *, forward_only: bool
    ) -> BatchError | None:
        """What is wrong with this rank's data by itself."""
        problem = problem_on_rank(
            data,
            self.config.max_tokens_per_micro_batch,
            handle.vocab_size,
            handle.max_length,
            router_replay,
            handle.routed_layers,
        )
        try:
            require_schedulable(handle, len(data), forward_only=forward_only)
        except BatchError as error:
            problem = problem or error
        return problem
