"""Models of the runtimes in this package: what their guards and checkpoints read."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl_backend.contracts import (
    ConfigError,
    HandleError,
    Head,
    ModelHandle,
    OptimizerConfig,
    RoutedLayers,
    RuntimeConfig,
)
from rl_backend.contracts.operations import Part
from rl_backend.runtime.offload import Offload


class RankGroups(Protocol):
    """This rank's device and process groups, however they were made.

    Attributes:
        world_group: every rank, for collectives on ``device``.
        replica_group: the ranks that hold parts of one model, and so see the same data.
        host_group: every rank over gloo, for collectives on the CPU.
    """

    @property
    def device(self) -> torch.device: ...
    @property
    def dp_rank(self) -> int: ...
    @property
    def dp_size(self) -> int: ...
    @property
    def dp_group(self) -> dist.ProcessGroup: ...
    @property
    def world_group(self) -> dist.ProcessGroup: ...
    @property
    def replica_group(self) -> dist.ProcessGroup: ...
    @property
    def host_group(self) -> dist.ProcessGroup: ...


class ScheduledOptimizer(Protocol):
    """An optimizer with a learning-rate schedule."""

    def schedule_step(self) -> float:
        """Advances the schedules and returns the learning rate of the next step."""
        ...


@dataclass(eq=False, kw_only=True)
class GuardedHandle[O: ScheduledOptimizer](ModelHandle):
    """One model of a :class:`~rl_backend.runtime.guarded.GuardedRuntime`.

    Attributes:
        owner: the runtime that built it; None once it is closed.
        config: the runtime's, with the ``hf_path`` and optimizer of this model.
        hf_config: ``config.json``.
        vocab_size: ``vocab_size`` of ``config.json``.
        max_length: longest sequence, in tokens; None where the model sets no limit.
        optimizer: None for a forward-only handle.
        offload: where each part is.
        broken: why the handle cannot be used, empty when it can: a pass failed in the middle (until ``zero_grad``).
        damaged: why its weights cannot be trusted: a checkpoint failed in the middle of loading (until one loads).
    """

    owner: object | None
    config: RuntimeConfig
    hf_config: Mapping[str, Any]
    vocab_size: int
    max_length: int | None
    optimizer: O | None
    offload: Offload
    broken: str = ""
    damaged: str = ""

    @property
    @abstractmethod
    def routed_layers(self) -> RoutedLayers | None:
        """Its layers with experts; None where routes cannot be replayed."""

    @abstractmethod
    def roots(self) -> Iterable[nn.Module]:
        """The modules that the model consists of on this rank."""

    @abstractmethod
    def part_tensors(self) -> Mapping[Part, Sequence[Tensor]]:
        """This rank's tensors of each part that the handle has."""

    @abstractmethod
    def release(self) -> None:
        """Drops every tensor; the handle cannot be used again."""

    def settle(self) -> None:
        """Makes this rank's weights and optimizer those of the last step. Not a collective."""

    def settle_everywhere(self) -> bool:
        """As :meth:`settle`, at the same point on all ranks; whether the step was as taken at once. Nobody waits for it."""
        return True

    def trainer(self, operation: str) -> O:
        """The optimizer; raises :class:`HandleError` for a forward-only handle."""
        if self.optimizer is None:
            raise HandleError(
                f"{operation} on {self.name!r}, which is forward-only: it has no gradients and no optimizer; "
                "build it with build_model(forward_only=False)",
                handle=self.name,
                operation=operation,
            )
        return self.optimizer

    @contextmanager
    def training(self, enabled: bool) -> Generator[None]:
        """Training or evaluation behaviour of every module inside; may nest."""
        roots = list(self.roots())
        before = [(module, module.training) for root in roots for module in root.modules()]
        for root in roots:
            root.train(enabled)
        try:
            yield
        finally:
            for module, was_training in before:
                module.training = was_training


def config_of_model(
    config: RuntimeConfig,
    hf_path: Path | str | None,
    optimizer: OptimizerConfig | None,
    head: Head,
    *,
    forward_only: bool,
) -> RuntimeConfig:
    """The runtime's configuration as it is for one model.

    Raises:
        ConfigError: an optimizer for a forward-only model, or a head that does not exist.
    """
    if head not in get_args(Head.__value__):
        raise ConfigError.of("head", head, f"expected one of {', '.join(map(repr, get_args(Head.__value__)))}")
    if optimizer is not None and forward_only:
        raise ConfigError.of("optimizer", optimizer, "a forward-only model has none; leave one of the two out")
    if hf_path is not None:
        config = config.replace(hf_path=str(hf_path))
    if optimizer is not None:
        config = config.replace(backend_cfg=config.backend_cfg.replace(optimizer=optimizer))
    return config
