"""Megatron's routers: routes recorded and replayed, loads counted and balanced."""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay as MegatronReplay
from torch import Tensor, nn

from rl_backend.contracts import PackedBatch, RoutedLayers, UnsupportedError
from rl_backend.parallel.collectives import gather_objects
from rl_backend.runtime.balance import ExpertBalance, PassLoads
from rl_backend.runtime.bridge.megatron.groups import BridgeGroups
from rl_backend.runtime.bridge.passes.batch import LaidOut
from rl_backend.runtime.interface import RouterReplay
from rl_backend.runtime.recording import gather_rows, gather_stages, routes_to_replay


class LayerRoutes(MegatronReplay):
    """What one router takes and chooses for the micro-batch that its chunk is working on.

    Attributes:
        layer_number: Megatron's, from 1 on.
        replayed: (rows, top_k) experts to take, -1 in the rows for which the router chooses; None where it chooses for all.
        recorded: what it chose last, (rows, top_k) int64, while ``recording``.
        observe: is given (rows, top_k) experts that were taken; None where nobody asks.
    """

    # Megatron's own has no tokens without routes, finds its layer by the order in which the process built its models, and
    # takes recomputations to come in the order of the forward passes. This one is in no list of the process's.

    def __init__(self, layer_number: int) -> None:
        self.layer_number = layer_number
        self.replayed: Tensor | None = None
        self.recorded: Tensor | None = None
        self.recording = False
        self.observe: Callable[[Tensor], None] | None = None

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert default_compute_topk is not None, "Megatron passes its own choice"
        values, experts = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.replayed is not None:
            experts = torch.where(self.replayed < 0, experts, self.replayed)
            values = scores.gather(1, experts)
        if self.recording:
            self.recorded = experts
        if self.observe is not None:
            self.observe(experts)
        return values, experts


@dataclass(frozen=True)
class ModelRouters:
    layers: RoutedLayers
    chunks: tuple[tuple[LayerRoutes, ...], ...]  # of each of this rank's chunks, in the order of its layers
    places: tuple[tuple[int, ...], ...]  # for each rank of the pipeline, its layers' places among those with experts


def connect_routers(models: Sequence[nn.Module], provider: Any, groups: BridgeGroups) -> ModelRouters | None:
    """Gives every router of a model its :class:`LayerRoutes`; None for a model without. A collective over the pipeline."""
    if provider.num_moe_experts is None:
        return None
    layers = RoutedLayers(provider.num_moe_experts, provider.moe_router_topk, _sparse(provider))
    place = {layer: index for index, layer in enumerate(layers.layers)}
    chunks = []
    for model in models:
        routers = [module for module in model.modules() if isinstance(module, TopKRouter)]
        for router in routers:
            router.router_replay = LayerRoutes(router.layer_number)
            # See expert_balance, whose ExpertBalance moves biases instead.
            router.enable_expert_bias, router.frozen_expert_bias = False, True
        chunks.append(tuple(router.router_replay for router in routers))
    mine = tuple(each.layer_number - 1 for chunk in chunks for each in chunk)
    found = gather_objects(mine, groups.pg.pp)
    if sorted(chain.from_iterable(found)) != list(layers.layers):
        raise UnsupportedError(
            f"Megatron built routers in the layers {sorted(chain.from_iterable(found))}; moe_layer_freq names "
            f"{list(layers.layers)}: it would not be known which routes are whose",
            moe_layer_freq=str(provider.moe_layer_freq),
        )
    return ModelRouters(layers, tuple(chunks), tuple(tuple(place[layer] for layer in each) for each in found))


def _sparse(provider: Any) -> tuple[bool, ...]:
    frequency = provider.moe_layer_freq
    if isinstance(frequency, int):
        return tuple(layer % frequency == 0 for layer in range(provider.num_layers))
    return tuple(bool(each) for each in frequency)


def require_routing_by_scores(provider: Any, router_replay: RouterReplay) -> None:
    """Raises :class:`UnsupportedError` for a setting with which Megatron would route differently."""
    if router_replay == "off":
        return
    balancing = provider.moe_router_load_balancing_type
    kinds = {balancing} if isinstance(balancing, str) else set(balancing)
    coefficients = provider.moe_aux_loss_coeff
    balances = any("aux_loss" in kind for kind in kinds) and any(
        each > 0 for each in ([coefficients] if isinstance(coefficients, int | float) else coefficients)
    )
    reasons = {
        "moe_router_fusion": (provider.moe_router_fusion, "its kernel chooses the experts itself; use False"),
        "moe_router_load_balancing_type": (
            "sinkhorn" in kinds,
            "it does not choose experts by their scores; use another",
        ),
        "moe_aux_loss_coeff": (
            balances and router_replay == "replay",
            "Megatron balances the experts that it would have chosen, not the replayed ones; use 0",
        ),
    }
    for name, (refused, reason) in reasons.items():
        if refused:
            value = getattr(provider, name)
            raise UnsupportedError(
                f"router_replay={router_replay!r} with BridgeConfig.override_transformer_config {name}={value!r}: {reason}",
                router_replay=router_replay,
                setting=name,
            )


class PassRoutes(AbstractContextManager["PassRoutes"]):
    """What one ``forward_backward`` does about routes. A context: routers choose for themselves again when it is left."""

    def __init__(self, routers: ModelRouters | None, groups: BridgeGroups, router_replay: RouterReplay) -> None:
        self._routers = None if router_replay == "off" else routers
        self._groups = groups
        self._replays = router_replay == "replay"
        # Chunk -> routes of the micro-batch that it works on: (rows, layers with experts of the model, top_k).
        self._bound: dict[int, Tensor | None] = {}
        self._chosen: dict[tuple[int, int], Tensor] = {}  # (micro-batch, chunk) -> (T, layers, top_k)

    def __exit__(self, *_: object) -> None:
        for chunk in self._bound:
            self._bind(chunk, None)

    @contextmanager
    def forward(self, micro_batch: int, chunk: int, laid_out: LaidOut) -> Generator[None]:
        """Around the forward pass of a chunk. What is computed again in the backward pass is not recorded twice."""
        routers = self._routers
        if routers is None:
            yield
            return
        if self._replays:
            self._bind(chunk, self._rows(laid_out, routers))
            yield
            return
        for each in routers.chunks[chunk]:
            each.recording = True
        try:
            yield
        finally:
            for each in routers.chunks[chunk]:
                each.recording = False
        if routers.chunks[chunk]:
            self._chosen[micro_batch, chunk] = self._of_tokens(routers, chunk, laid_out)

    def before_backward(self, chunk: int, output: Tensor) -> None:
        """Has the backward pass from ``output``, which the chunk has just computed, find its routes again."""
        # Layers that are computed again route once more, and other micro-batches come through the chunk before that.
        if self._routers is None or not self._replays or not output.requires_grad:
            return
        routes = self._bound[chunk]
        output.register_hook(lambda _: self._bind(chunk, routes))

    def outputs(self, data: Sequence[PackedBatch]) -> dict[str, list[Tensor]]:
        """``routed_experts`` on source ranks, when routes are recorded; then a collective over the pipeline."""
        routers, groups = self._routers, self._groups
        if routers is None or self._replays:
            return {}
        routes = gather_stages(self._chosen, data, routers.places, routers.layers, groups.pg.pp, groups.device)
        return {"routed_experts": routes} if groups.has_outputs else {}

    def _bind(self, chunk: int, routes: Tensor | None) -> None:
        assert self._routers is not None, "only models with routers have bound chunks"
        self._bound[chunk] = routes
        # The places of a rank are those of its chunks, one chunk after the other.
        first = sum(map(len, self._routers.chunks[:chunk]))
        layers = self._routers.chunks[chunk]
        places = self._routers.places[self._groups.pg.pp.rank()][first : first + len(layers)]
        for place, each in zip(places, layers, strict=True):
            each.replayed = None if routes is None else routes[:, place]

    def _rows(self, laid_out: LaidOut, routers: ModelRouters) -> Tensor:
        """The routes of the batch in the rows of this rank's hidden states, -1 for padding."""
        routes = routes_to_replay(laid_out.batch, routers.layers)
        rows = routes.new_full((laid_out.shape[0] * laid_out.shape[1], *routes.shape[1:]), -1)
        rows[laid_out.places] = routes
        group = self._groups.pg.tp
        mine: Tensor = rows.chunk(group.size())[group.rank()]
        return mine

    def _of_tokens(self, routers: ModelRouters, chunk: int, laid_out: LaidOut) -> Tensor:
        chosen = []
        for each in routers.chunks[chunk]:
            assert each.recorded is not None, "its layer has run"
            chosen.append(each.recorded.to(routers.layers.dtype))
            each.recorded = None
        rows = gather_rows(torch.stack(chosen, dim=1), self._groups.pg.tp)
        return rows.index_select(0, laid_out.places)


def expert_balance(models: Sequence[nn.Module], rate: float, groups: BridgeGroups) -> ExpertBalance:
    """Of the routers with a bias in this rank's chunks, without their wrappers, once routes are connected."""
    # Megatron moves the bias in forward_backward, before it is known that a step is taken, and its count of loads fails on a
    # mask of padding.
    routers = {
        number: [part for part in model.modules() if isinstance(part, TopKRouter) and part.expert_bias is not None]
        for number, model in enumerate(models)
    }
    return ExpertBalance(routers, lambda router: router.expert_bias, rate, (groups.dp_group, groups.pg.tp))


@contextmanager
def counted(loads: PassLoads, chunk: int, laid_out: LaidOut, tp_group: dist.ProcessGroup) -> Generator[None]:
    """Around the forward pass of a chunk whose choices are counted; a recomputation runs outside of it."""
    routers = loads.routers(chunk)
    if not routers:
        yield
        return
    rows, columns = laid_out.shape
    padding = torch.ones(rows * columns, dtype=torch.bool, device=laid_out.places.device)
    padding[laid_out.places] = False
    mine = padding.chunk(tp_group.size())[tp_group.rank()]
    for router in routers:
        router.router_replay.observe = partial(loads.count, router, num_experts=len(router.expert_bias), padding=mine)
    try:
        yield
    finally:
        for router in routers:
            router.router_replay.observe = None
