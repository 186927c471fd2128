"""Routers in a pass: routes that are replayed or recorded, and choices that are counted for balancing."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rl_backend.contracts import PackedBatch, RoutedLayers, UnsupportedError
from rl_backend.model import ModelInput
from rl_backend.model.decoder import MultiTokenPrediction
from rl_backend.parallel.context import TokenLayout
from rl_backend.parallel.groups import ParallelGroups
from rl_backend.primitive.router import Router, Routing
from rl_backend.runtime.balance import ExpertBalance, PassLoads
from rl_backend.runtime.interface import RouterReplay
from rl_backend.runtime.native.handle import NativeHandle
from rl_backend.runtime.native.layout import model_stages
from rl_backend.runtime.recording import gather_rows, gather_stages


class PassRouters:
    """What one ``forward_backward`` does at routers: it replays routes of the batch, records choices, or counts them.

    ``replayed`` and ``recorded`` are the layers with experts of the whole model, None where nothing is replayed or recorded.
    """

    def __init__(self, handle: NativeHandle, router_replay: RouterReplay, *, forward_only: bool) -> None:
        layers = None if router_replay == "off" else handle.routed_layers
        self._handle = handle
        self._routers = {} if layers is None else _routers_of_stages(handle, layers)
        self.replayed = layers if router_replay == "replay" else None
        self.recorded = layers if router_replay == "record" else None
        self._drafting = _drafting(handle.model) if handle.trains_second else set[nn.Module]()
        self.loads = PassLoads(None if forward_only or handle.optimizer is None else handle.optimizer.balance)
        # (micro-batch, stage) -> (T, layers, top_k)
        self._chosen: dict[tuple[int, int], Tensor] = {}

    @contextmanager
    def forward(self, micro_batch: int, stage: int, layout: TokenLayout | None, inputs: ModelInput) -> Generator[None]:
        """Around the forward pass of one stage of the model, or of the model as stage 0."""
        recorded, chosen = self.recorded, list[Tensor]()

        def keep(_: nn.Module, __: Any, routing: Routing) -> None:
            assert recorded is not None, "routes are recorded"
            chosen.append(routing.experts.to(recorded.dtype))

        def count(router: nn.Module, _: Any, routing: Routing) -> None:
            assert isinstance(router, Router), "hooks are on routers"
            rows = inputs.second if inputs.second is not None and router in self._drafting else inputs
            sequences = rows.sequences
            assert sequences is not None, "the runtime gives them"
            # Of shared rows, those of every token are counted, and no other.
            padding = rows.padding if sequences.rows is None else None
            self.loads.count(router, sequences.of_tokens(routing.experts), router.settings.num_experts, padding)

        # Taken off again: a recomputation in the backward pass must neither record nor count a second time.
        hooks = [
            router.register_forward_pre_hook(_require_routes, with_kwargs=True)
            if recorded is None
            else router.register_forward_hook(keep)
            for router in self._routers.get(stage, ())
        ]
        hooks += [router.register_forward_hook(count) for router in self.loads.routers(stage)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        if chosen:
            rows, groups = torch.stack(chosen, dim=1), self._handle.groups
            if layout is not None:
                rows = gather_rows(gather_rows(rows, groups.tp_group), groups.cp_group).index_select(0, layout.places)
            self._chosen[micro_batch, stage] = rows

    def outputs(self, data: Sequence[PackedBatch]) -> dict[str, list[Tensor]]:
        """``routed_experts`` on source ranks, of a pass that records routes. A collective over the replica."""
        if self.recorded is None:
            return {}
        groups = self._handle.groups
        places = _places_on_ranks(self._handle, self.recorded)
        routes = gather_stages(self._chosen, data, places, self.recorded, groups.pp_group, groups.device)
        return {"routed_experts": routes} if self._handle.has_outputs else {}


def expert_balance(stages: Mapping[int, nn.Module], rate: float, groups: ParallelGroups) -> ExpertBalance:
    """Of the routers with a bias in this rank's stages."""
    routers = {
        stage: [part for part in module.modules() if isinstance(part, Router) and part.expert_bias is not None]
        for stage, module in stages.items()
    }
    over = (groups.fsdp_mesh.get_group(), groups.tp_group)
    return ExpertBalance(routers, lambda router: router.expert_bias.values, rate, over)


def _routers_of_stages(handle: NativeHandle, layers: RoutedLayers) -> dict[int, list[Router]]:
    modules: Mapping[int, nn.Module] = handle.stages or {0: handle.model}
    routers = {stage: list(_routers(model)) for stage, model in modules.items()}
    expected = len(_places_on_ranks(handle, layers)[handle.groups.pp_group.rank()])
    found = sum(map(len, routers.values()))
    if found != expected:
        raise UnsupportedError(
            f"{handle.name} has {found} Router modules where ModelFamily.routed_layers of {handle.family.name!r} has "
            f"{expected} layers with experts; the two must agree",
            family=handle.family.name,
        )
    return routers


def _routers(model: nn.Module) -> Iterator[Router]:
    # A layer for multi-token prediction routes for itself.
    drafting = _drafting(model)
    yield from (module for module in model.modules() if isinstance(module, Router) and module not in drafting)


def _drafting(model: nn.Module) -> set[nn.Module]:
    """Modules of layers for multi-token prediction."""
    return {each for module in model.modules() if isinstance(module, MultiTokenPrediction) for each in module.modules()}


def _require_routes(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if (args[1] if len(args) > 1 else kwargs.get("experts")) is None:
        raise UnsupportedError(
            "router_replay='replay': the model's family calls a Router without experts, so it would choose for itself; pass "
            "each its layer of ModelInput.routes"
        )


def _places_on_ranks(handle: NativeHandle, routers: RoutedLayers) -> list[list[int]]:
    """For each rank of the pipeline, the places of its layers among the layers with experts, in the order of its stages."""
    place = {layer: index for index, layer in enumerate(routers.layers)}
    if not handle.stages:
        return [list(place.values())]
    native = handle.options
    ranks = [model_stages(handle.family, handle.architecture, native, rank) for rank in range(native.parallel.pp)]
    return [[place[layer] for stage in stages.values() for layer in stage.layers if layer in place] for stages in ranks]
