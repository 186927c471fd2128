"""Replay: recorded routes of experts, keys of sparse attention and words of sampling, which a model must choose again.

Routes are the experts that every token went to. They are a part of a batch like any other:

- token field ``routed_experts``, (T, R, top_k) integers: the experts of a token in each of R layers, in any order, all
  different. uint8 holds them for up to 256 experts (:func:`route_dtype`).
- token field ``routed_experts_mask``, (T,) bool: False for tokens without routes, for which the router itself chooses: the
  last sampled token, which no rollout has computed. Without the field every token has routes.
- ``meta["routed_experts_layers"]``: ``moe``, one of the R for each layer with experts, in order (what a runtime records); or
  ``all``, one for every layer of the model, where those of layers without experts are not read (what vLLM returns).
- sequence fields ``routed_experts_version`` and ``weight_version``, (B,) integers, optional: the weights that computed the
  routes, and those that the sequence was sampled from; where the first is there they must be equal.

Keys are the tokens that each token attended to, in models with indexers:

- token field ``indexed_keys``, (T, R, top_k) int32 or int64: in each of the R layers with an indexer, in order, the tokens
  that a token attended to, by their places in the sequence, in any order, all different. A token at place p has the smaller
  of ``top_k`` and p + 1 of them, and -1 behind. Where all are -1 the indexer chooses, as for the last sampled token.

Words are what an engine sampled from, with ``top_p``, ``top_k`` or ``min_p`` in the batch's ``meta``:

- token field ``sampling_mask``, (T, K) int32 or int64: at the position that predicts a token, the ids of the words that it
  was sampled from, in ascending order, and -1 behind; -1 alone where no log-prob is asked for. Log-probs and entropy are
  over these words. What the model itself would keep is compared with them, and not used.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_backend.contracts.batch import SAMPLING_MASK, TARGET_IDS, PackedBatch
from rl_backend.contracts.errors import BatchError

ROUTES = "routed_experts"
ROUTES_MASK = "routed_experts_mask"
ROUTES_LAYERS = "routed_experts_layers"
ROUTES_VERSION = "routed_experts_version"
KEYS = "indexed_keys"
# torch computes hardly anything with wide unsigned integers.
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class RoutedLayers:
    """The routers of a model; ``sparse``: for each layer of the whole model, whether it has experts."""

    num_experts: int
    top_k: int
    sparse: tuple[bool, ...]

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(index for index, has_experts in enumerate(self.sparse) if has_experts)

    @property
    def dtype(self) -> torch.dtype:
        return route_dtype(self.num_experts)

    def routes_of(self, batch: PackedBatch) -> tuple[Tensor, Tensor | None]:
        """The routes of a checked batch, (T, layers with experts, top_k), and its mask, (T,) bool, or None for no mask."""
        routes = batch.token_fields[ROUTES]
        if batch.meta[ROUTES_LAYERS] == "all" and not all(self.sparse):
            routes = routes[:, torch.tensor(self.layers, device=routes.device)]
        return routes, batch.token_fields.get(ROUTES_MASK)


@dataclass(frozen=True)
class IndexedLayers:
    """The indexers of a model: the layers that have one, and how many tokens a token attends to."""

    top_k: int
    layers: tuple[int, ...]


def route_dtype(num_experts: int) -> torch.dtype:
    # Not uint16, on which torch computes hardly anything.
    return next(dtype for dtype in (torch.uint8, torch.int16, torch.int32) if num_experts - 1 <= torch.iinfo(dtype).max)


def route_fields(routes: Tensor, num_tokens: int) -> dict[str, Tensor]:
    """The token fields of a sequence of ``num_tokens`` from the routes of its first tokens, (L, R, top_k) integers."""
    # vLLM's arrays of more than 256 experts are uint16.
    routes = routes.to(torch.int16) if routes.dtype == torch.uint16 else routes
    padded = routes.new_zeros(num_tokens, *routes.shape[1:])
    padded[: routes.shape[0]] = routes
    return {ROUTES: padded, ROUTES_MASK: torch.arange(num_tokens, device=routes.device) < routes.shape[0]}


def key_fields(keys: Tensor, num_tokens: int) -> dict[str, Tensor]:
    """As :func:`route_fields`, of the keys of its first tokens."""
    padded = keys.new_full((num_tokens, *keys.shape[1:]), -1)
    padded[: keys.shape[0]] = keys
    return {KEYS: padded}


def check_routes(batch: PackedBatch, routers: RoutedLayers) -> None:
    """Raises :class:`BatchError` for routes that are not ones of this model, or of other weights than their sequence."""
    routes, mask = batch.token_field(ROUTES), batch.token_fields.get(ROUTES_MASK)
    indexing = batch.meta.get(ROUTES_LAYERS)
    num_layers = len(routers.sparse if indexing == "all" else routers.layers)
    expected = (batch.num_tokens, num_layers, routers.top_k)
    problems: dict[str, str] = {}
    if indexing not in ("moe", "all"):
        problems[ROUTES_LAYERS] = (
            f"meta[{ROUTES_LAYERS!r}]={indexing!r}: say which layers {ROUTES} is for: 'moe' (those with experts, in order) "
            "or 'all' (every layer)"
        )
    elif tuple(routes.shape) != expected:
        problems[ROUTES] = (
            f"{ROUTES} has shape {tuple(routes.shape)}; expected (tokens, layers, top_k) = {expected}: with "
            f"{ROUTES_LAYERS}={indexing!r} this model has {num_layers} layers, with {routers.top_k} of "
            f"{routers.num_experts} experts for a token; use routes of the same model"
        )
    if routes.dtype not in _INTEGERS:
        problems[ROUTES] = f"{ROUTES} has dtype {routes.dtype}; expected integers as of route_dtype(num_experts)"
    if mask is not None and (mask.dtype != torch.bool or mask.dim() != 1):
        problems[ROUTES_MASK] = (
            f"{ROUTES_MASK} has shape {tuple(mask.shape)} and dtype {mask.dtype}; expected (T,) bool, True for tokens that "
            "have routes"
        )
    if problems:
        raise BatchError("; ".join(problems.values()), name=next(iter(problems)))
    _require_same_version(batch)
    routes, mask = routers.routes_of(batch)
    _require_experts(routes if mask is None else routes[mask], routers.num_experts)


def _require_same_version(batch: PackedBatch) -> None:
    if ROUTES_VERSION not in batch.sequence_fields:
        return
    computed, sampled = (batch.sequence_fields.get(name) for name in (ROUTES_VERSION, "weight_version"))
    if computed is None or sampled is None or computed.dim() != 1 or sampled.dim() != 1:
        raise BatchError(
            f"sequence fields {ROUTES_VERSION!r} and 'weight_version' must both have shape ({batch.num_sequences},), one "
            f"number per sequence; give both or none",
            name=ROUTES_VERSION,
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
    # Shifted comparisons find a repeat without sorting, which is slow; only the message needs the sorted places.
    repeats = [(routes[..., step:] == routes[..., :-step]).any() for step in range(1, routes.shape[-1])]
    if repeats and bool(torch.stack(repeats).any()):
        ordered = routes.sort(-1).values
        token, layer, place = (ordered[..., 1:] == ordered[..., :-1]).nonzero()[0].tolist()
        raise BatchError(
            f"{ROUTES} has expert {int(ordered[token, layer, place])} twice for one token in layer {layer} of those with "
            f"experts; each of top_k={routes.shape[-1]} must be another; use {ROUTES_MASK} for tokens without routes",
            name=ROUTES,
        )


def check_keys(batch: PackedBatch, indexed: IndexedLayers | None) -> None:
    """Raises :class:`BatchError` for recorded keys that are not ones of this model; ``indexed`` is None without indexers."""
    keys = batch.token_field(KEYS)
    if indexed is None or not indexed.layers:
        raise BatchError(
            f"token field {KEYS!r}: this model attends to all keys, so recorded ones would be ignored; leave the field out. "
            "Indexers are in the native runtime's deepseek_v32 and glm_moe_dsa, unless indexer='warm_up'",
            name=KEYS,
        )
    expected = (batch.num_tokens, len(indexed.layers), indexed.top_k)
    if tuple(keys.shape) != expected or keys.dtype not in (torch.int32, torch.int64):
        raise BatchError(
            f"{KEYS} has shape {tuple(keys.shape)} and dtype {keys.dtype}; expected int32 or int64 and (tokens, layers, "
            f"top_k) = {expected}: this model has {len(indexed.layers)} layers with an indexer, {list(indexed.layers)}, and "
            f"index_topk={indexed.top_k}; use keys of the same model",
            name=KEYS,
        )
    _require_seen(keys, batch)


def _require_seen(keys: Tensor, batch: PackedBatch) -> None:
    places = batch.position_ids.view(-1, 1)
    ordered = keys.sort(-1).values
    present = ordered >= 0
    counts, seen = present.sum(-1), (places + 1).clamp(max=keys.shape[-1])
    wrong = {
        "a place below -1": ordered[..., 0] < -1,
        "a place behind its own": ordered[..., -1] > places,
        "a place twice": ((ordered[..., 1:] == ordered[..., :-1]) & present[..., 1:]).any(-1),
        # None at all is right: the indexer chooses for the last sampled token.
        "more or fewer places than it can see": (counts != seen) & (counts > 0),
    }
    for problem, found in wrong.items():
        if bool(found.any()):
            token, layer = found.nonzero()[0].tolist()
            raise BatchError(
                f"{KEYS} has {problem} for token {token} of the micro-batch, at place {int(places[token])} of its sequence, "
                f"in layer {layer} of those with an indexer: {keys[token, layer].tolist()[:8]}; expected the smaller of "
                f"top_k={keys.shape[-1]} and the place + 1 different ones, the last its own at most; or -1 alone, for the "
                "indexer to choose",
                name=KEYS,
            )


def check_mask(batch: PackedBatch, vocab_size: int) -> None:
    """Raises :class:`BatchError` for words that the batch's tokens cannot have been sampled from."""
    mask = batch.token_field(SAMPLING_MASK)
    if mask.dim() != 2 or mask.shape[1] == 0 or mask.dtype not in (torch.int32, torch.int64):
        raise BatchError(
            f"{SAMPLING_MASK} has shape {tuple(mask.shape)} and dtype {mask.dtype}; expected int32 or int64 and (tokens, "
            "words), at least one: the ids of the words that each next token was sampled from, -1 behind",
            name=SAMPLING_MASK,
        )
    if batch.cuts is None:
        raise BatchError(
            f"{SAMPLING_MASK} without top_p, top_k or min_p in meta: give those that the engine sampled with, or leave the "
            "field out",
            name=SAMPLING_MASK,
        )
    labels, before, behind = batch.labels, mask[:, :-1], mask[:, 1:]
    wrong = {
        f"a word outside of the vocabulary, 0 to {vocab_size - 1}": ((mask < -1) | (mask >= vocab_size)).any(1),
        "words that do not ascend": ((behind != -1) & ((behind <= before) | (before == -1))).any(1),
        "no place for the token that was sampled": (labels != -100) & (mask != labels[:, None]).all(1),
    }
    for problem, found in wrong.items():
        if bool(found.any()):
            token = int(found.nonzero()[0])
            raise BatchError(
                f"{SAMPLING_MASK} has {problem} at token {token} of the micro-batch, before token {int(labels[token])}: "
                f"{mask[token].tolist()[:8]}; use the mask that came with the sample, and {TARGET_IDS} -100 before tokens "
                "that were not sampled",
                name=SAMPLING_MASK,
            )
