"""verl's recorded routes, those of the policy itself (R2) or of the rollout (R3), as a runtime takes them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu

from adapters.verl.options.settings import RouterReplayMode
from rl_backend.contracts import BatchError
from rl_backend.contracts.routed_experts import ROUTES, ROUTES_MASK, route_fields
from rl_backend.runtime import RouterReplay


def router_replay(data: TensorDict, mode: RouterReplayMode, *, forward_only: bool) -> RouterReplay:
    """What a pass does with routes: R2 records them with log-probs, and later passes replay; R3 replays in both.

    verl sets ``enable_routing_replay`` in the batches of the actor, and not in those of the reference.
    """
    if mode == "disabled" or not tu.get(data, "enable_routing_replay", False):
        return "off"
    if mode == "R2" and forward_only and data.get(ROUTES, None) is None:
        return "record"
    return "replay"


@dataclass(frozen=True)
class BatchRoutes:
    """The routes that a batch brings for a replay, jagged (B, L_i or L_i - 1, layers, top_k).

    A rollout has no routes for the last token, and verl's padding none at all: sequences without response. There the router
    chooses.

    Attributes:
        mode: ``R2`` or ``R3``.
        num_layers: of the model; routes of as many layers are indexed by them, others by layers with experts.
    """

    mode: RouterReplayMode
    num_layers: int

    def require(self, data: TensorDict) -> None:
        """Raises :class:`BatchError` for routes that are missing, not jagged integers, or of another number of tokens."""
        routes = data.get(ROUTES, None)
        if routes is None:
            source = (
                "compute_log_prob records"
                if self.mode == "R2"
                else "the rollout returns (enable_rollout_routing_replay=True)"
            )
            raise BatchError(f"router_replay.mode={self.mode!r}: the batch has no {ROUTES!r}, which {source}", name=ROUTES)
        if not routes.is_nested:
            raise BatchError(
                f"{ROUTES} is a dense tensor of shape {tuple(routes.shape)}; expected a jagged one", name=ROUTES
            )
        route_fields(routes.values()[:0], 0)
        counts, lengths = (data[name].offsets().diff().tolist() for name in (ROUTES, "input_ids"))
        for index, (known, length) in enumerate(zip(counts, lengths, strict=True)):
            if known != length and not (self.mode == "R3" and known == length - 1):
                raise BatchError(
                    f"{ROUTES} of sequence {index} has {known} rows for {length} tokens; expected as many"
                    + (", or one less" if self.mode == "R3" else ""),
                    name=ROUTES,
                    sequence=index,
                )

    def of(self, data: TensorDict) -> tuple[dict[str, Tensor], str]:
        """Token fields, (T, ...), of a micro-batch of a batch with such routes, and which layers they are for."""
        routes = data[ROUTES]
        lengths = data["input_ids"].offsets().diff().tolist()
        responses = _response_lengths(data) if self.mode == "R3" else lengths
        rows: list[dict[str, Tensor]] = []
        for row, length, response in zip(routes.unbind(), lengths, responses, strict=True):
            fields = route_fields(row, length)
            if self.mode == "R3":
                fields[ROUTES_MASK][length - 1 if response else 0 :] = False
            rows.append(fields)
        fields = {name: torch.cat([row[name] for row in rows]) for name in (ROUTES, ROUTES_MASK)}
        return fields, "all" if routes.shape[-2] == self.num_layers else "moe"


def _response_lengths(data: TensorDict) -> list[int]:
    mask = data["response_mask"]
    rows = mask.unbind() if mask.is_nested else mask
    return [int(row.sum()) for row in rows]
