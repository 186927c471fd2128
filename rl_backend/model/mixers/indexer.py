"""The module that scores keys for queries in DeepSeek-V3.2 and GLM-5; see :mod:`rl_backend.primitive.sparse_attention`."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rl_backend.contracts import WeightName
from rl_backend.model.blocks import Rotation, linear_names
from rl_backend.primitive.norm import LayerNorm
from rl_backend.primitive.rope import apply_rotary
from rl_backend.primitive.sparse_attention import IndexTerms

_NORM_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class IndexerSpec:
    """Attributes:
    num_heads, head_dim: of index queries; there is one key for all heads.
    rotated: features of each query and key that are rotated, the first.
    interleaved: whether the two features of a pair that is rotated are neighbours (GLM-5), or half of ``rotated`` apart
        (DeepSeek-V3.2).
    """

    num_heads: int
    head_dim: int
    rotated: int
    interleaved: bool

    def weight_names(self, block: str) -> Mapping[str, WeightName]:
        """Parameter -> Hugging Face name, in the indexer called ``block``."""
        names = linear_names(("wq_b", "wk"), block, bias=False) | linear_names(("k_norm",), block, bias=True)
        return names | linear_names(("weights_proj",), block, bias=False)


class Indexer(nn.Module):
    """Makes index queries of the latents that the attention's queries are made of, and keys and weights of its inputs.

    Weights of heads, and the scores that they are factors of, are float32 whatever the model's dtype. Released models also
    multiply queries and keys by a Hadamard matrix before they round them to FP8, which leaves their products as they are.
    """

    def __init__(self, spec: IndexerSpec, hidden_size: int, latent_size: int) -> None:
        super().__init__()
        self.spec = spec
        self.wq_b = nn.Linear(latent_size, spec.num_heads * spec.head_dim, bias=False)
        self.wk = nn.Linear(hidden_size, spec.head_dim, bias=False)
        self.k_norm = LayerNorm(spec.head_dim, _NORM_EPS)
        self.weights_proj = _Float32Linear(hidden_size, spec.num_heads, bias=False)

    def forward(self, x: Tensor, latent: Tensor, rotation: Rotation) -> IndexTerms:
        """(N, hidden_size) and (N, latent_size) -> what scores are made of. Nothing flows back to either."""
        x, latent = x.detach(), latent.detach()
        query = self._rotate(self.wq_b(latent).unflatten(-1, (self.spec.num_heads, -1)), rotation)
        key = self._rotate(self.k_norm(self.wk(x))[:, None], rotation)[:, 0]
        scale = (self.spec.num_heads * self.spec.head_dim) ** -0.5
        return IndexTerms(query, key, self.weights_proj(x) * scale)

    def _rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        first, rest = x.split((self.spec.rotated, x.shape[-1] - self.spec.rotated), dim=-1)
        if self.spec.interleaved:
            # Queries and keys alike, so that their products stay what they are.
            first = first.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return torch.cat((apply_rotary(first, *rotation), rest), dim=-1)


class _Float32Linear(nn.Linear):
    """Computes in float32 or better, and gives that."""

    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        return x.to(dtype) @ self.weight.to(dtype).t()
