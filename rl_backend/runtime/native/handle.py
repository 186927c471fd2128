"""Models of the native runtime."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from rl_backend import contracts
from rl_backend.contracts.atoms import Part
from rl_backend.model import ModelFamily
from rl_backend.model.options import DecoderOptions
from rl_backend.parallel import fsdp
from rl_backend.parallel.groups import ParallelGroups
from rl_backend.parallel.shards import local_tensor
from rl_backend.pipeline.catalog import require_micro_batches
from rl_backend.runtime.handle import GuardedHandle
from rl_backend.runtime.native.layout import TensorLayout, schedule_name
from rl_backend.runtime.native.optimizer import NativeOptimizer


@dataclass(eq=False, kw_only=True)
class NativeHandle(GuardedHandle[NativeOptimizer]):
    """One model of a :class:`~rl_backend.runtime.native.NativeRuntime`."""

    groups: ParallelGroups
    family: ModelFamily
    architecture: Any
    model: nn.Module  # the module, sharded; with a pipeline, all stages of this rank
    stages: Mapping[int, nn.Module]  # number -> module, of this rank's stages; empty without a pipeline
    stage_copies: Mapping[str, str]  # parameter of the last stage that is a copy -> its original in the first
    has_outputs: bool  # whether this rank is the one of its replica that returns outputs
    parameters: Mapping[str, nn.Parameter]  # name in the module -> parameter of this rank, in export order, copies last
    weight_names: Mapping[str, contracts.WeightName]  # of the whole model, in the same order, without copies
    layouts: Mapping[str, TensorLayout]  # of all of them, those of other stages too
    num_passes: int = 0  # that a pipeline has begun, by which a trace tells them apart

    @property
    def has_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self.parameters.values())

    def step(self, adam: contracts.AdamParams | None = None) -> contracts.StepResult:
        """See the base class. A skipped step is logged as a warning that names parameters with non-finite gradients."""
        return self.trainer.step(self.name, adam)

    @property
    def routed_layers(self) -> contracts.RoutedLayers | None:
        return None if self.family.routed_layers is None else self.family.routed_layers(self.architecture)

    @property
    def indexed_layers(self) -> contracts.IndexedLayers | None:
        return None if self.family.indexed_layers is None else self.family.indexed_layers(self.architecture)

    @property
    def trains_second(self) -> bool:
        """Whether it is trained on the tokens after the next: by a layer for multi-token prediction."""
        return DecoderOptions.of(self.options.model_cfg).mtp != "keep"

    @property
    def weights(self) -> tuple[contracts.TensorInfo, ...]:
        return tuple(
            contracts.TensorInfo.of(stored, layout.shards.shape[len(index) :], layout.dtype)
            for key, layout in self.layouts.items()
            for index, stored in contracts.stored_tensors(self.weight_names[key])
        )

    @property
    def in_float32(self) -> frozenset[str]:
        names = {key: self.weight_names[key] for key, layout in self.layouts.items() if layout.in_float32}
        return frozenset(contracts.stored_names(names))

    @property
    def options(self) -> contracts.NativeConfig:
        return self.config.options(contracts.NativeConfig)

    def drop_gradients(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None
        # A pass that failed in the middle leaves gradients that no rank has reduced.
        fsdp.drop_unreduced_gradients(self.model)
        if self.optimizer is not None and self.optimizer.balance is not None:
            self.optimizer.balance.drop()
        self.offload.forget("grad")

    def require_schedulable(self, num_micro_batches: int, *, forward_only: bool) -> None:
        schedule = schedule_name(self.options)
        if schedule is not None and self.stages and num_micro_batches:
            require_micro_batches(schedule, self.options.parallel.pp, num_micro_batches, forward_only=forward_only)

    def part_tensors(self) -> dict[Part, list[Tensor]]:
        parts: dict[Part, list[Tensor]] = {"model": [local_tensor(parameter) for parameter in self.parameters.values()]}
        if self.optimizer is not None:
            parts["optimizer"] = [local_tensor(tensor) for tensor in self.optimizer.moments()]
            gradients = [parameter.grad for parameter in self.parameters.values()]
            parts["grad"] = [local_tensor(gradient) for gradient in gradients if gradient is not None]
        return parts

    def roots(self) -> Iterable[nn.Module]:
        return (self.model,)

    def release(self) -> None:
        super().release()
        self.parameters = {}
        self.model = nn.Module()
        self.stages = {}
