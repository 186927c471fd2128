"""Gated DeltaNet (Yang, Kautz and Hatamizadeh, arXiv 2412.06464), as Qwen3-Next and Qwen3.5 have it."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rl_backend.contracts import ConfigError, NativeConfig, ParallelConfig, WeightName
from rl_backend.model.blocks import CacheBytes, Mixer, MixerSpec, Rotation, linear_names, require_divided
from rl_backend.model.options import DELTA_OPTIONS, DecoderOptions
from rl_backend.parallel.context import RecurrenceOverRanks
from rl_backend.parallel.groups import ParallelGroups
from rl_backend.parallel.tensor import FusedProjections, TensorParallel
from rl_backend.primitive.activation import sigmoid, silu, softplus
from rl_backend.primitive.attention import Segments
from rl_backend.primitive.causal_conv import CausalConv, path_history
from rl_backend.primitive.float32 import KeptInFloat32, widened
from rl_backend.primitive.gated_delta import ChunkedDeltaRule, fla_gated_delta_rule, has_fla, l2_normalised
from rl_backend.primitive.norm import NormSpec, RMSNorm

_WHOLE = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
_BY_KEY_HEAD = ("in_proj_qkvz", "in_proj_ba")
_KERNEL = "NativeConfig.model_cfg.delta_kernel"
_NO_TREE = "it starts every sequence from an empty state, and shared prefixes do not; use 'torch', or share_prefixes='off'"


@dataclass(frozen=True, kw_only=True)
class DeltaNetSpec(MixerSpec):
    """Attributes:
    num_key_heads: of queries and keys.
    num_value_heads: of values, states and outputs; a multiple of ``num_key_heads``, of which the first is that of the first
        values, and so on.
    conv_width: tokens that the convolution before the recurrence sees.
    by_key_head: whether the input projections are two that are interleaved by key head, as Qwen3-Next stores them: queries,
        keys, its values and their gates; its write strengths and decays. Otherwise they are four, each of all heads.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int = 4
    by_key_head: bool = False
    rotary = None
    module = "linear_attn"

    @property
    def options(self) -> frozenset[str]:
        return DELTA_OPTIONS

    def __post_init__(self) -> None:
        if self.num_value_heads % self.num_key_heads:
            raise ConfigError.of(
                "DeltaNetSpec.num_value_heads",
                self.num_value_heads,
                f"is no multiple of num_key_heads={self.num_key_heads}, of which each serves as many",
            )

    @property
    def shares_prefixes(self) -> bool:
        return True

    @property
    def features(self) -> tuple[int, int, int]:
        """Numbers of those of queries, keys and values."""
        keys = self.num_key_heads * self.key_dim
        return keys, keys, self.num_value_heads * self.value_dim

    def build(self, hidden_size: int, norm: NormSpec) -> Mixer:
        return GatedDeltaNet(self, hidden_size, norm)

    def weight_names(self, layer: str) -> Mapping[str, WeightName]:
        block = f"{layer}.{self.module}"
        names = linear_names(_BY_KEY_HEAD if self.by_key_head else _WHOLE, block, bias=False)
        names |= {name: f"{block}.{name}" for name in ("conv1d.weight", "dt_bias")}
        names |= {"decay.A_log": f"{block}.A_log", "norm.weight": f"{block}.norm.weight"}
        return names | linear_names(("out_proj",), block, bias=False)

    def cache_bytes(self, num_tokens: int, itemsize: int) -> CacheBytes:
        """States are float32; of the tokens before the next one there is what the convolution sees."""
        states = self.num_value_heads * self.key_dim * self.value_dim * torch.float32.itemsize
        return CacheBytes(state=states + (self.conv_width - 1) * sum(self.features) * itemsize)

    def check_layout(self, parallel: ParallelConfig) -> None:
        require_divided("tp", parallel.tp, "linear_num_key_heads", self.num_key_heads)


class GatedDeltaNet(Mixer):
    """The module of a :class:`DeltaNetSpec`; (T, hidden_size) -> (T, hidden_size).

    Queries, keys and values go through a short convolution; queries and keys are normalised, and the gated delta rule makes
    outputs of them (:mod:`rl_backend.primitive.gated_delta`), with a decay and a write strength of each head and token:

        g    = -exp(A_log) softplus(a + dt_bias)
        beta = sigmoid(b)
        out  = out_proj(norm(o) silu(z))

    Decays, write strengths, states and the norm of what they put out are float32 whatever the model's dtype.
    """

    def __init__(self, spec: DeltaNetSpec, hidden_size: int, norm: NormSpec) -> None:
        super().__init__()
        self.spec = spec
        features, heads = spec.features, spec.num_value_heads
        if spec.by_key_head:
            self.in_proj_qkvz = nn.Linear(hidden_size, sum(features) + features[2], bias=False)
            self.in_proj_ba = nn.Linear(hidden_size, 2 * heads, bias=False)
        else:
            self.in_proj_qkv = nn.Linear(hidden_size, sum(features), bias=False)
            self.in_proj_z = nn.Linear(hidden_size, features[2], bias=False)
            self.in_proj_b = nn.Linear(hidden_size, heads, bias=False)
            self.in_proj_a = nn.Linear(hidden_size, heads, bias=False)
        self.conv1d = CausalConv(sum(features), spec.conv_width)
        self.dt_bias = nn.Parameter(torch.ones(heads))
        self.decay = Decay(heads)
        # Unlike all others of these models it is stored as it is.
        self.norm = RMSNorm(spec.value_dim, norm.eps)
        self.out_proj = nn.Linear(features[2], hidden_size, bias=False)
        self.fused: FusedProjections | None = None
        self.over_ranks: RecurrenceOverRanks | None = None
        self.takes_fla = False

    def forward(self, x: Tensor, rotation: Rotation | None, segments: Segments) -> Tensor:
        spec, over_ranks = self.spec, self.over_ranks
        parents = () if segments.tree is None else segments.tree.parents
        mixed, gate, write, rate = self._project(x)
        mixed = silu(self.conv1d(mixed, segments.query_lens, self._history(mixed, segments)))
        # The number of heads is what a rank has of them.
        key_features = write.shape[1] * spec.num_key_heads // spec.num_value_heads * spec.key_dim
        query, key, value = mixed.split((key_features, key_features, mixed.shape[1] - 2 * key_features), dim=-1)
        query, key = (l2_normalised(part.unflatten(-1, (-1, spec.key_dim))) for part in (query, key))
        value = value.unflatten(-1, (-1, spec.value_dim))
        query, decay, beta = (
            query * spec.key_dim**-0.5,
            self.decay(softplus(widened(rate) + self.dt_bias)),
            sigmoid(widened(write)),
        )
        # Estimates of memory run on the meta device, which has no kernels.
        if self.takes_fla and not x.is_meta:
            if parents:
                raise ConfigError.of(_KERNEL, "fla", _NO_TREE)
            outputs = fla_gated_delta_rule(query, key, value, decay, beta, segments.cu_queries)
        else:
            rule = ChunkedDeltaRule(query, key, value, decay, beta, segments.query_lens, parents)
            outputs = rule.outputs(None if over_ranks is None else over_ranks.states(rule.transitions(), segments))
        gated = self.norm(widened(outputs)) * silu(widened(gate))
        return self.out_proj(gated.to(x.dtype).flatten(1))  # type: ignore[no-any-return]

    def _history(self, mixed: Tensor, segments: Segments) -> Tensor | None:
        """What the convolution sees before the tokens of each segment; None where that is nothing."""
        room, tree = self.spec.conv_width - 1, segments.tree
        if self.over_ranks is not None:
            assert tree is None, "with context parallelism sequences are computed whole"
            return self.over_ranks.history(mixed, room, segments)
        return None if tree is None else path_history(mixed, tree.lengths, tree.parents, room)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of this rank's heads: queries, keys and values beside each other, (N, features); gates, (N, value heads,
        value_dim); what write strengths and decays are made of, (N, value heads) each."""
        spec = self.spec
        if not spec.by_key_head:
            mixed = self.in_proj_qkv(x)
            gate = self.in_proj_z(x).unflatten(-1, (-1, spec.value_dim))
            mixed = mixed if self.fused is None else self.fused.of_my_heads(mixed)
            return mixed, gate, self.in_proj_b(x), self.in_proj_a(x)
        group = spec.num_value_heads // spec.num_key_heads
        sizes = (spec.key_dim, spec.key_dim, group * spec.value_dim, group * spec.value_dim)
        *parts, gate = self.in_proj_qkvz(x).unflatten(-1, (-1, sum(sizes))).split(sizes, dim=-1)
        write, rate = self.in_proj_ba(x).unflatten(-1, (-1, 2 * group)).split(group, dim=-1)
        gate = gate.flatten(1).unflatten(-1, (-1, spec.value_dim))
        return torch.cat([part.flatten(1) for part in parts], dim=-1), gate, write.flatten(1), rate.flatten(1)

    def choose_kernels(self, groups: ParallelGroups, config: NativeConfig) -> None:
        self.takes_fla = DecoderOptions.of(config.model_cfg).delta_kernel == "fla"
        if not self.takes_fla:
            return
        problems = {
            "flash-linear-attention is not installed (pip install flash-linear-attention)": not has_fla(),
            f"its kernels run on CUDA, not on {groups.device.type}": groups.device.type == "cpu",
            f"its kernels have no param_dtype={config.param_dtype!r}; set 'bfloat16'": config.param_dtype != "bfloat16",
            f"it does not say what ParallelConfig.cp={groups.parallel.cp} ranks tell each other": groups.parallel.cp > 1,
        }
        wrong = [problem for problem, is_there in problems.items() if is_there]
        ConfigError.refuse_all((_KERNEL, "fla", f"{problem}; or use 'torch'") for problem in wrong)

    def split(self, groups: ParallelGroups) -> None:
        if groups.cp_group.size() > 1:
            self.over_ranks = RecurrenceOverRanks(groups.cp_group)
        if groups.tp_group.size() == 1:
            return
        tensor = TensorParallel(groups.tp_mesh)
        fused = FusedProjections(self.spec.features, groups.tp_group)
        tensor.gather_input(self)
        if self.spec.by_key_head:
            tensor.column(self.in_proj_qkvz)
            tensor.column(self.in_proj_ba)
        else:
            self.fused = fused
            for linear in (self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a):
                tensor.column(linear)
        tensor.replicate(self.conv1d, {"weight": fused.rows_of_my_heads})
        tensor.rows(self)
        tensor.rows(self.decay)
        tensor.replicate(self.norm)
        tensor.row(self.out_proj)


class Decay(KeptInFloat32):
    """``-exp(A_log) * rate``; (T, heads) float32 -> (T, heads) float32."""

    # A module for the sake of its dtype: rounded to bfloat16, ``A_log`` would be wrong by up to 0.4 percent in a factor of
    # exponents, and a state is multiplied by their exponential at every token.
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.zeros(heads))

    def forward(self, rate: Tensor) -> Tensor:
        return -widened(self.A_log).exp() * rate
