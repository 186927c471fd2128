"""Mixtures of experts with clamped gates and biases, which directories hold in one tensor for all experts."""

from collections.abc import Mapping
from dataclasses import dataclass

from rl_backend.contracts import WeightName
from rl_backend.model.feedforward.moe import MoESpec
from rl_backend.primitive.clamped_experts import ClampedExperts
from rl_backend.primitive.experts import Experts


@dataclass(frozen=True)
class ClampedMoESpec(MoESpec):
    """As :class:`MoESpec`, with other experts. Parameters lie as tensors of directories do: nothing is converted."""

    def build_experts(self, hidden_size: int) -> Experts:
        return ClampedExperts(self.router.num_experts, hidden_size, self.intermediate_size)

    def expert_names(self, block: str) -> Mapping[str, WeightName]:
        return {name: f"{block}.{name}" for name in ClampedExperts.intermediate_dims}
