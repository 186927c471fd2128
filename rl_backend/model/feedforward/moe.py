"""Mixtures of experts as feed-forward blocks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor, nn

from rl_backend.contracts import ModelOptions, PackedWeight, ParallelConfig, WeightName
from rl_backend.model.blocks import FeedForward, FeedForwardSpec, RouterInput, linear_names, require_divided
from rl_backend.model.feedforward.dense import SwiGLU
from rl_backend.model.options import EXPERT_BIAS_OPTIONS, ROUTER_OPTIONS, DecoderOptions
from rl_backend.parallel.collectives import sum_over
from rl_backend.parallel.expert import AllToAllDispatcher
from rl_backend.parallel.groups import ParallelGroups
from rl_backend.parallel.tensor import TensorParallel, distribute_experts
from rl_backend.primitive.activation import sigmoid
from rl_backend.primitive.experts import ClampedExperts, Experts, SwiGLUExperts, TokenShare
from rl_backend.primitive.router import Router, RouterLossCoefficients, RouterSettings, Routing, with_router_losses


class ExpertNames(NamedTuple):
    """How a family calls a mixture within a layer, projections within an expert, and other modules within the mixture."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    expert_bias: str = "gate.e_score_correction_bias"
    shared: str = "shared_expert"
    router: str = "gate"


@dataclass(frozen=True)
class MoESpec(FeedForwardSpec):
    """Attributes:
    intermediate_size: of one expert.
    shared_intermediate_size, shared_gate: as in :class:`MoE`.
    clamped: experts with clamped gates and biases, which directories hold in one tensor for all experts, as gpt-oss does.
    """

    router: RouterSettings
    intermediate_size: int
    names: ExpertNames = field(default_factory=ExpertNames)
    shared_intermediate_size: int = 0
    shared_gate: bool = False
    clamped: bool = False

    @property
    def options(self) -> frozenset[str]:
        return ROUTER_OPTIONS | (EXPERT_BIAS_OPTIONS if self.router.expert_bias else frozenset())

    def build(self, hidden_size: int, options: ModelOptions) -> FeedForward:
        chosen = DecoderOptions.of(options)
        sizes = (self.router.num_experts, hidden_size, self.intermediate_size)
        return MoE(
            hidden_size,
            self.intermediate_size,
            self.router,
            shared_intermediate_size=self.shared_intermediate_size,
            shared_gate=self.shared_gate,
            coefficients=RouterLossCoefficients(
                chosen.router_aux_loss_coef, chosen.router_z_loss_coef, chosen.router_sequence_loss_coef
            ),
            experts=ClampedExperts(*sizes) if self.clamped else SwiGLUExperts(*sizes),
            freeze_router=chosen.freeze_router,
        )

    def expert_names(self, block: str) -> Mapping[str, WeightName]:
        if self.clamped:
            # Parameters lie as tensors of directories do: nothing is converted.
            return {name: f"{block}.{name}" for name in ClampedExperts.intermediate_dims}
        experts = range(self.router.num_experts)

        def packed(shape: tuple[int, ...], *projections: str) -> PackedWeight:
            stored = tuple(f"{block}.{expert}.{name}.weight" for expert in experts for name in projections)
            return PackedWeight((len(experts), *shape), stored)

        return {
            "gate_up_proj": packed((2,), self.names.gate, self.names.up),
            "down_proj": packed((), self.names.down),
        }

    def weight_names(self, layer: str) -> Mapping[str, WeightName]:
        block = f"{layer}.{self.names.block}"
        router = linear_names((self.names.router,), block, bias=self.router.bias)
        names = dict(zip(linear_names(("gate",), "", bias=self.router.bias), router.values(), strict=True))
        if self.router.expert_bias:
            names["gate.expert_bias.values"] = f"{block}.{self.names.expert_bias}"
        names |= {f"experts.{name}": stored for name, stored in self.expert_names(f"{block}.experts").items()}
        if self.shared_intermediate_size:
            shared = linear_names(("gate_proj", "up_proj", "down_proj"), f"{block}.{self.names.shared}", bias=False)
            names |= {f"shared_expert.{name}": stored for name, stored in shared.items()}
        if self.shared_gate:
            names["shared_expert_gate.weight"] = f"{block}.{self.names.shared}_gate.weight"
        return names

    def check_layout(self, parallel: ParallelConfig) -> None:
        require_divided("ep", parallel.ep, "num_experts", self.router.num_experts)
        require_divided("etp", parallel.etp, "moe_intermediate_size", self.intermediate_size)
        if self.shared_intermediate_size:
            require_divided("tp", parallel.tp, "shared_expert_intermediate_size", self.shared_intermediate_size)


class MoE(FeedForward):
    """Each token goes through ``top_k`` of E experts and, where there are any, through the shared ones.

    Args:
        shared_intermediate_size: of the experts that see every token, taken together (DeepSeekMoE, arXiv 2401.06066,
            section 3.2); 0 for none.
        shared_gate: multiply their output by ``sigmoid(x @ shared_expert_gate)``, as Qwen2-MoE does.
        experts: those to choose between; None for SwiGLU.

    Attributes:
        sum_over_ranks: adds a tensor up, in place, over the ranks that share the tokens of a micro-batch, for the router's
            losses; None where this one has all of them.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        router: RouterSettings,
        *,
        shared_intermediate_size: int = 0,
        shared_gate: bool = False,
        coefficients: RouterLossCoefficients = RouterLossCoefficients(),  # noqa: B008 - immutable
        experts: Experts | None = None,
        freeze_router: bool = False,
    ) -> None:
        super().__init__()
        self.coefficients = coefficients
        self.sum_over_ranks: Callable[[Tensor], object] | None = None
        self.gate = Router(hidden_size, router)
        for parameter in (self.gate.weight, self.gate.bias):
            if parameter is not None:
                parameter.requires_grad_(not freeze_router)
        self.experts = experts or SwiGLUExperts(router.num_experts, hidden_size, intermediate_size)
        self.shared_expert = SwiGLU(hidden_size, shared_intermediate_size) if shared_intermediate_size else None
        self.shared_expert_gate = nn.Linear(hidden_size, 1, bias=False) if shared_gate else None

    def forward(self, x: Tensor, router: RouterInput = RouterInput()) -> Tensor:  # noqa: B008 - immutable
        routed: Tensor = self.experts(x, self.route(x, router))
        if self.shared_expert is None:
            return routed
        shared: Tensor = self.shared_expert(x)
        if self.shared_expert_gate is not None:
            shared = sigmoid(self.shared_expert_gate(x)) * shared
        return routed + shared

    def route(self, x: Tensor, router: RouterInput = RouterInput()) -> Routing:  # noqa: B008 - immutable
        """Chooses experts for the tokens, or takes those of ``router``, and weights them."""
        routing: Routing = self.gate(x, router.experts)
        return with_router_losses(
            routing,
            self.gate.settings,
            self.coefficients,
            router.loss_weight,
            router.padding,
            self.sum_over_ranks,
            router.sequences,
        )

    def split(self, groups: ParallelGroups) -> Sequence[nn.Module]:
        if groups.token_group.size() > 1:
            self.sum_over_ranks = sum_over(groups.token_group)
        if groups.expert_group.size() > 1:
            ep, etp, num_experts = groups.parallel.ep, groups.parallel.etp, self.gate.settings.num_experts
            self.experts.dispatch = AllToAllDispatcher(groups.expert_group, num_experts, ep, etp)
            distribute_experts(self.experts, groups.ep_mesh)
            self.experts.first_expert = groups.ep_mesh.get_local_rank(0) * num_experts // ep
        if groups.tp_group.size() > 1:
            tensor = TensorParallel(groups.tp_mesh)
            tensor.replicate(self.gate)
            if self.gate.expert_bias is not None:
                tensor.replicate(self.gate.expert_bias)
            rank, expert_ranks = groups.tp_group.rank(), groups.expert_group.size()
            self.experts.share = TokenShare(rank, rank // expert_ranks, -(-groups.tp_group.size() // expert_ranks))
            if self.shared_expert is not None:
                self.shared_expert.split(groups)
            if self.shared_expert_gate is not None:
                tensor.replicate_for_own_tokens(self.shared_expert_gate)
        # With ep=etp=tp=1 experts have their copies where the rest of the layer has, and are sharded with it.
        return () if groups.expert_group.size() == groups.tp_group.size() == 1 else (self.experts,)
