"""What the native runtime keeps for one model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from rl_backend.contracts import RoutedLayers, WeightName
from rl_backend.model import ModelFamily
from rl_backend.parallel.groups import ParallelGroups
from rl_backend.parallel.shards import local_tensor
from rl_backend.runtime.held import HeldHandle
from rl_backend.runtime.native.gather import TensorLayout
from rl_backend.runtime.native.optimizer import NativeOptimizer
from rl_backend.runtime.placement import Part, Placement


@dataclass(eq=False, kw_only=True)
class NativeHandle(HeldHandle[NativeOptimizer]):
    """One model of a :class:`~rl_backend.runtime.native.NativeRuntime`.

    Attributes:
        groups: mesh, device and process groups.
        family, architecture: what was built.
        vocab_size: ``vocab_size`` of ``config.json``.
        max_length: longest sequence, in tokens; None where the family sets no limit.
        model: the module, sharded; with a pipeline, all stages of this rank.
        stages: number -> module, of the stages that this rank has; empty without a pipeline.
        stage_copies: parameter of the last stage that is a copy -> the parameter of the first that it is a copy of.
        has_outputs: whether this rank is the one of its replica that returns outputs.
        parameters: name in the module -> parameter of this rank, in export order, copies last.
        weight_names: name in the module -> Hugging Face name or names of the whole model, in the same order, without copies.
        layouts: of all of them, those of other stages too.
        placement: where each part is.
        num_passes: calls of a pipeline so far, by which a trace tells them apart.
    """

    groups: ParallelGroups
    family: ModelFamily
    architecture: Any
    vocab_size: int
    max_length: int | None
    model: nn.Module
    stages: Mapping[int, nn.Module]
    stage_copies: Mapping[str, str]
    has_outputs: bool
    parameters: Mapping[str, nn.Parameter]
    weight_names: Mapping[str, WeightName]
    layouts: Mapping[str, TensorLayout]
    placement: Placement
    num_passes: int = 0

    @property
    def routed_layers(self) -> RoutedLayers | None:
        """Its layers with experts; None where the family does not replay routes."""
        return None if self.family.routed_layers is None else self.family.routed_layers(self.architecture)

    def part_tensors(self) -> dict[Part, list[Tensor]]:
        """This rank's tensors of each part that the handle has."""
        parts: dict[Part, list[Tensor]] = {"model": [local_tensor(parameter) for parameter in self.parameters.values()]}
        if self.optimizer is not None:
            parts["optimizer"] = [local_tensor(tensor) for tensor in self.optimizer.state_tensors().values()]
            gradients = [parameter.grad for parameter in self.parameters.values()]
            parts["grad"] = [local_tensor(gradient) for gradient in gradients if gradient is not None]
        return parts

    def roots(self) -> Iterable[nn.Module]:
        return (self.model,)

    def release(self) -> None:
        self.owner = None
        self.optimizer = None
        self.parameters = {}
        self.model = nn.Module()
        self.stages = {}
        self.placement = Placement(self.name, self.groups.device)
