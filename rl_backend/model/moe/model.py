"""A decoder with mixtures of experts on packed micro-batches."""

from __future__ import annotations

from torch import Tensor, nn

from rl_backend.contracts import Head
from rl_backend.model.dense.model import DenseDecoder, DenseLayer
from rl_backend.model.moe.architecture import MoEArchitecture
from rl_backend.model.registry import ModelInput, ModelStage
from rl_backend.primitive.attention import Segments
from rl_backend.primitive.feed_forward import MoE
from rl_backend.primitive.router import RouterLossCoefficients


class MoELayer(DenseLayer):
    """A layer whose feed-forward block is a :class:`~rl_backend.primitive.feed_forward.MoE`.

    Attributes:
        place: number among the layers of the whole model that have one.
    """

    mlp: MoE
    place: int

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        segments: Segments,
        router_loss_weight: float = 1.0,
        padding: Tensor | None = None,
        experts: Tensor | None = None,
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, segments)
        mixture: Tensor = self.mlp(self.post_attention_layernorm(x), router_loss_weight, padding, experts)
        return x + mixture


class MoEDecoder(DenseDecoder):
    """The whole model; see :class:`~rl_backend.model.dense.DenseDecoder`."""

    arch: MoEArchitecture

    def __init__(
        self,
        arch: MoEArchitecture,
        head: Head,
        log_prob_chunk_tokens: int,
        coefficients: RouterLossCoefficients,
        stage: ModelStage | None = None,
    ) -> None:
        self._coefficients = coefficients
        super().__init__(arch, head, log_prob_chunk_tokens, stage)

    def make_layer(self, index: int) -> nn.Module:
        arch = self.arch
        if not arch.sparse[index]:
            return super().make_layer(index)
        moe = MoE(arch.hidden_size, arch.expert_intermediate_size, arch.router, coefficients=self._coefficients)
        layer = MoELayer(arch, arch.windows[index], moe)
        layer.place = sum(arch.sparse[:index])
        return layer

    def apply_layer(self, layer: nn.Module, hidden: Tensor, cos: Tensor, sin: Tensor, inputs: ModelInput) -> Tensor:
        if not isinstance(layer, MoELayer):
            return super().apply_layer(layer, hidden, cos, sin, inputs)
        weight, padding = inputs.router_loss_weight, inputs.padding
        experts = None if inputs.routes is None else inputs.routes[:, layer.place]
        return layer(hidden, cos, sin, inputs.segments, weight, padding, experts)  # type: ignore[no-any-return]
