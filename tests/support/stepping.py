"""A stand-in for vLLM in an engine's step loop."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

from actors.rollout.config import SamplingConfig
from actors.rollout.engine.step_loop import Completion, Stretch
from actors.rollout.messages import AdapterVersion, Request

BAD_SEED, FATAL_SEED = 666, 667


class CountingStepper:
    """Token number t of a request is its seed + t, whoever else is served. Steps as often as it is told to.

    Args:
        room: requests that run at one time.
    """

    def __init__(self, room: int = 100) -> None:
        self.room = room
        self.tokens: dict[int, list[int]] = {}
        self.jobs: dict[int, Request] = {}
        self.most_at_once = self.steps = self.forgotten = 0
        self.threads: set[int] = set()
        self.waits = False
        self._may_step = threading.Semaphore(0)

    def allow(self, steps: int) -> None:
        """Lets the loop take so many steps more."""
        for _ in range(steps):
            self._may_step.release()

    def take(self, steps: int) -> None:
        """So many steps, of which the loop takes each; it is then in the next one."""
        target = self.steps + steps
        self.allow(steps)
        deadline = time.monotonic() + 60
        while not (self.steps == target and self.waits):
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def add(self, key: int, job: Request) -> None:
        if job.seed == BAD_SEED:
            raise ValueError("a bad request")
        self.tokens[key], self.jobs[key] = [], job
        self.most_at_once = max(self.most_at_once, len(self.tokens))

    def step(self) -> list[tuple[int, Completion]]:
        self.waits = True
        self._may_step.acquire()
        self.waits = False
        self.steps += 1
        self.threads.add(threading.get_ident())
        for key, tokens in self.tokens.items():
            seed = self.jobs[key].seed
            assert seed is not None
            if seed == FATAL_SEED:
                raise RuntimeError("the model fell over")
            tokens.append(seed + len(tokens))
        ended = [key for key, tokens in self.tokens.items() if len(tokens) >= self.jobs[key].sampling.max_new_tokens]
        return [(key, self._completion(key, "length")) for key in ended]

    def give_up(self, key: int) -> Completion:
        return self._completion(key, "abort")

    def sampled(self, key: int) -> int:
        return len(self.tokens[key])

    def forget(self) -> None:
        self.forgotten += 1

    def _completion(self, key: int, reason: str) -> Completion:
        del self.jobs[key]
        return Completion(SimpleNamespace(token_ids=self.tokens.pop(key), finish_reason=reason), 0)


class ServedVersion:
    """A host whose weights have a version, and that has slots for adapters."""

    def __init__(self, slots: int = 2) -> None:
        self.version = 1
        self.slots = slots
        self.loop: Any = None
        self.left: list[Request] = []
        self.stretches: list[Stretch] = []

    def admit(self, job: Request) -> bool:
        running = self.loop.adapters(running=True)
        return job.adapter is None or job.adapter in running or len(running) < self.slots

    def version_for(self, job: Request) -> int:
        return self.version if job.adapter is None else job.adapter.version

    def ended(self, job: Request) -> None:
        self.left.append(job)

    def sampled(self, stretch: Stretch) -> None:
        self.stretches.append(stretch)

    def failed(self, error: Exception) -> Exception:
        return RuntimeError(f"a step failed: {error}")


def job(seed: int, tokens: int, *, adapter: AdapterVersion | None = None, pausable: bool = False) -> Request:
    """A request for so many tokens."""
    return Request([1, 2], SamplingConfig(max_new_tokens=tokens), seed, adapter, pausable=pausable)
