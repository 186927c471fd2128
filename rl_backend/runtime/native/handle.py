"""What the native runtime keeps for one model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from rl_backend.contracts import HandleError, ModelHandle, RuntimeConfig, WeightName
from rl_backend.model import ModelFamily
from rl_backend.parallel.groups import ParallelGroups
from rl_backend.runtime.native.fsdp_state import local_tensor
from rl_backend.runtime.native.optimizer import NativeOptimizer
from rl_backend.runtime.placement import Part, Placement

if TYPE_CHECKING:
    from rl_backend.runtime.native.runtime import NativeRuntime


@dataclass(eq=False, kw_only=True)
class NativeHandle(ModelHandle):
    """One model of a :class:`~rl_backend.runtime.native.NativeRuntime`.

    Attributes:
        owner: the runtime that built it; None once it is closed.
        config: the runtime's, with the ``hf_path`` and optimizer of this model.
        groups: mesh, device and process groups.
        family, architecture, hf_config: what was built.
        vocab_size: ``vocab_size`` of ``config.json``.
        max_length: longest sequence, in tokens; None where the family sets no limit.
        model: the module, sharded.
        parameters: name in the module -> parameter, in export order.
        weight_names: name in the module -> Hugging Face name or names, in the same order.
        optimizer: None for a forward-only handle.
        placement: where each part is.
        broken: why the handle cannot be used, empty when it can: a pass failed in the middle (until ``zero_grad``).
        damaged: why its weights cannot be trusted: a checkpoint failed in the middle of loading (until one loads).
    """

    owner: NativeRuntime | None
    config: RuntimeConfig
    groups: ParallelGroups
    family: ModelFamily
    architecture: Any
    hf_config: Mapping[str, Any]
    vocab_size: int
    max_length: int | None
    model: nn.Module
    parameters: Mapping[str, nn.Parameter]
    weight_names: Mapping[str, WeightName]
    optimizer: NativeOptimizer | None
    placement: Placement
    broken: str = ""
    damaged: str = ""

    def part_tensors(self) -> dict[Part, list[Tensor]]:
        """This rank's tensors of each part that the handle has."""
        parts: dict[Part, list[Tensor]] = {"model": [local_tensor(parameter) for parameter in self.parameters.values()]}
        if self.optimizer is not None:
            parts["optimizer"] = [local_tensor(tensor) for tensor in self.optimizer.state_tensors().values()]
            gradients = [parameter.grad for parameter in self.parameters.values()]
            parts["grad"] = [local_tensor(gradient) for gradient in gradients if gradient is not None]
        return parts

    def release(self) -> None:
        """Drops every tensor; the handle cannot be used again."""
        self.owner = None
        self.optimizer = None
        self.parameters = {}
        self.model = nn.Module()
        self.placement = Placement(self.name, self.groups.device)

    def trainer(self, operation: str) -> NativeOptimizer:
        """The optimizer; raises :class:`HandleError` for a forward-only handle."""
        if self.optimizer is None:
            raise HandleError(
                f"{operation} on {self.name!r}, which is forward-only: it has no gradients and no optimizer; "
                "build it with build_model(forward_only=False)",
                handle=self.name,
                operation=operation,
            )
        return self.optimizer
