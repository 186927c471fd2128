"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): a layer that predicts the token after next."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rl_backend.contracts import WeightName
from rl_backend.model.blocks import LayerSpec
from rl_backend.model.options import MTPTraining
from rl_backend.parallel.tensor import TensorParallel
from rl_backend.primitive.norm import NormSpec


class MTPNames(NamedTuple):
    """How a directory calls the parts of the layer.

    Attributes:
        module: all of it.
        layer: its decoder layer.
        embedding_norm, hidden_norm, projection, norm: of what comes in, of both together, and of what goes to the head,
            within ``module``.
        embedding, head: copies of the model's within ``module``, empty where there are none.
    """

    module: str
    layer: str
    embedding_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    projection: str = "eh_proj"
    norm: str = "shared_head.norm"
    embedding: str = "embed_tokens.weight"
    head: str = "shared_head.head.weight"

    @classmethod
    def after_layers(cls, prefix: str, num_layers: int) -> "MTPNames":
        """DeepSeek's and GLM's: behind the last of the model's layers."""
        return cls(f"{prefix}.layers.{num_layers}", f"{prefix}.layers.{num_layers}")


@dataclass(frozen=True)
class MTPSpec:
    """Attributes:
    layer: its blocks.
    names: in Hugging Face directories.
    training: as in :class:`~rl_backend.model.options.DecoderOptions`; built unless it is ``keep``.
    loss_weight: as there.
    """

    layer: LayerSpec
    names: MTPNames
    training: MTPTraining = "keep"
    loss_weight: float = 0.1

    @property
    def is_trained(self) -> bool:
        return self.training != "keep"

    def own_weight_names(self, norm: NormSpec) -> dict[str, WeightName]:
        """Of all but the decoder layer, by their names in :class:`MultiTokenPrediction`."""
        modules = {
            "embedding_norm": self.names.embedding_norm,
            "hidden_norm": self.names.hidden_norm,
            "norm": self.names.norm,
        }
        names: dict[str, WeightName] = {"projection.weight": f"{self.names.module}.{self.names.projection}.weight"}
        for module, stored in modules.items():
            names |= {f"{module}.{name}": f"{self.names.module}.{stored}.{name}" for name in norm.parameters}
        return names

    def copies(self, *, tied: bool) -> Mapping[str, tuple[str, ...]]:
        """Parameter of the model -> names of the copies of it that a directory has in this module."""
        embedding, head = (
            tuple(f"{self.names.module}.{name}" for name in (copy,) if name)
            for copy in (self.names.embedding, self.names.head)
        )
        return (
            {"embed_tokens.weight": embedding + head} if tied else {"embed_tokens.weight": embedding, "lm_head.weight": head}
        )


class MultiTokenPrediction(nn.Module):
    """Makes of a token's state and the next token's embedding what the head predicts the token after that one from.

        norm(layer(projection([embedding_norm(embedding); hidden_norm(hidden)])))

    Args:
        layer: the decoder layer, already built.
    """

    def __init__(self, hidden_size: int, norm: NormSpec, layer: nn.Module) -> None:
        super().__init__()
        self.embedding_norm, self.hidden_norm = norm.build(hidden_size), norm.build(hidden_size)
        self.projection = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.layer = layer
        self.norm = norm.build(hidden_size)

    def replicate_own(self, tensor: TensorParallel) -> None:
        """Keeps all but the decoder layer on every rank, which uses it for its part of the tokens."""
        for norm in (self.embedding_norm, self.hidden_norm, self.norm):
            tensor.replicate(norm)
        tensor.replicate_for_own_tokens(self.projection)

    def forward(self, hidden: Tensor, embedding: Tensor, *context: object) -> Tensor:
        """(N, hidden_size) twice -> (N, hidden_size).

        Args:
            context: what the decoder layer takes behind its first argument.
        """
        both = torch.cat((self.embedding_norm(embedding), self.hidden_norm(hidden)), dim=-1)
        mixed = self.layer(self.projection(both), *context)
        normed: Tensor = self.norm(mixed[0] if isinstance(mixed, tuple) else mixed)
        return normed
