"""The clients of ``benchmarks.tinker chaos`` notice what they are there for."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.serve.store import REQUESTS
from benchmarks import tinker_chaos
from benchmarks.tinker_chaos import Client
from benchmarks.tinker_task import NAME
from tests.support.served import served

STEPS = 6
"""Of a run here."""


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tinker_chaos, "STEPS", STEPS)


@pytest.fixture
def named(model: Path, tmp_path: Path) -> Iterator[SimpleNamespace]:
    with served(model, tmp_path, name=NAME) as found:
        yield found


def work_until(client: Client, enough: Any) -> None:
    over = threading.Event()
    thread = threading.Thread(target=client.work, args=(over,))
    thread.start()
    while not enough():
        time.sleep(0.01)
    over.set()
    thread.join()


def test_a_client_whose_runs_end_continues_from_its_saves_with_the_losses_of_an_undisturbed_one(
    named: SimpleNamespace,
) -> None:
    expected = Client(named.url, 1, ()).train()
    assert len(set(expected)) == STEPS
    client = Client(named.url, 1, expected)
    ended = [0]

    def disturb() -> bool:
        for run, waiting in named.training.waiting.items():
            if client.rounds > 4 * ended[0] + 3:
                ended[0] += 1
                named.training.end(run, f"the server was restarted, {waiting} wait")
        return client.rounds >= STEPS + 6 and ended[0] >= 3

    work_until(client, disturb)
    assert client.wrong == 0 and client.failed
    assert len(client.accepted) == len(set(client.accepted)) and all(map(client.answered, client.accepted))
    named.store.delete(REQUESTS, id=client.accepted[0])
    assert not client.answered(client.accepted[0])


def test_a_step_that_is_taken_twice_is_noticed(named: SimpleNamespace) -> None:
    expected = Client(named.url, 2, ()).train()
    step = named.group.optimizer_step

    def twice(*args: Any, **options: Any) -> Any:
        step.submit(*args, **{**options, "zero_grad": False})
        return step.submit(*args, **options)

    named.group.optimizer_step = SimpleNamespace(submit=twice)
    client = Client(named.url, 2, expected)
    work_until(client, lambda: client.rounds >= 3)
    assert client.wrong >= 2
