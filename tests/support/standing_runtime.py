"""A guarded runtime whose engine is a stand-in: what atoms check, restore and count by themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from rl_backend.contracts import AdamParams, RoutedLayers, RuntimeConfig, StepResult, TensorInfo
from rl_backend.runtime.engine import Engine
from rl_backend.runtime.guarded import GuardedRuntime
from rl_backend.runtime.handle import GuardedHandle

CPU = torch.device("cpu")


class Trainer:
    def __init__(self) -> None:
        self.num_steps, self.learning_rate = 3, 0.5

    def schedule_step(self) -> float:
        self.learning_rate /= 2
        return self.learning_rate


class StandingHandle(GuardedHandle[Any]):
    """A model of two modules."""

    events: list[Any]
    routed: RoutedLayers | None = None
    answer: StepResult = StepResult(True, 1.0, None)
    has_gradients: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.events = []
        self.parts = (nn.Linear(2, 2), nn.Sequential(nn.Dropout(), nn.Linear(2, 2)))
        self.held = {"model": [torch.ones(2)], "grad": [torch.full((3,), 2.0)], "optimizer": [torch.zeros(4)]}

    @property
    def routed_layers(self) -> RoutedLayers | None:
        return self.routed

    def roots(self) -> tuple[nn.Module, ...]:
        return self.parts

    @property
    def weights(self) -> tuple[TensorInfo, ...]:
        return tuple(TensorInfo.of(name, (2,), torch.float32) for name in ("plain", "exact"))

    @property
    def in_float32(self) -> frozenset[str]:
        return frozenset(["exact"])

    def part_tensors(self) -> Any:
        parts = ("model",) if self.optimizer is None else ("model", "grad", "optimizer")
        return {part: self.held[part] for part in parts}

    def require_schedulable(self, num_micro_batches: int, *, forward_only: bool) -> None: ...

    def drop_gradients(self) -> None:
        self.events.append("drop")

    def step(self, adam: AdamParams | None = None) -> StepResult:
        self.events.append(adam)
        return self.answer

    def release(self) -> None:
        self.events.append("release")
        super().release()


class StandingEngine(Engine[StandingHandle]):
    """Builds handles and keeps what it was asked."""

    def __init__(self, closed: list[Any]) -> None:
        group = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
        self.groups: Any = SimpleNamespace(
            device=CPU,
            dp_rank=1,
            dp_size=3,
            dp_group="dp",
            world_group=group,
            host_group=group,
            world_size=1,
            timeout=timedelta(minutes=1),
        )
        self.closed = closed
        self.built: list[tuple[Any, ...]] = []
        self.passes: list[Any] = []
        self.inside = 0
        self.kept: dict[str, tuple[int, ...]] = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1

    @property
    def is_source(self) -> bool:
        return True

    def build(self, config: RuntimeConfig, name: str, head: Any, *, forward_only: bool, adaptable: bool) -> StandingHandle:
        assert self.inside == 1
        self.built.append((config, name, head, forward_only, adaptable))
        return StandingHandle(
            name=name,
            forward_only=forward_only,
            weight_version=7,
            head=head,
            config=config,
            hf_config={"model_type": "standing"},
            vocab_size=10,
            max_length=None,
            optimizer=None if forward_only else Trainer(),
            groups=self.groups,
            kept=self.kept,
        )

    def run_passes(self, handle: StandingHandle, request: Any) -> Any:
        assert self.inside == 1
        self.passes.append(request)
        return "passed"

    def record_activations(self, handle: StandingHandle, request: Any) -> list[Mapping[str, Tensor]]:
        assert not any(module.training for root in handle.roots() for module in root.modules())
        self.passes.append(request)
        return [{}]

    def gather_weights(self, *arguments: Any) -> Any:
        return iter(())

    def parts(self, *arguments: Any) -> Any:
        return iter(())

    def shard_infos(self, *arguments: Any) -> Any:
        return ()

    def gather_gradients(self, *arguments: Any) -> Any:
        return iter(())

    def training_state(self, handle: StandingHandle) -> Any:
        return {}, None

    def load_training_state(self, handle: StandingHandle, path: Path) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        self.closed.append(self.groups)


class StandingRuntime(GuardedRuntime[StandingHandle]):
    """On a :class:`StandingEngine`."""

    engine: StandingEngine

    def __init__(self, config: RuntimeConfig, closed: list[Any]) -> None:
        super().__init__(config, StandingEngine(closed))
