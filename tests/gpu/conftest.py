"""What the GPU tests share. Every test in this folder is marked ``gpu``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from rl_backend.contracts import NativeConfig, OptimizerConfig, RuntimeConfig
from rl_backend.runtime import create_runtime
from rl_backend.runtime.native.engine import NativeRuntime
from tests.support.models import write_tiny_qwen3

type MakeRuntime = Callable[..., NativeRuntime]


@pytest.fixture
def make_runtime() -> Iterator[MakeRuntime]:
    """(model directory, **NativeConfig fields) -> a runtime on CUDA; closed after the test."""
    with ExitStack() as stack:

        def make(model: Path, *, optimizer: OptimizerConfig | None = None, **settings: Any) -> NativeRuntime:
            native = NativeConfig(device="cuda", optimizer=optimizer or OptimizerConfig(lr=1e-3), **settings)
            runtime = create_runtime(RuntimeConfig(backend="native", hf_path=str(model), backend_cfg=native))
            stack.enter_context(closing(runtime))
            return runtime  # type: ignore[return-value]

        yield make


@pytest.fixture(scope="session")
def wider_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 of about 13M parameters, so that its memory stands out."""
    return write_tiny_qwen3(
        tmp_path_factory.mktemp("wider"),
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1024,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=False,
        max_shard_size="1GB",
    )
