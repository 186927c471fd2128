"""DualPipeV: DualPipe (arXiv 2412.19437, section 3.2.1) folded into a V, as DeepSeek's repository DualPipe describes it.

Its steady state pairs the forward pass of one stage of a rank with the backward pass of the other, so that communication
inside the one (of experts, say) can be hidden behind the other. A schedule has the two one after the other.
"""

from __future__ import annotations

from collections import Counter, deque

from rl_backend.parallel.pipeline.actions import Action, Kind


def dualpipev(pp_size: int, num_micro_batches: int) -> list[list[Action]]:
    """The eight phases of each rank; needs ``num_micro_batches >= 2 * pp_size``."""
    return [_rank_order(pp_size, num_micro_batches, rank) for rank in range(pp_size)]


def bound_of_dualpipev(pp_size: int, num_micro_batches: int) -> list[int]:
    """Activations of each rank: 2p + 1."""
    return [2 * pp_size + 1] * pp_size


class _Rank:
    """A rank's order as it grows: each call appends the next micro-batch of its first (0) or last (1) stage."""

    def __init__(self, rank: int, pp_size: int) -> None:
        self.order: list[Action] = []
        self._stages = (rank, 2 * pp_size - 1 - rank)
        self._next: Counter[tuple[bool, int]] = Counter()
        self._put_off: deque[Action] = deque()

    def forward(self, chunk: int) -> None:
        self._append(Kind.FORWARD, chunk)

    def backward(self, chunk: int, *, split: bool = False) -> None:
        action = self._append(Kind.BACKWARD_INPUT if split else Kind.BACKWARD, chunk)
        if split:
            self._put_off.append(action._replace(kind=Kind.BACKWARD_WEIGHT))

    def weights(self) -> None:
        """The oldest backward pass for the weights that was put off."""
        self.order.append(self._put_off.popleft())

    def _append(self, kind: Kind, chunk: int) -> Action:
        key = kind is Kind.FORWARD, chunk
        action = Action(kind, self._stages[chunk], self._next[key])
        self._next[key] += 1
        self.order.append(action)
        return action


def _rank_order(pp_size: int, num_micro_batches: int, rank: int) -> list[Action]:
    after = pp_size - rank - 1
    steps = _Rank(rank, pp_size)
    for _ in range(2 * after):
        steps.forward(0)
    for _ in range(rank + 1):
        steps.forward(0)
        steps.forward(1)
    for _ in range(after):
        steps.backward(1, split=True)
        steps.weights()
        steps.forward(1)
    for _ in range(num_micro_batches - 2 * pp_size + rank + 1):
        steps.forward(0)
        steps.backward(1)
        steps.forward(1)
        steps.backward(0)
    for _ in range(after):
        steps.backward(1)
        steps.forward(1)
        steps.backward(0)
    # From the middle on, the backward passes for the weights wait for the gaps of the phase after it.
    for step in range(2 * (rank + 1)):
        steps.backward((step + 1) % 2, split=step > rank)
    for _ in range(after):
        steps.weights()
        steps.backward(0, split=True)
    for _ in range(rank + 1):
        steps.weights()
    return steps.order
