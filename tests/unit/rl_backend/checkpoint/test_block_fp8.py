"""Weights in FP8 with a factor for each block: read as numbers, in parts too, and written plainly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.rollout.config import RolloutConfig
from actors.rollout.vllm.capabilities import check_served
from rl_backend.checkpoint.hf_reader import HFReader, read_hf_config, require_float_weights
from rl_backend.checkpoint.kept_weights import find_kept, open_kept
from rl_backend.checkpoint.quantisation import plain_dtype
from rl_backend.contracts import CheckpointError, NativeConfig, RuntimeConfig, UnsupportedError
from rl_backend.model import QWEN3
from rl_backend.runtime.native.engine import native_runtime
from tests.support.fp8 import quantised, write_fp8

NAME = "model.layers.1.mlp.down_proj.weight"


def is_projection(name: str) -> bool:
    return name.endswith("_proj.weight")


@pytest.fixture
def stored(untied_model: Path, tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A tiny Qwen3 with blocks of 48 x 40, which divide none of its sizes, and its weights as numbers."""
    return tmp_path / "fp8", write_fp8(untied_model, tmp_path / "fp8", (48, 40), is_projection, scale_fmt="ue8m0")


@pytest.mark.shows("checkpoint: weights stored in FP8 are read as products with their block's factor, partial blocks too")
def test_fp8_weights_are_read_as_products_with_their_blocks_factor(stored: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, plain = stored
    reader = HFReader(path)
    assert {name: info.shape for name, info in reader.infos.items()} == {name: each.shape for name, each in plain.items()}
    assert reader.dequantised == set(filter(is_projection, plain))
    for name, expected in plain.items():
        assert torch.equal(reader.read(name), expected), name
    assert reader.read(NAME).dtype == torch.float32 == reader.infos[NAME].dtype


@pytest.mark.parametrize("size", [(1, 1), (5, 7), (128, 128), (129, 127), (300, 256)])
@pytest.mark.parametrize("factors", [torch.float32, torch.float8_e8m0fnu])
def test_published_blocks_with_edges_of_every_kind(tmp_path: Path, size: tuple[int, int], factors: torch.dtype) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}})
    )
    weight, scales, product = quantised(torch.randn(size), (128, 128))
    if factors != torch.float32:
        scales = scales.log2().round().exp2()
        each_row = scales.repeat_interleave(128, 0)[: size[0]]
        product = weight.float() * each_row.repeat_interleave(128, 1)[:, : size[1]]
    save_file({"a.weight": weight, "a.weight_scale_inv": scales.to(factors)}, tmp_path / "model.safetensors")
    reader = HFReader(tmp_path)
    assert torch.equal(reader.read("a.weight"), product)
    for rows in (slice(0, 1), slice(size[0] // 2, size[0]), slice(None)):
        for columns in (slice(size[1] - 1, size[1]), slice(size[1] // 3, size[1]), slice(None)):
            assert torch.equal(reader.read("a.weight", (rows, columns)), product[rows, columns])


@pytest.mark.parametrize("block", [(32, 8), (8, 32)], ids=str)
def test_a_part_of_a_weight_whose_blocks_are_not_square_has_its_own_factors(tmp_path: Path, block: tuple[int, int]) -> None:
    described = {"quant_method": "fp8", "weight_block_size": list(block)}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": described}))
    weight, factors, product = quantised(torch.randn(90, 70), block)
    save_file({"a.weight": weight, "a.weight_scale_inv": factors}, tmp_path / "model.safetensors")
    reader = HFReader(tmp_path)
    parts = [slice(0, 8), slice(8, 33), slice(40, 64), slice(63, 70), slice(None)]
    for rows in parts:
        for columns in parts:
            assert torch.equal(reader.read("a.weight", (rows, columns)), product[rows, columns]), (rows, columns)


def test_a_part_reads_only_the_factors_of_its_blocks(
    stored: tuple[Path, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, plain = stored
    reader = HFReader(path)
    read: list[tuple[str, Any]] = []
    slices = HFReader._read_slice
    monkeypatch.setattr(
        HFReader, "_read_slice", lambda self, name, region: (read.append((name, region)), slices(self, name, region))[1]
    )
    region = (slice(50, 60), slice(100, 128))
    assert torch.equal(reader.read(NAME, region), plain[NAME][region])
    assert read == [(NAME, region), (f"{NAME}_scale_inv", (slice(1, 2), slice(2, 4)))]


@pytest.mark.shows("checkpoint: a model stored in FP8 trains, and is saved in plain numbers without quantization_config")
def test_a_model_in_fp8_is_built_saved_and_read_again(stored: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    path, plain = stored
    runtime = native_runtime(RuntimeConfig(hf_path=str(path), backend_cfg=NativeConfig(device="cpu")))
    try:
        policy = runtime.build_model()
        runtime.save_checkpoint(policy, tmp_path / "out", hf=True)
    finally:
        runtime.close()
    saved = HFReader(tmp_path / "out")
    assert not saved.dequantised and saved.infos.keys() == plain.keys()
    for name, expected in plain.items():
        assert torch.equal(saved.read(name), expected.float())
    assert saved.config == {
        **{name: value for name, value in read_hf_config(path).items() if name != "quantization_config"},
        "dtype": "float32",
    }


@pytest.mark.shows("checkpoint: weights quantised in another way are refused by the field that says so")
@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quant_method='gptq' is not read"),
        ({"quant_method": "fp8"}, "weight_block_size=None is not read"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, r"weight_block_size=\[128, 0\]"),
        ({"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [128, 128]}, "fmt='e5m2' is not read"),
        ({"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": [1, 1]}, "activation_scheme='static'"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "kv_cache": 1}, "kv_cache is not known"),
        ("fp8", "expected an object"),
    ],
)
def test_other_quantisation_is_refused_by_name(untied_model: Path, tmp_path: Path, given: Any, problem: str) -> None:
    write_fp8(untied_model, tmp_path / "other", (128, 128), is_projection)
    config = {**read_hf_config(untied_model), "quantization_config": given}
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match=f"quantization_config=.*{problem}"):
        require_float_weights(tmp_path / "other")
    with pytest.raises(UnsupportedError, match=f"config.json: quantization_config=.*{problem}.*native qwen3 family"):
        QWEN3.parse_config(config)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            {f"{NAME}_scale_inv": torch.ones(2, 3)},
            r"as torch.float32 of shape \(2, 3\); expected .* each block of 48 x 40 of",
        ),
        ({f"{NAME}_scale_inv": torch.ones(2, 4, dtype=torch.int32)}, "as I32 of shape"),
        ({"model.norm.weight_scale_inv": torch.ones(2, 4)}, r"F8_E4M3 \(it is torch.float32 of shape \(64,\)"),
        ({"other_scale_inv": torch.ones(2, 4)}, "there is no such tensor"),
    ],
)
def test_factors_that_do_not_fit_are_refused_by_name(
    stored: tuple[Path, dict[str, torch.Tensor]], change: dict[str, torch.Tensor], problem: str
) -> None:
    file = stored[0] / "model-2.safetensors"
    save_file({**load_file(file), **change}, file)
    with pytest.raises(CheckpointError, match=problem):
        HFReader(stored[0])


def test_fp8_weights_without_factors_are_refused_by_name(stored: tuple[Path, dict[str, torch.Tensor]]) -> None:
    file = stored[0] / "model-2.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if NAME not in name}, file)
    with pytest.raises(UnsupportedError, match=rf"tensor '{NAME}' has dtype F8_E4M3"):
        require_float_weights(stored[0])


def test_kept_weights_in_fp8_are_saved_in_the_models_dtype(tmp_path: Path) -> None:
    tensors = {"model.norm.weight": torch.ones(4), "mtp.fc.weight": torch.randn(70, 50)}
    (tmp_path / "plain").mkdir()
    save_file(tensors, tmp_path / "plain" / "model.safetensors")
    (tmp_path / "plain" / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16"}))
    plain = write_fp8(tmp_path / "plain", tmp_path / "fp8", (32, 32), lambda name: "mtp." in name)
    kept = find_kept(HFReader(tmp_path / "fp8"), ("mtp.",), ())
    assert kept == {"mtp.fc.weight": (70, 50)}
    infos, read = open_kept(tmp_path / "fp8", kept)
    (name, tensor), *others = read
    assert not others and name == infos[0].name and infos[0].dtype == "bfloat16"
    assert torch.equal(tensor, plain["mtp.fc.weight"].bfloat16())


def test_engines_refuse_a_directory_in_fp8(stored: tuple[Path, dict[str, torch.Tensor]]) -> None:
    with pytest.raises(UnsupportedError, match=r"has weights in FP8.*save_checkpoint\(hf=True\)"):
        check_served(RolloutConfig(model_path=str(stored[0])), "cuda")


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({}, torch.bfloat16),
        ({"dtype": "float16"}, torch.float16),
        ({"torch_dtype": "float32"}, torch.float32),
        ({"dtype": "float16", "torch_dtype": "float32"}, torch.float16),
        ({"dtype": None, "torch_dtype": "float32"}, torch.float32),
        ({"dtype": "float32", "text_config": {"dtype": "float16"}}, torch.float16),
    ],
    ids=str,
)
def test_the_dtype_of_a_model_is_what_its_configuration_says(config: dict[str, Any], dtype: torch.dtype) -> None:
    assert plain_dtype(config) == dtype


def test_factors_may_be_bfloat16_and_are_of_matrices_alone(tmp_path: Path) -> None:
    described = {"quant_method": "fp8", "weight_block_size": [32, 8]}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": described}))
    weight, factors, _ = quantised(torch.randn(40, 20), (32, 8))
    save_file({"a.weight": weight, "a.weight_scale_inv": factors.bfloat16()}, tmp_path / "model.safetensors")
    each = factors.bfloat16().float().repeat_interleave(32, 0)[:40].repeat_interleave(8, 1)[:, :20]
    assert torch.equal(HFReader(tmp_path).read("a.weight"), weight.float() * each)
    stacked = {"a.weight": weight[None], "a.weight_scale_inv": factors[None]}
    save_file(stacked, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has a\.weight_scale_inv as torch.float32 of shape \(1, 2, 3\); expected"):
        HFReader(tmp_path)
