"""Fixtures that every part of the suite shares."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.models import write_tiny_qwen3


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 directory whose lm_head is its embedding."""
    return write_tiny_qwen3(tmp_path_factory.mktemp("tied"))


@pytest.fixture(scope="session")
def untied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 directory with an lm_head of its own."""
    return write_tiny_qwen3(tmp_path_factory.mktemp("untied"), tie_word_embeddings=False)
