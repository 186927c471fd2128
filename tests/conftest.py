"""Fixtures that every part of the suite shares, and the skipping of tests that this machine cannot run."""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path

# Read when transformers, Ray and vLLM are imported: tests fetch and report nothing.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("DO_NOT_TRACK", "1")

# A shell ignores interrupts in what it runs in the background, and so would every process that a test interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
import torch

from tests.support.matrix import pytest_addoption, pytest_configure  # noqa: F401 - hooks

# verl, where tests run it.
if not torch.accelerator.is_available():
    os.environ.setdefault("VERL_PLATFORM", "cpu")

LONG_SECONDS = 1800
"""Limit of a test with the marker ``long`` that names none."""
TRAINED_SECONDS = 900
"""Limit of a test that may be the first to ask for a model that the session trains once: its time counts as the test's."""

# Tests compute on tensors so small that threads cost more than they save, most of all beside engines and ranks.
torch.set_num_threads(1)


_frozen: tuple[Path, int] | None = None
"""The file before whose first test all that there was was frozen, and how many modules there were."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What modules and caches hold is no garbage, and every runtime that closes would look through it for a second."""
    global _frozen
    if _frozen is None or item.path != _frozen[0] or len(sys.modules) > _frozen[1] + 100:
        if _frozen is not None:
            gc.collect()
        gc.freeze()
        _frozen = item.path, len(sys.modules)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        if not item.get_closest_marker("timeout"):
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.timeout(LONG_SECONDS))
            elif "warm_model" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.timeout(TRAINED_SECONDS))
        for marker in item.iter_markers("gpu"):
            needed = marker.kwargs.get("count", 1)
            if available < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device(s), torch finds {available}"))


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 directory whose lm_head is its embedding."""
    from tests.support.models import write_tiny_qwen3

    return write_tiny_qwen3(tmp_path_factory.mktemp("tied"))


@pytest.fixture(scope="session")
def untied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 directory with an lm_head of its own."""
    from tests.support.models import write_tiny_qwen3

    return write_tiny_qwen3(tmp_path_factory.mktemp("untied"), tie_word_embeddings=False)
