"""Recorded keys: which tokens each token attended to, for models whose indexers must choose the same again.

A batch with the token field ``indexed_keys`` is attended to with it, as it is routed with ``routed_experts`` in a replay:

- (T, R, top_k) int32 or int64: in each of the R layers with an indexer, in order, the tokens that a token attended to, by
  their places in the sequence, in any order, all different. A token at place p has the smaller of ``top_k`` and p + 1 of
  them, and -1 behind.
- A token whose numbers in a layer are all -1 has none, and the indexer chooses: the last sampled token, which no rollout has
  computed.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_backend.contracts.batch import PackedBatch, require_first_tokens
from rl_backend.contracts.errors import BatchError

KEYS = "indexed_keys"


@dataclass(frozen=True)
class IndexedLayers:
    """The indexers of a model.

    Attributes:
        top_k: tokens that a token attends to.
        layers: numbers of the layers with an indexer.
    """

    top_k: int
    layers: tuple[int, ...]


def key_fields(keys: Tensor, num_tokens: int) -> dict[str, Tensor]:
    """The token field of a sequence of ``num_tokens`` from the keys of its first tokens.

    Args:
        keys: (L, R, top_k) integers, L <= ``num_tokens``; a rollout lacks the last token's.

    Raises:
        BatchError: another shape or type.
    """
    require_first_tokens(KEYS, keys, num_tokens)
    _require_integers(keys)
    padded = keys.new_full((num_tokens, *keys.shape[1:]), -1)
    padded[: keys.shape[0]] = keys
    return {KEYS: padded}


def check_keys(batch: PackedBatch, indexed: IndexedLayers | None) -> None:
    """Refuses a batch with recorded keys that are not ones of this model.

    Args:
        indexed: None for a model that attends to no chosen keys.

    Raises:
        BatchError: no keys, or keys for such a model; of another shape or type; a place that does not exist or comes
            later, or that a token has twice in a layer; more or fewer of them than the token can see and ``top_k`` allows.
    """
    keys = batch.token_field(KEYS)
    if indexed is None or not indexed.layers:
        raise BatchError(
            f"token field {KEYS!r}: this model attends to all keys, so recorded ones would be ignored; leave the field out. "
            "Indexers are in the native runtime's deepseek_v32 and glm_moe_dsa, unless indexer='warm_up'",
            name=KEYS,
        )
    _require_integers(keys)
    expected = (batch.num_tokens, len(indexed.layers), indexed.top_k)
    if tuple(keys.shape) != expected:
        raise BatchError(
            f"{KEYS} has shape {tuple(keys.shape)}; expected (tokens, layers, top_k) = {expected}: this model has "
            f"{len(indexed.layers)} layers with an indexer, {list(indexed.layers)}, and index_topk={indexed.top_k}; use "
            "keys of the same model",
            name=KEYS,
        )
    _require_seen(keys, batch)


def _require_integers(keys: Tensor) -> None:
    if keys.dtype not in (torch.int32, torch.int64):
        raise BatchError(f"{KEYS} has dtype {keys.dtype}; expected int32 or int64: places in a sequence, and -1", name=KEYS)


def _require_seen(keys: Tensor, batch: PackedBatch) -> None:
    places = batch.position_ids.view(-1, 1)
    ordered = keys.sort(-1).values
    present = ordered >= 0
    counts, seen = present.sum(-1), (places + 1).clamp(max=keys.shape[-1])
    wrong = {
        "a place below -1": ordered[..., 0] < -1,
        "a place behind its own": ordered[..., -1] > places,
        "a place twice": ((ordered[..., 1:] == ordered[..., :-1]) & present[..., 1:]).any(-1),
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
