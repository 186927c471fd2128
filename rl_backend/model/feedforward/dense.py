"""Feed-forward blocks of dense layers: gated (SwiGLU and its kin; Shazeer, arXiv 2002.05202) and without a gate."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor, nn

from rl_backend.contracts import ModelOptions, ParallelConfig, WeightName
from rl_backend.model.blocks import FeedForward, FeedForwardSpec, RouterInput, linear_names, require_divided
from rl_backend.parallel.groups import ParallelGroups
from rl_backend.parallel.tensor import TensorParallel
from rl_backend.primitive.activation import ACTIVATIONS, Activation


@dataclass(frozen=True)
class SwiGLUSpec(FeedForwardSpec):
    """Attributes:
    bias: whether all three projections have biases.
    activation: of the gate; ``silu`` makes the block SwiGLU, ``gelu`` GEGLU.
    """

    intermediate_size: int
    bias: bool = False
    activation: Activation = "silu"
    router = None

    def build(self, hidden_size: int, options: ModelOptions) -> FeedForward:
        return SwiGLU(hidden_size, self.intermediate_size, bias=self.bias, activation=self.activation)

    def weight_names(self, layer: str) -> Mapping[str, WeightName]:
        return linear_names(("gate_proj", "up_proj", "down_proj"), f"{layer}.mlp", bias=self.bias)

    def check_layout(self, parallel: ParallelConfig) -> None:
        require_divided("tp", parallel.tp, "intermediate_size", self.intermediate_size)


class SwiGLU(FeedForward):
    """``down(activation(gate(x)) * up(x))``; (..., hidden_size) -> (..., hidden_size)."""

    compiles = True

    def __init__(
        self, hidden_size: int, intermediate_size: int, *, bias: bool = False, activation: Activation = "silu"
    ) -> None:
        super().__init__()
        self.activate = ACTIVATIONS[activation]
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Tensor, router: RouterInput = RouterInput()) -> Tensor:  # noqa: B008 - immutable
        return self.down_proj(self.activate(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]

    def split(self, groups: ParallelGroups) -> Sequence[nn.Module]:
        if groups.tp_group.size() > 1:
            tensor = TensorParallel(groups.tp_mesh)
            tensor.gather_input(self)
            tensor.column(self.gate_proj)
            tensor.column(self.up_proj)
            tensor.row(self.down_proj)
        return ()


class MLPNames(NamedTuple):
    """How a family calls the two projections, within ``mlp`` of a layer."""

    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True)
class MLPSpec(FeedForwardSpec):
    intermediate_size: int
    activation: Activation
    bias: bool = False
    names: MLPNames = field(default_factory=MLPNames)
    router = None

    def build(self, hidden_size: int, options: ModelOptions) -> FeedForward:
        return MLP(hidden_size, self.intermediate_size, self.activation, bias=self.bias)

    def weight_names(self, layer: str) -> Mapping[str, WeightName]:
        stored = linear_names(self.names, f"{layer}.mlp", bias=self.bias)
        return dict(zip(linear_names(MLPNames(), "", bias=self.bias), stored.values(), strict=True))

    def check_layout(self, parallel: ParallelConfig) -> None:
        require_divided("tp", parallel.tp, "intermediate_size", self.intermediate_size)


class MLP(FeedForward):
    """``down(activation(up(x)))``; (..., hidden_size) -> (..., hidden_size)."""

    compiles = True

    def __init__(self, hidden_size: int, intermediate_size: int, activation: Activation, *, bias: bool = False) -> None:
        super().__init__()
        self.activate = ACTIVATIONS[activation]
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Tensor, router: RouterInput = RouterInput()) -> Tensor:  # noqa: B008 - immutable
        return self.down_proj(self.activate(self.up_proj(x)))  # type: ignore[no-any-return]

    def split(self, groups: ParallelGroups) -> Sequence[nn.Module]:
        if groups.tp_group.size() > 1:
            tensor = TensorParallel(groups.tp_mesh)
            tensor.gather_input(self)
            tensor.column(self.up_proj)
            tensor.row(self.down_proj)
        return ()
