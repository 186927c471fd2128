"""Directories with weights in FP8, written from plain ones by the published rule."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

LARGEST = 448.0
"""Of float8_e4m3fn."""


def quantised(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """FP8, the factor of each block, and the product, block by block."""
    rows, columns = (-(-size // each) for size, each in zip(weight.shape, block, strict=True))
    stored, factors = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
    product = weight.clone()
    for row in range(rows):
        for column in range(columns):
            place = (slice(row * block[0], (row + 1) * block[0]), slice(column * block[1], (column + 1) * block[1]))
            factors[row, column] = weight[place].abs().max() / LARGEST
            stored[place] = (weight[place] / factors[row, column]).to(torch.float8_e4m3fn)
            product[place] = stored[place].float() * factors[row, column]
    return stored, factors, product


def write_fp8(
    source: Path, path: Path, block: tuple[int, int], chosen: Callable[[str], bool], **settings: Any
) -> dict[str, Tensor]:
    """A copy of a model directory, factors in another file than weights; returns what the weights are as numbers.

    Args:
        chosen: which tensors are in FP8.
        settings: further fields of ``quantization_config``.
    """
    tensors = {name: tensor for file in sorted(source.glob("*.safetensors")) for name, tensor in load_file(file).items()}
    path.mkdir()
    plain, weights, factors = dict(tensors), dict(tensors), {}
    for name in filter(chosen, tensors):
        weights[name], factors[f"{name}_scale_inv"], plain[name] = quantised(tensors[name].float(), block)
    save_file(weights, path / "model-1.safetensors")
    save_file(factors, path / "model-2.safetensors")
    described = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    config = json.loads((source / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": {**described, **settings}}))
    return plain
