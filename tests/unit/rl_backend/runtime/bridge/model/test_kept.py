"""Weights that the bridge runtime has no place for: refused, or kept where a family says so."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rl_backend.checkpoint.hf_reader import SINGLE_FILE, WEIGHTS_INDEX, HFReader
from rl_backend.contracts import MODEL_CONFIGS, CheckpointError, UnsupportedError
from rl_backend.model import MODEL_FAMILIES, QWEN3, register_model
from tests.support.bridge_runs import open_bridge
from tests.support.fp8 import write_fp8
from tests.support.kept_family import require_index, stored_bytes
from tests.support.models import write_tiny_qwen3
from tests.support.qwen3_5 import save_text_model, write_qwen3_5

KEPT = {"mtp.norm.weight": torch.rand(64), "mtp.fc.weight": torch.rand(64, 128).bfloat16()}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Qwen3, with weights that it does not have in a file of their own."""
    path = write_tiny_qwen3(tmp_path / "source")
    save_file(KEPT, path / "mtp.safetensors", metadata={"format": "pt"})
    file = path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"] |= dict.fromkeys(KEPT, "mtp.safetensors")
    file.write_text(json.dumps(index))
    return path


@pytest.fixture
def keeping() -> Iterator[None]:
    """A family of the same ``model_type`` that keeps them."""
    register_model(replace(QWEN3, name="keeping_qwen3", kept_weights=lambda architecture: ("mtp.",)))
    yield
    MODEL_FAMILIES.remove("keeping_qwen3")
    MODEL_CONFIGS.remove("keeping_qwen3")


def test_weights_that_no_family_keeps_are_refused_by_name(source: Path) -> None:
    with open_bridge(source) as runtime, pytest.raises(UnsupportedError, match=r"has 2 weights .*: mtp\.fc\.weight, mtp"):
        runtime.build_model()


@pytest.mark.shows("bridge: what a family keeps beside the trained weights is saved with them, byte for byte")
def test_kept_weights_are_saved_byte_for_byte(source: Path, tmp_path: Path, keeping: None) -> None:
    with open_bridge(source, param_dtype="float32") as runtime:
        handle = runtime.build_model()
        assert not any(info.name in KEPT for info in runtime.weight_infos(handle))
        runtime.save_checkpoint(handle, tmp_path / "out", hf=True)
    assert stored_bytes(tmp_path / "out") == stored_bytes(source)
    require_index(tmp_path / "out")


def test_weights_in_fp8_are_read_as_numbers(untied_model: Path, tmp_path: Path) -> None:
    plain = write_fp8(untied_model, tmp_path / "fp8", (48, 40), lambda name: name.endswith("_proj.weight"))
    with open_bridge(tmp_path / "fp8") as runtime:
        runtime.save_checkpoint(runtime.build_model(), tmp_path / "out", hf=True)
    saved = HFReader(tmp_path / "out")
    assert "quantization_config" not in saved.config and saved.infos.keys() == plain.keys()
    assert all(torch.equal(saved.read(name), expected) for name, expected in plain.items())


def test_a_text_model_is_read_under_the_nested_names_that_transformers_saves(tmp_path: Path) -> None:
    path = save_text_model(write_qwen3_5(tmp_path / "source", layers=1, released=True), tmp_path / "text")
    stored = {name.replace("model.language_model.", "model."): found for name, found in stored_bytes(path).items()}
    assert stored.keys() != stored_bytes(path).keys()
    with open_bridge(path, param_dtype="float32") as runtime:
        runtime.save_checkpoint(runtime.build_model(), tmp_path / "out", hf=True)
    assert stored_bytes(tmp_path / "out") == stored


def in_one_file(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    for file in (*path.glob("model-*"), path / WEIGHTS_INDEX):
        file.unlink(missing_ok=True)
    save_file(tensors, path / SINGLE_FILE, metadata={"format": "pt"})
    return path


def test_other_files_beside_the_weights_are_not_read(untied_model: Path, tmp_path: Path) -> None:
    reader = HFReader(untied_model)
    tensors = {name: reader.read(name).clone() for name in reader.infos}
    path = in_one_file(shutil.copytree(untied_model, tmp_path / "model"), tensors)
    # Megatron-Bridge alone reads the last of all files, in the order of the file system.
    for number in range(9):
        save_file({name: torch.zeros_like(tensor) for name, tensor in tensors.items()}, path / f"older{number}.safetensors")
    with open_bridge(path) as runtime:
        runtime.save_checkpoint(runtime.build_model(), tmp_path / "out", hf=True)
    saved = HFReader(tmp_path / "out")
    assert all(torch.equal(saved.read(name), tensor) for name, tensor in tensors.items())


def test_a_head_that_is_not_the_embeddings_it_is_tied_to_is_refused(tied_model: Path, tmp_path: Path) -> None:
    reader = HFReader(tied_model)
    tensors = {name: reader.read(name).clone() for name in reader.infos}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    path = in_one_file(shutil.copytree(tied_model, tmp_path / "same"), tensors)
    with open_bridge(path) as runtime:
        runtime.build_model()
    tensors["lm_head.weight"] += 1.0
    path = in_one_file(shutil.copytree(tied_model, tmp_path / "other"), tensors)
    with open_bridge(path) as runtime, pytest.raises(CheckpointError, match=r"a lm_head\.weight that differs from its"):
        runtime.build_model()
