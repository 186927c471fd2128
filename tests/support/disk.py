"""Disks with faults."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def full_disk(enabled: bool) -> Iterator[None]:
    """Files of this process cannot grow beyond 4 kB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if enabled:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
