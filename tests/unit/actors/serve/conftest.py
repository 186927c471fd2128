"""A server in this process, which the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.models import write_tiny_qwen3
from tests.support.served import served
from tests.support.tinker_clients import close_services


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3(tmp_path_factory.mktemp("served"), tie_word_embeddings=False)


@pytest.fixture(scope="package")
def running(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    with served(model, tmp_path_factory.mktemp("state")) as found:
        yield found


@pytest.fixture(autouse=True)
def clients_are_closed() -> Iterator[None]:
    yield
    close_services()
