"""FP8 weights with a factor for each block: found in a directory, and read.

DeepSeek-V3 (arXiv 2412.19437, section 3.3.2) is published so: beside a weight of type float8_e4m3fn stands a tensor called
like it with ``_scale_inv`` behind, which has a number for each block of 128 x 128 elements. The weight is the product.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rl_backend.contracts import CheckpointError, dtype_from_name, stores_mxfp4, text_config, weight_blocks

_SUFFIX = "_scale_inv"
_STORED_AS = ("F8_E4M3",)
_FACTORS_STORED_AS = (torch.float32, torch.bfloat16, "F8_E8M0")


type ReadSlice = Callable[[str, tuple[slice, ...]], Tensor]


class BlockFactors(NamedTuple):
    """The factors of one weight.

    Attributes:
        name: of the tensor that they are.
        rows, columns: of a block of the weight. The last block of a dimension may be smaller.
        weight: its name.
        shape: of the weight.
    """

    name: str
    rows: int
    columns: int
    weight: str
    shape: tuple[int, ...]

    @property
    def stored(self) -> tuple[str, ...]:
        """Names of tensors that are none of the model's."""
        return (self.name,)

    def read(self, read: ReadSlice, region: tuple[slice, ...]) -> Tensor:
        """The part of the weight in ``region``, a slice for each of its first dimensions, float32.

        Args:
            read: (name of a stored tensor, region) -> that part of it.
        """
        whole = zip((*region, slice(None), slice(None)), self.shape, strict=False)
        rows, columns = (slice(*each.indices(size)[:2]) for each, size in whole)
        part = rows, columns
        return self.dequantised(read(self.weight, part), read(self.name, self.region(part)), part)

    def region(self, part: tuple[slice, slice]) -> tuple[slice, slice]:
        """The factors of the blocks that a part of the weight touches."""
        rows, columns = part
        return (
            slice(rows.start // self.rows, -(-rows.stop // self.rows)),
            slice(columns.start // self.columns, -(-columns.stop // self.columns)),
        )

    def dequantised(self, stored: Tensor, factors: Tensor, part: tuple[slice, slice]) -> Tensor:
        """A part of the weight, float32.

        Args:
            stored: the part as it is stored.
            factors: those of :meth:`region`.
        """
        rows, columns = part
        weight = stored.to(torch.float32)
        block_of_row = torch.arange(rows.start, rows.stop) // self.rows - rows.start // self.rows
        factor_of_row = factors.to(torch.float32)[block_of_row]
        for number in range(factors.shape[1]):
            first = (columns.start // self.columns + number) * self.columns - columns.start
            weight[:, max(first, 0) : first + self.columns] *= factor_of_row[:, number, None]
        return weight


def find_factors(
    directory: Path, config: Mapping[str, Any], stored: Mapping[str, tuple[tuple[int, ...], torch.dtype | str]]
) -> dict[str, BlockFactors]:
    """Name of each weight that is stored in FP8 -> its factors; empty where ``config.json`` does not say that there are any.

    Args:
        stored: name -> (shape, dtype) of all tensors of the directory.

    Raises:
        CheckpointError: factors that belong to no such weight, or that are not one for each of its blocks.
    """
    blocks = weight_blocks(config)
    if blocks is None:
        return {}
    found: dict[str, BlockFactors] = {}
    for name, (shape, dtype) in stored.items():
        if not name.endswith(_SUFFIX):
            continue
        weight = name.removesuffix(_SUFFIX)
        held = stored.get(weight)
        if held is None or held[1] not in _STORED_AS or len(held[0]) != 2:
            has = "there is no such tensor" if held is None else f"it is {held[1]} of shape {held[0]}"
            raise CheckpointError.at(
                directory, f"has {name}, the factors of {weight} in F8_E4M3, but {has}; fetch the model again", tensor=name
            )
        expected = tuple(-(-size // block) for size, block in zip(held[0], blocks, strict=True))
        if shape != expected or dtype not in _FACTORS_STORED_AS:
            raise CheckpointError.at(
                directory,
                f"has {name} as {dtype} of shape {shape}; expected float32 of shape {expected}, a number for each block of "
                f"{blocks[0]} x {blocks[1]} of {weight}, which has shape {held[0]}",
                tensor=name,
            )
        found[weight] = BlockFactors(name, *blocks, weight, held[0])
    return found


def plain_dtype(config: Mapping[str, Any]) -> torch.dtype:
    """What weights are written in that were read as FP8 and not trained: the dtype that ``config.json`` gives the model."""
    text = text_config(config)
    return dtype_from_name(str(text.get("dtype") or text.get("torch_dtype") or "bfloat16"))


def without_quantisation(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config.json`` of the same model whose weights are written as plain numbers."""
    if weight_blocks(config) is None and not stores_mxfp4(config):
        return dict(config)
    return {name: value for name, value in config.items() if name != "quantization_config"}
