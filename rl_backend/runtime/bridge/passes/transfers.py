"""Hidden states between pipeline stages: their shapes, which all ranks of a pipeline know."""

from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from torch.distributed import ProcessGroup

type Shape = Sequence[int]

_NOTHING: Shape = (0, 0, 0)


class KnownShapes(P2PCommunicator):
    """Megatron's transfers of one pass, without those of shapes: after each the host would wait for all work of the device.

    Args:
        shapes: of the hidden states of each micro-batch.
        num_chunks: model chunks of a rank.
    """

    def __init__(self, group: ProcessGroup, config: Any, shapes: Sequence[Shape], num_chunks: int) -> None:
        super().__init__(group, config)
        # Micro-batches in the order in which Megatron runs them through chunks, forward and, the chunks the other way round,
        # backward.
        table = get_schedule_table(len(shapes), num_chunks, config.microbatch_group_size_per_vp_stage)
        self._activations = _received(table, shapes, begins=group.rank() == 0)
        self._gradients = _received(table, shapes, begins=group.rank() == group.size() - 1)

    def _communicate_shapes(self, _next: Any, _previous: Any, recv_prev: bool, recv_next: bool) -> tuple[Shape, Shape]:
        return next(self._activations) if recv_prev else _NOTHING, next(self._gradients) if recv_next else _NOTHING


def _received(table: Sequence[tuple[int, int]], shapes: Sequence[Shape], *, begins: bool) -> Iterator[Shape]:
    """Of what a rank receives; one that ``begins`` receives nothing for its first chunk."""
    return iter([shapes[micro_batch] for micro_batch, chunk in table if chunk or not begins])
