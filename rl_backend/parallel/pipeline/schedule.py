"""A pipeline schedule: a list of actions for each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from rl_backend.parallel.pipeline.actions import COMPUTATIONS, Action, Kind
from rl_backend.parallel.pipeline.warm_up import WarmUp, plan_warm_up

Order = Sequence[Sequence[Action]]
"""The computations of each rank, in order, without sends and receives."""


@dataclass(frozen=True)
class Schedule:
    """One training step, or with ``forward_only`` one evaluation, of a model in stages.

    Attributes:
        name: of the algorithm.
        num_micro_batches: of each stage.
        placement: rank of each stage.
        actions: for each rank what it does, in order.
        activation_bound: for each rank the most activations, in stages times micro-batches, that it may hold; one is held
            from its forward pass to the end of its backward pass for the weights.
        forward_only: there is no backward pass, and no activation is held.
    """

    name: str
    num_micro_batches: int
    placement: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]
    activation_bound: tuple[int, ...]
    forward_only: bool = False

    @property
    def pp_size(self) -> int:
        """Number of ranks."""
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        return len(self.placement)

    @property
    def stages_per_rank(self) -> int:
        return self.num_stages // self.pp_size

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, in the order of the model."""
        return tuple(stage for stage, owner in enumerate(self.placement) if owner == rank)

    @cached_property
    def peak_activations(self) -> tuple[int, ...]:
        """For each rank the most activations that it holds at once, in stages times micro-batches."""
        return tuple(_peak(actions) if not self.forward_only else 0 for actions in self.actions)

    @cached_property
    def warm_up(self) -> WarmUp:
        """What each rank can do before it is known whether the pass counts."""
        return plan_warm_up(self.actions, self.num_stages)

    def __str__(self) -> str:
        """The computations of each rank on a line."""
        return "\n".join(
            f"{rank}: {' '.join(str(action) for action in actions if action.kind in COMPUTATIONS)}"
            for rank, actions in enumerate(self.actions)
        )


def _peak(actions: Sequence[Action]) -> int:
    held = peak = 0
    for action in actions:
        if action.kind is Kind.FORWARD:
            held += 1
            peak = max(peak, held)
        elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            held -= 1
    return peak
