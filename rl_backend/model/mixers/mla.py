"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): one latent for keys and values of all heads.

Sparse, it attends to keys that an indexer scores (DeepSeek-V3.2, arXiv 2512.02556, section 2.1; GLM-5, arXiv 2602.15763).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl_backend.contracts import ConfigError, NativeConfig, ParallelConfig, WeightName
from rl_backend.model.blocks import (
    CacheBytes,
    KeyChoice,
    Mixer,
    MixerSpec,
    Rotation,
    attention_compiles,
    linear_names,
    require_divided,
)
from rl_backend.model.options import INDEXER_OPTIONS, IndexerTraining
from rl_backend.parallel.context import gather_keys
from rl_backend.parallel.groups import ParallelGroups
from rl_backend.parallel.tensor import TensorParallel
from rl_backend.primitive.adapters import runs_at_work
from rl_backend.primitive.attention import Segments, packed_attention
from rl_backend.primitive.backward import with_added_loss
from rl_backend.primitive.float32 import wide_dtype
from rl_backend.primitive.norm import LayerNorm, NormSpec, RMSNorm
from rl_backend.primitive.prefix_tree import PrefixTree
from rl_backend.primitive.rope import Rotary, apply_rotary
from rl_backend.primitive.sparse_attention import IndexTerms, choose_keys, indexer_loss, sparse_attention

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
        names = linear_names(("wq_b", "wk"), block, bias=False) | linear_names(("k_norm",), block, bias=True)
        return names | linear_names(("weights_proj",), block, bias=False)


class Indexer(nn.Module):
    """Makes index queries of the latents that the attention's queries are made of, and keys and weights of its inputs.

    Weights of heads, and the scores that they are factors of, are float32 whatever the model's dtype.
    """

    # Released models also multiply queries and keys by a Hadamard matrix before they round them to FP8, which leaves their
    # products as they are.
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
        dtype = wide_dtype(x.dtype)
        return x.to(dtype) @ self.weight.to(dtype).t()


@dataclass(frozen=True, kw_only=True)
class ChosenKeysSpec:
    """The ``top_k`` keys that a query attends to; without an indexer those of the layer before.

    Options are those of :class:`~rl_backend.model.options.DecoderOptions`.
    """

    indexer: IndexerSpec | None
    top_k: int
    training: IndexerTraining = "frozen"
    loss_weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class MLASpec(MixerSpec):
    """Attributes:
    query_rank: features of the latent that queries are made of; None makes them of the hidden state.
    kv_rank: features of the latent that keys and values of all heads are made of.
    plain_dim: features of a head's query and key that are not rotated.
    value_dim: features of a head's value.
    rotary: of the other features of queries and keys, the last; all heads have these of the key in common.
    interleaved: whether the two features of a pair that is rotated are neighbours, or half of them apart.
    scale: factor of the scores.
    latent_eps: of the norms of both latents.
    bias: whether the projections to latents and of the output have biases.
    keys: those that are attended to; None for all.
    """

    num_heads: int
    query_rank: int | None
    kv_rank: int
    plain_dim: int
    value_dim: int
    rotary: Rotary
    interleaved: bool
    scale: float
    latent_eps: float
    bias: bool = False
    keys: ChosenKeysSpec | None = None

    @property
    def key_dim(self) -> int:
        return self.plain_dim + self.rotary.head_dim

    @property
    def indexer(self) -> IndexerSpec | None:
        return None if self.keys is None else self.keys.indexer

    @property
    def options(self) -> frozenset[str]:
        return frozenset() if self.keys is None else INDEXER_OPTIONS

    @property
    def chooses(self) -> bool:
        return self.keys is not None

    @property
    def follows(self) -> bool:
        return self.keys is not None and self.keys.indexer is None

    @property
    def shares_prefixes(self) -> bool:
        return True

    @property
    def chosen_keys(self) -> int | None:
        return None if self.keys is None or self.follows or self.keys.training == "warm_up" else self.keys.top_k

    def build(self, hidden_size: int, norm: NormSpec) -> Mixer:
        if self.keys is None:
            return LatentAttention(self, hidden_size)
        return SparseLatentAttention(self, self.keys, hidden_size)

    def weight_names(self, layer: str) -> Mapping[str, WeightName]:
        block = f"{layer}.self_attn"
        if self.query_rank is None:
            names = linear_names(("q_proj",), block, bias=False)
        else:
            names = linear_names(("q_a_proj",), block, bias=self.bias)
            names |= linear_names(("q_a_layernorm", "q_b_proj"), block, bias=False)
        names |= linear_names(("kv_a_proj_with_mqa",), block, bias=self.bias)
        names |= linear_names(("kv_a_layernorm", "kv_b_proj"), block, bias=False)
        names |= linear_names(("o_proj",), block, bias=self.bias)
        if self.indexer is not None:
            names |= {f"indexer.{name}": value for name, value in self.indexer.weight_names(f"{block}.indexer").items()}
        return names

    def cache_bytes(self, num_tokens: int, itemsize: int) -> CacheBytes:
        # Engines keep latents and the rotated features of keys, and make keys and values in the attention.
        indexed = 0 if self.indexer is None else self.indexer.head_dim
        return CacheBytes(tokens=num_tokens * (self.kv_rank + self.rotary.head_dim + indexed) * itemsize)

    def check_layout(self, parallel: ParallelConfig) -> None:
        require_divided("tp", parallel.tp, "num_attention_heads", self.num_heads)
        training = "frozen" if self.keys is None else self.keys.training
        needs = f"model_cfg.indexer={training!r} needs all heads and keys on one rank"
        ConfigError.refuse_all(
            (f"ParallelConfig.{name}", ranks, f"{needs}; use 1, or indexer='frozen'")
            for name, ranks in (("tp", parallel.tp), ("cp", parallel.cp))
            if training != "frozen" and ranks > 1
        )


class LatentAttention(Mixer):
    """The module of a :class:`MLASpec`; (T, hidden_size) -> (T, hidden_size).

    c_q = norm(q_a(x))              c_kv, r = kv_a(x)
    q, q_r = q_b(c_q)               k, v = kv_b(norm(c_kv))
    out = o_proj(attention([q, rotate(q_r)], [k, rotate(r)], v))
    """

    # Keys and values are made of the latents before the attention. The absorbed form, which attends to latents, multiplies
    # ``kv_rank`` features for every score where this one multiplies ``plain_dim``: it pays for one query against many keys.
    def __init__(self, spec: MLASpec, hidden_size: int) -> None:
        super().__init__()
        self.spec = spec
        queries = spec.num_heads * spec.key_dim
        if spec.query_rank is None:
            self.q_proj = nn.Linear(hidden_size, queries, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden_size, spec.query_rank, bias=spec.bias)
            self.q_a_layernorm = RMSNorm(spec.query_rank, spec.latent_eps)
            self.q_b_proj = nn.Linear(spec.query_rank, queries, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden_size, spec.kv_rank + spec.rotary.head_dim, bias=spec.bias)
        self.kv_a_layernorm = RMSNorm(spec.kv_rank, spec.latent_eps)
        self.kv_b_proj = nn.Linear(spec.kv_rank, spec.num_heads * (spec.plain_dim + spec.value_dim), bias=False)
        self.o_proj = nn.Linear(spec.num_heads * spec.value_dim, hidden_size, bias=spec.bias)
        self._tensor: TensorParallel | None = None
        self._cp_group: dist.ProcessGroup | None = None

    def forward(self, x: Tensor, rotation: Rotation | None, segments: Segments) -> Tensor:
        assert rotation is not None, "MLASpec has a rotary embedding"
        query = self._queries(self._query_latent(x), rotation)
        key, value = self._gathered(*self._latents(x, rotation), segments)
        attended = packed_attention(query, key, value, segments)
        return self.o_proj(attended.flatten(1))  # type: ignore[no-any-return]

    def _query_latent(self, x: Tensor) -> Tensor:
        return self._of_all_tokens(x if self.spec.query_rank is None else self.q_a_layernorm(self.q_a_proj(x)))

    def _queries(self, latent: Tensor, rotation: Rotation) -> Tensor:
        """(N, heads of this rank, key_dim), scaled."""
        spec = self.spec
        projected = self.q_proj(latent) if spec.query_rank is None else self.q_b_proj(latent)
        plain, rotated = projected.unflatten(-1, (-1, spec.key_dim)).split((spec.plain_dim, spec.rotary.head_dim), dim=-1)
        # Attention scales by the root of the width.
        query: Tensor = torch.cat((plain, self._rotate(rotated, rotation)), dim=-1) * (spec.scale * spec.key_dim**0.5)
        return query

    def _latents(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """What keys and values are made of: (N, kv_rank), normalised, and (N, rotated features)."""
        latent, rotated = self.kv_a_proj_with_mqa(x).split((self.spec.kv_rank, self.spec.rotary.head_dim), dim=-1)
        both = self._of_all_tokens(torch.cat((self.kv_a_layernorm(latent), rotated), dim=-1))
        latent, rotated = both.split((self.spec.kv_rank, self.spec.rotary.head_dim), dim=-1)
        return latent, self._rotate(rotated[:, None], rotation)[:, 0]

    def _gathered(self, latent: Tensor, rotated: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
        if self._cp_group is None:
            return self._keys_and_values(latent, rotated)
        if runs_at_work():
            # An adapter of kv_b_proj works on rows of this rank.
            key, value = self._keys_and_values(latent, rotated)
            both = gather_keys(torch.cat((key, value), dim=-1), segments, self._cp_group)
            key, value = both.split((key.shape[-1], value.shape[-1]), dim=-1)
            return key, value
        shared = gather_keys(torch.cat((latent, rotated), dim=-1), segments, self._cp_group)
        latent, rotated = shared.split((self.spec.kv_rank, self.spec.rotary.head_dim), dim=-1)
        return self._keys_and_values(latent, rotated)

    def _keys_and_values(self, latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        """(M, heads of this rank, key_dim) and (M, heads of this rank, value_dim)."""
        heads = self.kv_b_proj(latent).unflatten(-1, (-1, self.spec.plain_dim + self.spec.value_dim))
        plain, value = heads.split((self.spec.plain_dim, self.spec.value_dim), dim=-1)
        return torch.cat((plain, rotated[:, None].expand(-1, plain.shape[1], -1)), dim=-1), value

    def _rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        if self.spec.interleaved:
            # Queries and keys alike, so that their products stay what they are.
            x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return apply_rotary(x, *rotation)

    def _of_all_tokens(self, x: Tensor) -> Tensor:
        return x if self._tensor is None else self._tensor.operators.all_gather(x, sum_gradients=True)

    def compiles(self, groups: ParallelGroups, config: NativeConfig) -> bool:
        return not self.spec.chooses and attention_compiles(groups, config, None)

    def split(self, groups: ParallelGroups) -> None:
        # Context parallelism gathers latents, which are smaller than keys and values.
        if groups.cp_group.size() > 1:
            self._cp_group = groups.cp_group
        if groups.tp_group.size() == 1:
            return
        tensor = self._tensor = TensorParallel(groups.tp_mesh)
        if self.spec.query_rank is None:
            tensor.column(self.q_proj)
        else:
            tensor.replicate_for_own_tokens(self.q_a_proj)
            tensor.replicate(self.q_a_layernorm)
            tensor.column(self.q_b_proj)
        tensor.replicate_for_own_tokens(self.kv_a_proj_with_mqa)
        tensor.replicate(self.kv_a_layernorm)
        tensor.column(self.kv_b_proj)
        tensor.row(self.o_proj)


class SparseLatentAttention(LatentAttention):
    """The module of a :class:`MLASpec` with ``keys``; (T, hidden_size) -> (T, hidden_size), and what was attended to.

    Sequences that ``top_k`` covers have latent attention, whatever is beside them.
    """

    def __init__(self, spec: MLASpec, keys: ChosenKeysSpec, hidden_size: int) -> None:
        super().__init__(spec, hidden_size)
        self.keys, self.indexer = keys, None
        if keys.indexer is not None:
            assert spec.query_rank is not None, "index queries are made of the latent"
            self.indexer = Indexer(keys.indexer, hidden_size, spec.query_rank)
            self.indexer.requires_grad_(keys.training != "frozen")

    def forward(  # type: ignore[override] # its specification chooses
        self, x: Tensor, rotation: Rotation | None, segments: Segments, choice: KeyChoice
    ) -> tuple[Tensor, Tensor | None]:
        assert rotation is not None, "MLASpec has a rotary embedding"
        keys, from_latent = self.keys, self._query_latent(x)
        query = self._queries(from_latent, rotation)
        key, value = self._gathered(*self._latents(x, rotation), segments)
        recorded, chosen = None if self.indexer is None else choice.recorded, choice.chosen
        # What follows a layer with recorded keys attends to these too.
        # Where ``top_k`` covers the longest sequence nothing has to be chosen.
        covered = choice.longest <= keys.top_k and recorded is None and chosen is None
        dense = keys.training == "warm_up" or covered
        trains = keys.training != "frozen" and torch.is_grad_enabled()
        terms: IndexTerms | None = None
        if self.indexer is not None and (trains or not dense):
            terms = self.indexer(self._of_all_tokens(x.detach()), from_latent, rotation)
            if self._cp_group is not None:
                terms = terms._replace(key=gather_keys(terms.key, segments, self._cp_group))
            chosen = None if dense else choose_keys(terms, segments, keys.top_k)
            if recorded is not None and chosen is not None:
                chosen = torch.where(recorded.amax(-1, keepdim=True) < 0, chosen, recorded.to(chosen.dtype))
        if dense:
            attended, chosen = packed_attention(query, key, value, segments), None
        else:
            assert chosen is not None, "a layer that follows comes after one that chooses"
            attended = sparse_attention(query, key, value, segments, chosen)
        if trains and terms is not None:
            loss = _mean_indexer_loss(terms, query, key, segments, chosen, self.spec.key_dim**-0.5)
            attended = with_added_loss(attended, loss * (keys.loss_weight * choice.loss_weight))
        return self.o_proj(attended.flatten(1)), chosen

    def split(self, groups: ParallelGroups) -> None:
        # Every tensor-parallel rank chooses for all of its heads, and so the same.
        super().split(groups)
        if groups.tp_group.size() > 1 and self.indexer is not None:
            tensor = TensorParallel(groups.tp_mesh)
            for part in self.indexer.children():
                tensor.replicate(part, partial=False)


def _mean_indexer_loss(
    terms: IndexTerms, query: Tensor, key: Tensor, segments: Segments, chosen: Tensor | None, scale: float
) -> Tensor:
    """Over the tokens of all sequences: a row that several have counts as often."""
    tree = segments.tree
    if tree is None:
        return indexer_loss(terms, query, key, segments, chosen, scale) / query.shape[0]
    counts = _row_counts(tree, query.device)
    return indexer_loss(terms, query, key, segments, chosen, scale, counts=counts) / tree.num_tokens


@lru_cache(maxsize=8)
def _row_counts(tree: PrefixTree, device: torch.device) -> Tensor:
    # The layers of a model ask for the same in turn; only the first waits for a transfer to the device.
    return tree.row_counts.to(device, non_blocking=True)
