"""Recorded routes: which experts every token went to, for routers that must choose the same again.

They are a part of a batch like any other:

- token field ``routed_experts``, (T, R, top_k) integers: the experts of a token in each of R layers, in any order, all
  different. uint8 holds them for up to 256 experts (:func:`route_dtype`).
- token field ``routed_experts_mask``, (T,) bool: False for tokens without routes, for which the router itself chooses: the
  last sampled token, which no rollout has computed. Without the field every token has routes.
- ``meta["routed_experts_layers"]``: ``moe``, one of the R for each layer with experts, in order (what a runtime records); or
  ``all``, one for every layer of the model, where those of layers without experts are not read (what vLLM returns).
- sequence fields ``routed_experts_version`` and ``weight_version``, (B,) integers, optional: the weights that computed the
  routes, and those that the sequence was sampled from; where the first is there they must be equal.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_backend.contracts.batch import PackedBatch, require_first_tokens
from rl_backend.contracts.errors import BatchError

ROUTES = "routed_experts"
ROUTES_MASK = "routed_experts_mask"
ROUTES_LAYERS = "routed_experts_layers"
ROUTES_VERSION = "routed_experts_version"


@dataclass(frozen=True)
class RoutedLayers:
    """The routers of a model.

    Attributes:
        num_experts: of each router.
        top_k: experts of a token.
        sparse: for each layer of the whole model, whether it has experts.
    """

    num_experts: int
    top_k: int
    sparse: tuple[bool, ...]

    @property
    def layers(self) -> tuple[int, ...]:
        """Numbers of the layers with experts."""
        return tuple(index for index, has_experts in enumerate(self.sparse) if has_experts)

    @property
    def dtype(self) -> torch.dtype:
        """What recorded routes have: :func:`route_dtype`."""
        return route_dtype(self.num_experts)

    def routes_of(self, batch: PackedBatch) -> tuple[Tensor, Tensor | None]:
        """The routes of a checked batch, (T, layers with experts, top_k), and its mask, (T,) bool, or None for no mask."""
        routes = batch.token_fields[ROUTES]
        if batch.meta[ROUTES_LAYERS] == "all" and not all(self.sparse):
            routes = routes[:, torch.tensor(self.layers, device=routes.device)]
        return routes, batch.token_fields.get(ROUTES_MASK)


def route_dtype(num_experts: int) -> torch.dtype:
    """The smallest type that holds the numbers of the experts; not uint16, on which torch computes hardly anything."""
    return next(dtype for dtype in (torch.uint8, torch.int16, torch.int32) if num_experts - 1 <= torch.iinfo(dtype).max)


def route_fields(routes: Tensor, num_tokens: int) -> dict[str, Tensor]:
    """The token fields of a sequence of ``num_tokens`` from the routes of its first tokens.

    Args:
        routes: (L, R, top_k) integers, L <= ``num_tokens``; a rollout lacks the last token's.

    Raises:
        BatchError: another shape or type.
    """
    require_first_tokens(ROUTES, routes, num_tokens)
    # numpy's arrays of more than 256 experts; see route_dtype.
    routes = routes.to(torch.int16) if routes.dtype == torch.uint16 else routes
    _require_integers(routes)
    padded = routes.new_zeros(num_tokens, *routes.shape[1:])
    padded[: routes.shape[0]] = routes
    return {ROUTES: padded, ROUTES_MASK: torch.arange(num_tokens, device=routes.device) < routes.shape[0]}


def check_routes(batch: PackedBatch, routers: RoutedLayers) -> None:
    """Refuses a batch whose routes are not ones of this model.

    Raises:
        BatchError: routes that are missing, of another shape or type, or of other weights than the sequence; an expert that
            does not exist, or that a token has twice in one layer; ``routed_experts_layers`` that does not say which layers.
    """
    routes = batch.token_field(ROUTES)
    indexing = batch.meta.get(ROUTES_LAYERS)
    if indexing not in ("moe", "all"):
        raise BatchError(
            f"meta[{ROUTES_LAYERS!r}]={indexing!r}: say which layers {ROUTES} is for: 'moe' (those with experts, in order) "
            "or 'all' (every layer)",
            name=ROUTES_LAYERS,
        )
    _require_integers(routes)
    num_layers = len(routers.layers if indexing == "moe" else routers.sparse)
    expected = (batch.num_tokens, num_layers, routers.top_k)
    if tuple(routes.shape) != expected:
        raise BatchError(
            f"{ROUTES} has shape {tuple(routes.shape)}; expected (tokens, layers, top_k) = {expected}: with "
            f"{ROUTES_LAYERS}={indexing!r} this model has {num_layers} layers, with {routers.top_k} of "
            f"{routers.num_experts} experts for a token; use routes of the same model",
            name=ROUTES,
        )
    mask = batch.token_fields.get(ROUTES_MASK)
    if mask is not None and (mask.dtype != torch.bool or mask.dim() != 1):
        raise BatchError(
            f"{ROUTES_MASK} has shape {tuple(mask.shape)} and dtype {mask.dtype}; expected (T,) bool, True for tokens that "
            "have routes",
            name=ROUTES_MASK,
        )
    _require_same_version(batch)
    routes, mask = routers.routes_of(batch)
    _require_experts(routes if mask is None else routes[mask], routers.num_experts)


def _require_integers(routes: Tensor) -> None:
    if routes.is_floating_point() or routes.is_complex() or routes.dtype == torch.bool:
        raise BatchError(f"{ROUTES} has dtype {routes.dtype}; expected integers, the numbers of experts", name=ROUTES)
    if routes.dtype in (torch.uint16, torch.uint32, torch.uint64):
        raise BatchError(
            f"{ROUTES} has dtype {routes.dtype}, with which torch cannot compute; use route_dtype(num_experts)", name=ROUTES
        )


def _require_same_version(batch: PackedBatch) -> None:
    if ROUTES_VERSION not in batch.sequence_fields:
        return
    if "weight_version" not in batch.sequence_fields:
        raise BatchError(
            f"sequence field {ROUTES_VERSION!r} without 'weight_version' to compare it with; give both or none",
            name=ROUTES_VERSION,
        )
    computed, sampled = batch.sequence_fields[ROUTES_VERSION], batch.sequence_fields["weight_version"]
    for name, versions in ((ROUTES_VERSION, computed), ("weight_version", sampled)):
        if versions.dim() != 1:
            raise BatchError(
                f"sequence field {name!r} has shape {tuple(versions.shape)}; expected ({batch.num_sequences},): one number "
                "per sequence",
                name=name,
            )
    differ = (computed != sampled).nonzero().flatten().tolist()
    if differ:
        first = differ[0]
        raise BatchError(
            f"{ROUTES} of sequence {first} was computed with weights of version {int(computed[first])}, the sequence "
            f"sampled from version {int(sampled[first])}; use routes of the same weights",
            name=ROUTES_VERSION,
            sequence=first,
        )


def _require_experts(routes: Tensor, num_experts: int) -> None:
    if routes.numel() == 0:
        return
    least, most = (int(value) for value in torch.aminmax(routes))
    if least < 0 or most >= num_experts:
        raise BatchError(
            f"{ROUTES} has expert {least if least < 0 else most}; the model has {num_experts} experts, 0 to "
            f"{num_experts - 1}; use routes of the same model, and {ROUTES_MASK} for tokens without routes",
            name=ROUTES,
        )
    repeats = [(routes[..., step:] == routes[..., :-step]).any() for step in range(1, routes.shape[-1])]
    if repeats and bool(torch.stack(repeats).any()):
        ordered = routes.sort(-1).values
        token, layer, place = (ordered[..., 1:] == ordered[..., :-1]).nonzero()[0].tolist()
        raise BatchError(
            f"{ROUTES} has expert {int(ordered[token, layer, place])} twice for one token in layer {layer} of those with "
            f"experts; each of top_k={routes.shape[-1]} must be another; use {ROUTES_MASK} for tokens without routes",
            name=ROUTES,
        )
