"""Engines for tests of groups: stand-ins that start without vLLM, and one whose open update can be brought to an end.

They are not in the files of their tests because every engine's process imports the file of its class.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from actors.cluster.processes import Process
from actors.rollout.config import RolloutConfig
from actors.rollout.engine.engine import RolloutEngine
from actors.rollout.engine.in_process import ServingState
from actors.rollout.engine.step_loop import Completion
from actors.rollout.group.group import RolloutGroup
from actors.rollout.messages import EngineInfo, Request
from actors.rollout.placement import NodePlace
from actors.wire.segment import Segment
from rl_backend.contracts import WeightManifest


def slot_bytes(llm: Any) -> int:
    """Bytes of all slots for adapters of a ``vllm.LLM`` with one worker."""

    def count(worker: Any) -> int:
        modules = worker.model_runner.lora_manager._adapter_manager.modules.values()
        factors = [factor for module in modules for factor in (module.lora_a_stacked, module.lora_b_stacked)]
        parts = [part for factor in factors for part in (factor if isinstance(factor, tuple) else (factor,))]
        return sum(part.nbytes for part in parts)

    (nbytes,) = llm.collective_rpc(count)
    return int(nbytes)


class EngineWithoutModel(RolloutEngine):
    """Starts slowly, and loads nothing."""

    def start(self, place: NodePlace) -> EngineInfo:
        time.sleep(1.0)
        name = self._vllm.name
        facts = {"name": name, "pid": os.getpid(), "node_id": self.node(), "node_ip": "", "host": "", "device": "cpu"}
        sizes = {"workers": 1, "device_ids": (), "vocab_size": 8, "max_model_len": 8, "version": 0}
        return EngineInfo(**facts, **sizes, cores=(), dtype="float32", state="serving")  # type: ignore[arg-type]


class GroupWithoutModel(RolloutGroup):
    engine_class = EngineWithoutModel


class _Sleeping:
    """In place of vLLM: a response is one token, after ``max_new_tokens`` seconds."""

    room = 8

    def __init__(self) -> None:
        self._ends: dict[int, float] = {}

    def add(self, key: int, request: Request) -> None:
        self._ends[key] = time.monotonic() + request.sampling.max_new_tokens

    def step(self) -> list[tuple[int, Completion]]:
        time.sleep(0.01)
        ended = [key for key, end in self._ends.items() if time.monotonic() >= end]
        return [(key, self.give_up(key)) for key in ended]

    def give_up(self, key: int) -> Completion:
        del self._ends[key]
        return Completion(SimpleNamespace(token_ids=[1], logprobs=None, finish_reason="length"), 0)

    def sampled(self, key: int) -> int:
        return 0

    def forget(self) -> None: ...


class EngineWithoutVllm(RolloutEngine):
    """Everything but vLLM; samples for ``max_new_tokens`` seconds."""

    def start(self, place: NodePlace) -> EngineInfo:
        self._check_model_is_here()
        config = SimpleNamespace(get_vocab_size=lambda: 128, max_model_len=64)
        self._vllm.llm = SimpleNamespace(model_config=config)
        self._vllm.serving = ServingState(self._vllm.name)
        self._vllm.loop.start(self, _Sleeping)
        return self.describe()

    def require_push(self) -> None:
        """It samples whatever it was given."""

    def hold_gil(self, seconds: float) -> None:
        """As C code does that computes for long: no other thread of Python's runs."""
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))

    def verify(self, manifest: WeightManifest, segment: Segment, push: str = "") -> float:
        self._verified_here = manifest
        time.sleep(0.2)
        return 0.2

    def load(self, version: int) -> float:
        assert self._verified_here.version == version
        self._vllm.serving.pause()
        self._vllm.serving.finish(version)
        return 0.0


class GroupWithoutVllm(RolloutGroup):
    engine_class = EngineWithoutVllm


class EngineOfWorkers(RolloutEngine):
    def worker_processes(self) -> list[Process]:
        return list(self._vllm.workers._processes)


class GroupOfWorkers(RolloutGroup):
    engine_class = EngineOfWorkers


class EngineOfTurns(RolloutEngine):
    """An engine that can be told anew what a push does to turns, and be mended after an update that got no weights."""

    def set_turns_at_push(self, value: str) -> None:
        self._vllm.config = self._vllm.config.replace(turns_at_push=value)

    def mend(self) -> None:
        """Ends the update, which leaves the weights that were there."""
        version, self._vllm.serving = self._vllm.serving.version, ServingState(self._vllm.name)
        self._vllm.serving.pause()
        self.finish_update(version)
        self.resume()


class GroupOfTurns(RolloutGroup):
    engine_class = EngineOfTurns


class EngineOfMixture(RolloutEngine):
    """An engine in whose process a patch can be left out, and another engine be started."""

    def leave_out(self, patch: str | None) -> None:
        import actors.rollout.vllm.patches as patches
        import actors.rollout.vllm.worker as worker

        worker.packing_experts_again = patches.packing_experts_again
        worker.packing_embeddings_again = patches.packing_embeddings_again
        if patch == "packing_experts_again":
            worker.packing_experts_again = contextlib.nullcontext
        elif patch == "packing_embeddings_again":
            worker.packing_embeddings_again = contextlib.nullcontext

    def start_another(self, config: RolloutConfig) -> None:
        from actors.rollout.vllm.process import start_vllm

        start_vllm(config, "cpu")


class GroupOfMixture(RolloutGroup):
    engine_class = EngineOfMixture


class AdapterEngine(RolloutEngine):
    """An engine whose adapters can be made to fail."""

    def die_in(self, method: str) -> None:
        """Ends by SIGKILL when ``keep`` or ``load`` of its adapters is called next."""
        setattr(self._adapters, method, lambda *_: os.kill(os.getpid(), signal.SIGKILL))

    def slots(self) -> tuple[set[int], int]:
        """Numbers of the adapters that vLLM has loaded, and bytes of all its slots."""
        return set(self._vllm.llm.llm_engine.list_loras()), slot_bytes(self._vllm.llm)

    def falsify_adapters(self, fault: str, unseen: bool = True) -> None:
        """From now on slots are given other tensors than were kept.

        Args:
            fault: ``names`` of no module, which vLLM takes without a word; twice the ``scale``; or empty, which ends it.
            unseen: nobody looks at what it does with them.
        """
        from actors.rollout.vllm.adapters import AdapterSlots
        from actors.rollout.vllm.slots import SlotTable

        if not hasattr(self, "_originals"):
            self._originals = SlotTable.write, AdapterSlots.problem
        write, problem = self._originals

        def changed(table: Any, index: int, rank: int, factors: Mapping[str, Tensor]) -> None:
            if fault == "names":
                factors = {name.replace(".layers.", ".blocks."): value for name, value in factors.items()}
            else:
                factors = {name: value * 2 if "lora_B" in name else value for name, value in factors.items()}
            write(table, index, rank, factors)

        SlotTable.write = changed if fault else write
        AdapterSlots.problem = (lambda *_: "") if fault and unseen else problem


class AdapterGroupOfFaults(RolloutGroup):
    engine_class = AdapterEngine
