"""Runtimes by name, and what is checked of a configuration before any rank is started."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl_backend.contracts import (
    BACKEND_CONFIGS,
    BackendConfig,
    CheckpointError,
    ConfigError,
    NativeConfig,
    RuntimeConfig,
    UnsupportedError,
)
from rl_backend.runtime import registry
from rl_backend.runtime.registry import check_config, check_weights
from tests.support.models import write_tiny


@pytest.fixture
def runtimes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the check of the runtime ``odd`` was given."""
    given: list[Any] = []
    monkeypatch.setattr(registry, "_CHECKS", {**registry._CHECKS, "odd": given.append})
    return given


def config(path: Path, backend: str = "native", **parallel: int) -> Any:
    return SimpleNamespace(backend=backend, hf_path=str(path), backend_cfg=NativeConfig(device="cpu", parallel=parallel))


def test_the_number_of_ranks_is_checked_before_the_model_and_the_model_where_it_is(
    runtimes: list[Any], tmp_path: Path
) -> None:
    here, elsewhere = config(tmp_path, "odd", tp=2), config(tmp_path / "elsewhere", "odd", tp=2)
    with pytest.raises(ConfigError, match="world size 3 is not a multiple"):
        check_config(here, 3)
    check_config(elsewhere, 2)
    check_config(config(tmp_path, "without a check"), 1)
    assert runtimes == []
    check_config(here, 4)
    assert runtimes == [here]
    (tmp_path / "file").write_text("")
    check_config(config(tmp_path / "file", "odd"), 1)
    assert len(runtimes) == 1


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose head should be its embeddings, and is stored beside them."""
    path = write_tiny("qwen3", tmp_path_factory.mktemp("tied"), max_shard_size="1GB")
    tensors = load_file(path / "model.safetensors")
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, path / "model.safetensors")
    return path


def with_tensors(path: Path, source: Path, **changes: Any) -> Path:
    """A copy of a directory with other tensors; None leaves one out."""
    path.mkdir()
    for file in source.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    tensors: dict[str, Any] = {**load_file(source / "model.safetensors"), **changes}
    save_file({name: value for name, value in tensors.items() if value is not None}, path / "model.safetensors")
    return path


def test_weights_are_checked_by_their_headers_and_a_head_that_should_be_the_embeddings(tied: Path, tmp_path: Path) -> None:
    def runtime_config(path: Path, backend: str = "native") -> RuntimeConfig:
        options: dict[str, Any] = {"device": "cpu"} if backend == "native" else {}
        return RuntimeConfig(hf_path=str(path), backend=backend, backend_cfg=options)

    check_weights(runtime_config(tied))
    check_weights(runtime_config(tied), "values")
    name = "model.layers.1.mlp.up_proj.weight"
    other_head = with_tensors(tmp_path / "head", tied, **{"lm_head.weight": torch.zeros(128, 64)})
    for backend in ("native", "bridge"):
        with pytest.raises(CheckpointError, match=r"lm_head"):
            check_weights(runtime_config(other_head, backend))
        # A critic has no language-model head that could differ.
        check_weights(runtime_config(other_head, backend), "values")
    missing = with_tensors(tmp_path / "missing", tied, **{name: None})
    with pytest.raises(CheckpointError, match=rf"has no tensor {name}"):
        check_weights(runtime_config(missing))
    check_weights(runtime_config(missing, "bridge"))
    with pytest.raises(CheckpointError, match=name):
        check_weights(runtime_config(with_tensors(tmp_path / "shape", tied, **{name: torch.zeros(127, 64)})))
    integers = with_tensors(tmp_path / "integers", tied, **{name: torch.zeros(128, 64, dtype=torch.int8)})
    for backend in ("native", "bridge"):
        with pytest.raises(UnsupportedError, match=r"has dtype I8"):
            check_weights(runtime_config(integers, backend))
    quantised = with_tensors(tmp_path / "quantised", tied)
    facts = json.loads((quantised / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps({**facts, "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(UnsupportedError, match="quantization_config"):
        check_weights(runtime_config(quantised))


def test_the_check_of_a_runtime_is_that_which_it_was_registered_with(tmp_path: Path) -> None:
    class Options(BackendConfig):
        """Of a runtime that is made nowhere."""

    checked: list[Any] = []
    made: list[Any] = []
    names = {"checked runtime": checked.append, "unchecked runtime": None}
    try:
        for name, check in names.items():
            registry.register_runtime(name, Options, made.append, check)  # type: ignore[arg-type]
            config = RuntimeConfig(hf_path=str(tmp_path), backend=name)
            assert isinstance(config.backend_cfg, Options)
            check_config(config, 2)
            assert checked == ([config] if check is not None else checked[:1]) and len(checked) == 1
            registry.create_runtime(config)
            assert made[-1] is config
    finally:
        for name in names:
            BACKEND_CONFIGS.remove(name)
            registry._FACTORIES.remove(name)
            registry._CHECKS.pop(name, None)
