"""Ray for one machine, out of reach of others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray._private import ray_constants


def init_local_ray(**options: Any) -> None:
    """``ray.init(address="local", **options)``, where Ray and its processes listen on the loopback address alone.

    By itself Ray binds to all interfaces of the machine, and its metrics can be read there without a token.
    """
    with _one_machine():
        ray.init(address="local", **options)


@contextmanager
def _one_machine() -> Iterator[None]:
    # Ray's own switch, which it sets on macOS and Windows. RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 sets it too, but before
    # Ray is imported alone, and to a node address of 127.0.0.1 Ray prefers the machine's.
    clusters = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = clusters
