"""Grouped-query attention (Ainslie et al., arXiv 2305.13245), whole or with a sliding window."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from rl_backend.contracts import ConfigError, NativeConfig, ParallelConfig, WeightName
from rl_backend.model.blocks import (
    CacheBytes,
    Mixer,
    MixerSpec,
    Rotation,
    attention_compiles,
    divisors,
    linear_names,
    nearest,
    require_divided,
)
from rl_backend.parallel.context import attend_over_ranks
from rl_backend.parallel.groups import ParallelGroups
from rl_backend.parallel.tensor import TensorParallel
from rl_backend.primitive.activation import sigmoid
from rl_backend.primitive.attention import Attend, Segments, packed_attention
from rl_backend.primitive.norm import NormSpec, RMSNorm
from rl_backend.primitive.rope import Rotary, apply_rotary


@dataclass(frozen=True, kw_only=True)
class GQASpec(MixerSpec):
    """Attributes:
    num_heads, num_kv_heads: of queries, and of keys and values; one divides the other.
    rotary: angles of queries and keys; with a ``head_dim`` below that of the heads, of their first features alone.
    window: how many tokens a token sees, itself included; None for all before it.
    qkv_bias, output_bias: whether the projections of queries, keys and values, and of the output, have biases.
    qk_norm: whether each head's queries and keys are RMS-normalised before the rotation.
    joint_qk_norm: whether the queries of all heads are normalised together, and all keys; needs ``qk_norm``.
    scale: factor of the scores; None for ``head_dim ** -0.5``.
    output_gate: whether each head's output is multiplied by the sigmoid of as many features, which ``q_proj`` has behind
        those of the head's query (Qiu et al., arXiv 2505.06708).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary: Rotary
    window: int | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    joint_qk_norm: bool = False
    scale: float | None = None
    output_name: str = "o_proj"
    output_gate: bool = False
    sinks: bool = False

    def __post_init__(self) -> None:
        if self.joint_qk_norm and (self.output_gate or not self.qk_norm):
            raise ConfigError.of("GQASpec.joint_qk_norm", True, "needs qk_norm=True, norms to join, and output_gate=False")

    @property
    def shares_prefixes(self) -> bool:
        return True

    def build(self, hidden_size: int, norm: NormSpec) -> Mixer:
        return GroupedQueryAttention(self, hidden_size, norm)

    def weight_names(self, layer: str) -> Mapping[str, WeightName]:
        block = f"{layer}.self_attn"
        names = linear_names(("q_proj", "k_proj", "v_proj"), block, bias=self.qkv_bias)
        output = linear_names((self.output_name,), block, bias=self.output_bias)
        names |= dict(zip(linear_names(("o_proj",), block, bias=self.output_bias), output.values(), strict=True))
        others = (*(("q_norm.weight", "k_norm.weight") if self.qk_norm else ()), *(("sinks",) if self.sinks else ()))
        return names | {name: f"{block}.{name}" for name in others}

    def cache_bytes(self, num_tokens: int, itemsize: int) -> CacheBytes:
        seen = num_tokens if self.window is None else min(num_tokens, self.window)
        return CacheBytes(tokens=2 * seen * self.num_kv_heads * self.head_dim * itemsize)

    def check_layout(self, parallel: ParallelConfig) -> None:
        tp, kv_heads = parallel.tp, self.num_kv_heads
        require_divided("tp", tp, "num_attention_heads", self.num_heads)
        if kv_heads % tp and tp % kv_heads:
            working = [size for size in divisors(self.num_heads) if kv_heads % size == 0 or size % kv_heads == 0]
            raise ConfigError.of(
                "ParallelConfig.tp",
                tp,
                f"num_key_value_heads={kv_heads} is no multiple of it ({kv_heads} / {tp} = {kv_heads / tp:.2f} heads a "
                f"rank), nor does it divide tp, which would allow copies of heads; {nearest(tp, working)}",
            )


class GroupedQueryAttention(Mixer):
    """The module of a :class:`GQASpec`; (T, hidden_size) -> (T, hidden_size)."""

    def __init__(self, spec: GQASpec, hidden_size: int, norm: NormSpec) -> None:
        super().__init__()
        self.spec = spec
        self.attend: Attend = packed_attention
        query_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.q_proj = nn.Linear(hidden_size, query_size * (1 + spec.output_gate), bias=spec.qkv_bias)
        self.k_proj = nn.Linear(hidden_size, kv_size, bias=spec.qkv_bias)
        self.v_proj = nn.Linear(hidden_size, kv_size, bias=spec.qkv_bias)
        self.o_proj = nn.Linear(query_size, hidden_size, bias=spec.output_bias)
        sizes = (query_size, kv_size) if spec.joint_qk_norm else (spec.head_dim, spec.head_dim)
        self.q_norm, self.k_norm = (
            RMSNorm(size, norm.eps, from_one=norm.from_one) if spec.qk_norm else None for size in sizes
        )
        self.sinks = nn.Parameter(torch.zeros(spec.num_heads)) if spec.sinks else None

    def forward(self, x: Tensor, rotation: Rotation | None, segments: Segments) -> Tensor:
        assert rotation is not None, "GQASpec has a rotary embedding"
        # The number of heads is what a rank has of them.
        projected, gate = self.q_proj(x), None
        if self.spec.output_gate:
            query_and_gate = projected.unflatten(-1, (-1, 2, self.spec.head_dim))
            projected, gate = (each.flatten(1) for each in query_and_gate.unbind(-2))
        query = self._heads(projected, self.q_norm)
        key, value = self._heads(self.k_proj(x), self.k_norm), self._heads(self.v_proj(x), None)
        query, key = self._rotate(query, rotation), self._rotate(key, rotation)
        if self.spec.scale is not None:
            query = query * (self.spec.scale * self.spec.head_dim**0.5)
        attended = self.attend(query, key, value, segments, self.spec.window, self.sinks)
        outputs = attended.flatten(1) if gate is None else attended.flatten(1) * sigmoid(gate)
        return self.o_proj(outputs)  # type: ignore[no-any-return]

    def _heads(self, projected: Tensor, norm: nn.Module | None) -> Tensor:
        """(N, features) -> (N, heads, head_dim), normalised."""
        if norm is not None and self.spec.joint_qk_norm:
            projected = norm(projected)
        heads: Tensor = projected.unflatten(-1, (-1, self.spec.head_dim))
        return heads if norm is None or self.spec.joint_qk_norm else norm(heads)

    def _rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        rotated = self.spec.rotary.head_dim
        if rotated == self.spec.head_dim:
            return apply_rotary(x, *rotation)
        return torch.cat((apply_rotary(x[..., :rotated], *rotation), x[..., rotated:]), dim=-1)

    def compiles(self, groups: ParallelGroups, config: NativeConfig) -> bool:
        return attention_compiles(groups, config, self.spec.window, sinks=self.spec.sinks)

    def split(self, groups: ParallelGroups) -> None:
        if groups.cp_group.size() > 1:
            self.attend = partial(attend_over_ranks, group=groups.cp_group)
        if groups.tp_group.size() == 1:
            return
        tensor = TensorParallel(groups.tp_mesh)
        tensor.gather_input(self)
        tensor.column(self.q_proj)
        tensor.key_or_value(self.k_proj, self.spec.num_kv_heads)
        tensor.key_or_value(self.v_proj, self.spec.num_kv_heads)
        for norm, heads in ((self.q_norm, self.spec.num_heads), (self.k_norm, self.spec.num_kv_heads)):
            if norm is not None and self.spec.joint_qk_norm:
                tensor.norm_over_heads(norm, heads)
            elif norm is not None:
                tensor.replicate(norm)
        if self.sinks is not None:
            tensor.rows(self)
        tensor.row(self.o_proj)
