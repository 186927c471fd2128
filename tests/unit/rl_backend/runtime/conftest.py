"""A tiny Qwen3 and a native runtime over it, for tests that need no model of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from rl_backend.runtime.native.engine import NativeRuntime

# Imported by the fixtures that need them: `make check` runs tests of this folder that import nothing heavy.


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.models import write_tiny

    return write_tiny("qwen3", tmp_path_factory.mktemp("models") / "qwen3")


@pytest.fixture
def runtime(model: Path) -> Iterator[NativeRuntime]:
    from tests.support.native import open_runtime

    with open_runtime(model) as opened:
        yield opened
