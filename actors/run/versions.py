"""Versions of the weights that a run's samples were made with, and how many training steps they are behind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

from actors.run.clock import Clock
from actors.run.sampled_config import SampledConfig
from rl_backend.contracts import WeightVersionError


class VersionedCollector[B](ABC):
    """What collects the batches of a run, and knows which training step made which weights.

    Args:
        earlier: the :attr:`state` of the run that this one continues; empty at the first step.
    """

    def __init__(self, config: SampledConfig, earlier: Mapping[str, Any] | None = None) -> None:
        self._batches_ahead = config.batches_ahead
        self._step_of_version: dict[int, int] = dict((earlier or {}).get("step_of_version", []))

    @abstractmethod
    def collect(self, step: int, clock: Clock) -> B:
        """The batch of ``step``, counted from 1; phases of the clock while it is waited for."""

    @property
    def state(self) -> dict[str, Any]:
        """What a run that continues after this step takes over; pushes as far back as samples may be."""
        oldest = max(self._step_of_version.values()) - self._batches_ahead
        pushes = [[version, step] for version, step in self._step_of_version.items() if step >= oldest]
        return {"step_of_version": pushes}

    def pushed(self, version: int, step: int) -> None:
        """Engines sample with the weights that ``step`` made from now on; step 0 is the start."""
        self._step_of_version[version] = step

    def _age_of(self, versions: Iterable[int], step: int) -> int:
        """Training steps between the oldest of a sample's weights and those that ``step`` begins with."""
        return step - 1 - min(self._step_of_version[version] for version in versions)

    def _require_explained(self, age: int, step: int) -> int:
        """``age``; raises :class:`WeightVersionError` where sampling ahead does not explain it."""
        if age > self._batches_ahead:
            raise WeightVersionError(
                f"step {step}: a sample's weights are {age} steps old; sampling {self._batches_ahead} batches ahead "
                "explains fewer: an engine missed a push",
                age=age,
            )
        return age
