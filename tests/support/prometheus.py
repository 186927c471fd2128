"""This project's metrics as Ray's nodes serve them to Prometheus."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Callable

import ray

type Served = dict[str, dict[str, float]]
"""Name of a metric -> its tags -> value."""


def scrape() -> Served:
    """What the nodes of the cluster serve to Prometheus of this project."""
    found: Served = {}
    for node in ray.nodes():
        address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        with urllib.request.urlopen(address, timeout=10) as answer:
            for line in answer.read().decode().splitlines():
                if parsed := re.fullmatch(r"ray_(rl_backend_\w+)\{(.*)\} (\S+)", line):
                    found.setdefault(parsed[1], {})[parsed[2]] = float(parsed[3])
    return found


def await_served(check: Callable[[Served], None], seconds: float = 60.0) -> None:
    """Waits until ``check`` passes, because Ray serves values some seconds after they were set; else its last failure."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return check(scrape())
        except AssertionError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.5)


def values(found: Served, name: str, **tags: str) -> list[float]:
    wanted = [f'{key}="{text}"' for key, text in tags.items()]
    return [number for labels, number in found.get(name, {}).items() if all(tag in labels.split(",") for tag in wanted)]


def value(found: Served, name: str, **tags: str) -> float:
    numbers = values(found, name, **tags)
    assert len(numbers) == 1, (name, tags, numbers)
    return numbers[0]
