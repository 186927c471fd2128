"""Engines for tests of groups: stand-ins that start without vLLM, and one whose open update can be brought to an end.

They are not in the files of their tests because every engine's process imports the file of its class.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from actors.rollout.config import SamplingConfig
from actors.rollout.engine import RolloutEngine
from actors.rollout.group import RolloutGroup
from actors.rollout.messages import EngineInfo, Generated, Request, Response
from actors.rollout.placement import NodePlace
from actors.wire.segment import Segment
from rl_backend.contracts import WeightManifest


class EngineWithoutModel(RolloutEngine):
    """Starts slowly, and loads nothing."""

    def start(self, place: NodePlace) -> EngineInfo:
        time.sleep(1.0)
        facts = {"name": self._name, "pid": os.getpid(), "node_id": self.node(), "node_ip": "", "host": "", "device": "cpu"}
        sizes = {"workers": 1, "device_ids": (), "vocab_size": 8, "max_model_len": 8, "version": 0}
        return EngineInfo(**facts, **sizes, cores=(), dtype="float32", state="serving")  # type: ignore[arg-type]


class GroupWithoutModel(RolloutGroup):
    engine_class = EngineWithoutModel


class EngineWithoutVllm(RolloutEngine):
    """Everything but vLLM; samples for ``max_new_tokens`` seconds."""

    def start(self, place: NodePlace) -> EngineInfo:
        self._check_model_is_here()
        config = SimpleNamespace(get_vocab_size=lambda: 128, max_model_len=64)
        self._llm: Any = SimpleNamespace(model_config=config)
        return self.describe()

    def generate(self, requests: Sequence[Request], sampling: SamplingConfig, require_version: int | None) -> Generated:
        time.sleep(sampling.max_new_tokens)
        return Generated(self._version, [[Response([1], [0.0], "length")] for _ in requests], None)

    def verify(self, manifest: WeightManifest, segment: Segment, push: str = "") -> float:
        self._verified = manifest
        time.sleep(0.2)
        return 0.2

    def load(self, version: int) -> float:
        assert self._verified is not None and self._verified.version == version
        self._version = version
        return 0.0


class GroupWithoutVllm(RolloutGroup):
    engine_class = EngineWithoutVllm


class MendableEngine(RolloutEngine):
    """An engine that need not be restarted after an update that began and got no weights."""

    def mend(self) -> None:
        """Ends the update, which leaves the weights that were there."""
        self._state, self._failure = "paused", ""
        self.finish_update(self._version)
        self.resume()


class MendableGroup(RolloutGroup):
    engine_class = MendableEngine
