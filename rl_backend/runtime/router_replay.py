"""Router replay, as far as both runtimes share it: its modes, and routes gathered over ranks."""

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from rl_backend.contracts import PackedBatch, RoutedLayers
from rl_backend.parallel.collectives import all_gather

type RouterReplay = Literal["off", "record", "replay"]

MODES: tuple[RouterReplay, ...] = get_args(RouterReplay.__value__)


def routes_to_replay(batch: PackedBatch, routers: RoutedLayers) -> Tensor:
    """(T, layers with experts, top_k) int16, or int32 for more experts; -1 for the tokens for which the router chooses."""
    routes, mask = routers.routes_of(batch)
    signed = routes.to(torch.promote_types(routers.dtype, torch.int16))
    return signed if mask is None else signed.masked_fill(~mask.view(-1, 1, 1), -1)


def gather_rows(routes: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(N, layers, top_k) of every rank -> (ranks * N, layers, top_k), in the order of the ranks."""
    # gloo has no 16-bit integers.
    return all_gather(routes.contiguous().view(torch.uint8), group, sum_gradients=False).view(routes.dtype)


def gather_stages(
    chosen: Mapping[tuple[int, int], Tensor],
    data: Sequence[PackedBatch],
    places: Sequence[Sequence[int]],
    routers: RoutedLayers,
    group: dist.ProcessGroup,
    device: torch.device,
) -> list[Tensor]:
    """The routes of all ranks of a pipeline, on each of them: (L, layers with experts of the model, top_k) of each sequence.

    Args:
        chosen: (micro-batch, stage) -> (T, layers, top_k), of this rank's stages with experts.
        places: for each rank of ``group``, its layers of all its stages: their places among the layers with experts.
    """
    tokens = sum(batch.num_tokens for batch in data)
    # Ranks may have different numbers of layers, none included.
    mine = torch.zeros(tokens, max(map(len, places)), routers.top_k, dtype=routers.dtype, device=device)
    stages = [
        torch.cat([chosen[index, stage] for index in range(len(data))]) for stage in sorted({key[1] for key in chosen})
    ]
    if stages:
        mine[:, : sum(stage.shape[1] for stage in stages)] = torch.cat(stages, dim=1)
    of_ranks = gather_rows(mine, group).view(group.size(), *mine.shape)
    routes = mine.new_empty(tokens, len(routers.layers), routers.top_k)
    for rank, layers in enumerate(places):
        routes[:, torch.tensor(layers, dtype=torch.int64, device=device)] = of_ranks[rank, :, : len(layers)]
    lengths = [length for batch in data for length in batch.seq_lens.tolist()]
    return [part.clone() for part in routes.split(lengths)]
