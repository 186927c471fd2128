"""What a rank does in a pipeline schedule, one action at a time."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """What an action does; the value is its name in print.

    The backward pass of a stage is either one ``BACKWARD``, or a ``BACKWARD_INPUT``, which the stage before waits for, and
    a ``BACKWARD_WEIGHT`` at any time after it. Sends and receives are posted: only the computation that needs what is
    received waits for it.
    """

    FORWARD = "F"
    BACKWARD = "BW"
    BACKWARD_INPUT = "B"
    BACKWARD_WEIGHT = "W"
    SEND_ACTIVATION = "SEND_F"
    RECEIVE_ACTIVATION = "RECV_F"
    SEND_GRADIENT = "SEND_B"
    RECEIVE_GRADIENT = "RECV_B"


COMPUTATIONS = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT})
SENDS = frozenset({Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT})
RECEIVES = frozenset({Kind.RECEIVE_ACTIVATION, Kind.RECEIVE_GRADIENT})

_OTHER_END = {
    Kind.SEND_ACTIVATION: (Kind.RECEIVE_ACTIVATION, 1),
    Kind.RECEIVE_ACTIVATION: (Kind.SEND_ACTIVATION, -1),
    Kind.SEND_GRADIENT: (Kind.RECEIVE_GRADIENT, -1),
    Kind.RECEIVE_GRADIENT: (Kind.SEND_GRADIENT, 1),
}


class Action(NamedTuple):
    """One entry of a rank's list.

    Attributes:
        stage: the one that acts: a send's sender, a receive's receiver.
        micro_batch: from 0.
    """

    kind: Kind
    stage: int
    micro_batch: int

    @property
    def other_end(self) -> Action:
        """The receive of this send, or the send of this receive."""
        kind, step = _OTHER_END[self.kind]
        return Action(kind, self.stage + step, self.micro_batch)

    def __str__(self) -> str:
        """Stage, kind, micro-batch: ``3F0`` is the forward pass of stage 3 on the first micro-batch."""
        return f"{self.stage}{self.kind.value}{self.micro_batch}"
