"""A micro-batch as this rank's model takes it, and the outputs as the caller sees them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_backend.contracts import ModelOutput, PackedBatch, RoutedLayers
from rl_backend.model import ModelInput
from rl_backend.parallel.context import TokenLayout, gather_outputs, lay_out_tokens
from rl_backend.parallel.groups import ParallelGroups
from rl_backend.primitive.attention import Segments
from rl_backend.runtime.router_replay import routes_to_replay


@dataclass(frozen=True)
class RankBatch:
    """This rank's part of a micro-batch of T tokens.

    Attributes:
        inputs: what the model takes: N tokens.
        layout: which of the T these are; None where they are all, in their order.
    """

    inputs: ModelInput
    layout: TokenLayout | None

    def outputs(self, output: ModelOutput, groups: ParallelGroups) -> ModelOutput:
        """(N,) of this rank -> (T,) in the batch's order, the same on every rank of a replica."""
        if self.layout is None:
            return output
        layout = self.layout
        gathered = {
            name: gather_outputs(value, layout, groups.cp_group)
            for name, value in output._asdict().items()
            if value is not None
        }
        return output._replace(**gathered)


def lay_out(
    batch: PackedBatch, groups: ParallelGroups, num_micro_batches: int, replayed: RoutedLayers | None = None
) -> RankBatch:
    """The part of ``batch``, which is on the training device, that this rank has under context and tensor parallelism.

    Args:
        replayed: the model's layers with experts, where these shall take the routes of the batch.
    """
    seq_lens = tuple(batch.seq_lens.tolist())
    routes = None if replayed is None else routes_to_replay(batch, replayed)
    common = {
        "longest": max(seq_lens),
        "calculate_entropy": bool(batch.meta.get("calculate_entropy", False)),
        "router_loss_weight": 1.0 / num_micro_batches,
    }
    if groups.token_group.size() == 1:
        inputs = ModelInput(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            segments=Segments.of_sequences(batch.cu_seqlens, seq_lens),
            labels=batch.labels,
            temperature=batch.temperature,
            padding=None,
            routes=routes,
            **common,
        )
        return RankBatch(inputs, None)
    layout = lay_out_tokens(
        seq_lens,
        cp_size=groups.cp_group.size(),
        cp_rank=groups.cp_group.rank(),
        multiple=groups.tp_group.size(),
        device=groups.device,
    )
    temperature = batch.temperature
    inputs = ModelInput(
        input_ids=layout.take(batch.input_ids, 0),
        position_ids=layout.position_ids,
        segments=layout.segments,
        labels=layout.take(batch.labels, -100),
        temperature=layout.take(temperature, 1.0) if isinstance(temperature, Tensor) else temperature,
        padding=_own_tokens(layout.padding, groups),
        routes=_own_tokens(None if routes is None else layout.take(routes, -1), groups),
        **common,
    )
    return RankBatch(inputs, layout)


def _own_tokens(rows: Tensor | None, groups: ParallelGroups) -> Tensor | None:
    """The rows between blocks, where tensor-parallel ranks share the tokens out."""
    if rows is None:
        return None
    return torch.tensor_split(rows, groups.tp_group.size())[groups.tp_group.rank()]
