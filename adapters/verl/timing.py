"""The adapter's own share of an engine's time."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class AdapterTime:
    """Seconds of the host since the engine was made.

    Attributes:
        total: inside ``train_batch`` and ``infer_batch``.
        adapter: of these, outside the runtime's atoms and verl's losses: cutting, packing, and putting outputs together.
    """

    total: float = 0.0
    adapter: float = 0.0

    @property
    def fraction(self) -> float:
        """``adapter / total``; 0 before the first batch."""
        return self.adapter / self.total if self.total else 0.0

    @contextmanager
    def batch(self) -> Generator[None]:
        """Around all work for one batch."""
        start = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            self.total += elapsed
            self.adapter += elapsed

    @contextmanager
    def runtime(self) -> Generator[None]:
        """Around a call of the runtime inside :meth:`batch`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.adapter -= time.perf_counter() - start

    @contextmanager
    def adapter_inside_runtime(self) -> Generator[None]:
        """Around what the adapter does when the runtime calls it back."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.adapter += time.perf_counter() - start
