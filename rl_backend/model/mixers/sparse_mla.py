"""Latent attention to chosen keys (DeepSeek-V3.2, arXiv 2512.02556, section 2.1; GLM-5, arXiv 2602.15763)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from rl_backend.contracts import ConfigError, ModelOptions, ParallelConfig, WeightName
from rl_backend.model.blocks import CacheBytes, KeyChoice, Mixer, Rotation
from rl_backend.model.mixers.indexer import Indexer, IndexerSpec
from rl_backend.model.mixers.mla import LatentAttention, MLASpec
from rl_backend.parallel.context import gather_keys
from rl_backend.parallel.groups import ParallelGroups
from rl_backend.parallel.tensor import TensorParallel
from rl_backend.primitive.added_loss import with_added_loss
from rl_backend.primitive.attention import Segments, packed_attention
from rl_backend.primitive.indexer import IndexTerms, choose_keys
from rl_backend.primitive.norm import NormSpec
from rl_backend.primitive.sparse_attention import indexer_loss, sparse_attention

type IndexerTraining = Literal["frozen", "warm_up", "sparse"]


class SparseOptions(ModelOptions):
    """What becomes of the indexers, which choose the keys.

    Attributes:
        indexer: ``frozen`` leaves them as they are; ``warm_up`` trains them alone, on attention to all keys, for a model
            that has not been sparse before; ``sparse`` trains them on attention to the keys that they choose, beside the
            model, which learns from its own loss only.
        indexer_loss_weight: factor of their loss, the divergence of what they score from what is attended to, averaged over
            the tokens. It acts on the gradients; the loss that is reported is the caller's alone.
    """

    indexer: IndexerTraining = "frozen"
    indexer_loss_weight: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)


@dataclass(frozen=True, kw_only=True)
class SparseMLASpec(MLASpec):
    """Attributes:
    indexer: None for a layer that attends to the keys of the one before.
    top_k: keys that a query attends to.
    training, loss_weight: as in :class:`SparseOptions`.
    """

    indexer: IndexerSpec | None
    top_k: int
    training: IndexerTraining = "frozen"
    loss_weight: float = 1.0
    chooses = True

    @property
    def follows(self) -> bool:
        return self.indexer is None

    @property
    def chosen_keys(self) -> int | None:
        return None if self.follows or self.training == "warm_up" else self.top_k

    def build(self, hidden_size: int, norm: NormSpec) -> Mixer:
        return SparseLatentAttention(self, hidden_size)

    def weight_names(self, layer: str) -> Mapping[str, WeightName]:
        names = dict(super().weight_names(layer))
        if self.indexer is not None:
            stored = self.indexer.weight_names(f"{layer}.self_attn.indexer")
            names |= {f"indexer.{name}": value for name, value in stored.items()}
        return names

    def cache_bytes(self, num_tokens: int, itemsize: int) -> CacheBytes:
        """As of latent attention, and a key of the indexer for each token."""
        latents = super().cache_bytes(num_tokens, itemsize)
        keys = 0 if self.indexer is None else num_tokens * self.indexer.head_dim * itemsize
        return latents._replace(tokens=latents.tokens + keys)

    def check_layout(self, parallel: ParallelConfig) -> None:
        super().check_layout(parallel)
        for name, ranks in (("tp", parallel.tp), ("cp", parallel.cp)):
            if self.training != "frozen" and ranks > 1:
                raise ConfigError.of(
                    f"ParallelConfig.{name}",
                    ranks,
                    f"model_cfg.indexer={self.training!r} needs all heads and keys on one rank, here there would be "
                    f"1 / {ranks} of them; use {name}=1, or indexer='frozen'",
                )


class SparseLatentAttention(LatentAttention):
    """The module of a :class:`SparseMLASpec`; (T, hidden_size) -> (T, hidden_size), and what was attended to.

    Sequences that ``top_k`` covers have latent attention, whatever is beside them. Where it covers the longest of a
    micro-batch nothing is chosen, unless there are recorded choices.
    """

    def __init__(self, spec: SparseMLASpec, hidden_size: int) -> None:
        super().__init__(spec, hidden_size)
        self.sparse, self.indexer = spec, None
        if spec.indexer is not None:
            assert spec.query_rank is not None, "index queries are made of the latent"
            self.indexer = Indexer(spec.indexer, hidden_size, spec.query_rank)
            self.indexer.requires_grad_(spec.training != "frozen")

    def forward(  # type: ignore[override] # its specification chooses
        self, x: Tensor, rotation: Rotation | None, segments: Segments, choice: KeyChoice
    ) -> tuple[Tensor, Tensor | None]:
        assert rotation is not None, "MLASpec has a rotary embedding"
        spec, from_latent = self.sparse, self._query_latent(x)
        query = self._queries(from_latent, rotation)
        key, value = self._gathered(*self._latents(x, rotation), segments)
        recorded, chosen = None if self.indexer is None else choice.recorded, choice.chosen
        # What follows a layer with recorded keys attends to these too.
        covered = choice.longest <= spec.top_k and recorded is None and chosen is None
        dense = spec.training == "warm_up" or covered
        trains = spec.training != "frozen" and torch.is_grad_enabled()
        terms: IndexTerms | None = None
        if self.indexer is not None and (trains or not dense):
            terms = self.indexer(self._of_all_tokens(x.detach()), from_latent, rotation)
            if self._cp_group is not None:
                terms = terms._replace(key=gather_keys(terms.key, segments, self._cp_group))
            chosen = None if dense else choose_keys(terms, segments, spec.top_k)
            if recorded is not None and chosen is not None:
                chosen = torch.where(recorded.amax(-1, keepdim=True) < 0, chosen, recorded.to(chosen.dtype))
        if dense:
            attended, chosen = packed_attention(query, key, value, segments), None
        else:
            assert chosen is not None, "a layer that follows comes after one that chooses"
            attended = sparse_attention(query, key, value, segments, chosen)
        if trains and terms is not None:
            loss = indexer_loss(terms, query, key, segments, chosen, spec.key_dim**-0.5) / query.shape[0]
            attended = with_added_loss(attended, loss * (spec.loss_weight * choice.loss_weight))
        return self.o_proj(attended.flatten(1)), chosen

    def split(self, groups: ParallelGroups) -> None:
        """As latent attention; every tensor-parallel rank chooses for all of its heads, and so the same."""
        super().split(groups)
        if groups.tp_group.size() > 1 and self.indexer is not None:
            tensor = TensorParallel(groups.tp_mesh)
            for part in self.indexer.children():
                tensor.replicate(part, partial=False)
