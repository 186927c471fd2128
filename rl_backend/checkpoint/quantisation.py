"""Quantised weights: FP8 with a factor for each block, and experts in MXFP4.

DeepSeek-V3 (arXiv 2412.19437, section 3.3.2) is published in float8_e4m3fn. Beside a weight stands a tensor called like it
with ``_scale_inv`` behind, which has a number for each block of 128 x 128 elements; the weight is the product.

gpt-oss is published in MXFP4 (OCP Microscaling Formats 1.0, sections 5.3 and 6.3): blocks of 32 four-bit numbers with one
power of two. Beside each other stand ``X_blocks``, (experts, outputs, inputs / 32, 16) bytes with two numbers each, the
first in the low half, and ``X_scales``, (experts, outputs, inputs / 32) exponents. ``X`` is (experts, inputs, outputs).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rl_backend.contracts import CheckpointError, TensorInfo, dtype_from_name, stores_mxfp4, text_config, weight_blocks

_SUFFIX = "_scale_inv"
_STORED_AS = ("F8_E4M3",)
_FACTORS_STORED_AS = (torch.float32, torch.bfloat16, "F8_E8M0")


type ReadSlice = Callable[[str, tuple[slice, ...]], Tensor]


class BlockFactors(NamedTuple):
    """The tensor ``name``: factors of blocks of ``weight``. The last block of a dimension may be smaller."""

    name: str
    rows: int
    columns: int
    weight: str
    shape: tuple[int, ...]

    @property
    def stored(self) -> tuple[str, ...]:
        return (self.name,)

    def read(self, read: ReadSlice, region: tuple[slice, ...]) -> Tensor:
        """The part of the weight in ``region``, a slice for each of its first dimensions, float32."""
        whole = zip((*region, slice(None), slice(None)), self.shape, strict=False)
        rows, columns = (slice(*each.indices(size)[:2]) for each, size in whole)
        part = rows, columns
        return self.dequantised(read(self.weight, part), read(self.name, self.region(part)), part)

    def region(self, part: tuple[slice, slice]) -> tuple[slice, slice]:
        rows, columns = part
        return (
            slice(rows.start // self.rows, -(-rows.stop // self.rows)),
            slice(columns.start // self.columns, -(-columns.stop // self.columns)),
        )

    def dequantised(self, stored: Tensor, factors: Tensor, part: tuple[slice, slice]) -> Tensor:
        """A part of the weight, float32, from the part as it is stored and the factors of its :meth:`region`."""
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
    """Name of each weight that is stored in FP8 -> its factors, where ``config.json`` says that there are any."""
    blocks = weight_blocks(config)
    if blocks is None:
        return {}
    found: dict[str, BlockFactors] = {}
    for name, (shape, dtype) in stored.items():
        if not name.endswith(_SUFFIX):
            continue
        weight = name.removesuffix(_SUFFIX)
        held = stored.get(weight)
        expected = None
        if held is not None and held[1] in _STORED_AS and len(held[0]) == 2:
            expected = tuple(-(-size // block) for size, block in zip(held[0], blocks, strict=True))
        if held is None or shape != expected or dtype not in _FACTORS_STORED_AS:
            has = "there is no such tensor" if held is None else f"it is {held[1]} of shape {held[0]}"
            raise CheckpointError.at(
                directory,
                f"has {name} as {dtype} of shape {shape}; expected a float32 number for each block of {blocks[0]} x "
                f"{blocks[1]} of {weight}, in F8_E4M3 ({has}); fetch the model again",
            )
        found[weight] = BlockFactors(name, *blocks, weight, held[0])
    return found


def plain_dtype(config: Mapping[str, Any]) -> torch.dtype:
    """The dtype that ``config.json`` gives a model; weights that were read as FP8 and not trained are written in it."""
    text = text_config(config)
    return dtype_from_name(str(text.get("dtype") or text.get("torch_dtype") or "bfloat16"))


def without_quantisation(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config.json`` of the same model whose weights are written as plain numbers."""
    if weight_blocks(config) is None and not stores_mxfp4(config):
        return dict(config)
    return {name: value for name, value in config.items() if name != "quantization_config"}


_BLOCK = 32
_BIAS = 127
_BLOCKS, _SCALES = "_blocks", "_scales"
_EXPERTS = (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Of a magnitude: 6 is 1.5 * 2 ** 2.
_LARGEST_EXPONENT = 2
# What lies in the middle between two magnitudes goes to the one whose last bit is 0.
_TO_THE_LOWER = (0.25, 1.25, 2.5, 5.0)
_TO_THE_HIGHER = (0.75, 1.75, 3.5)


class MXFP4Weight(NamedTuple):
    """A weight that is stored in MXFP4, (experts, inputs, outputs)."""

    name: str
    shape: tuple[int, ...]

    @property
    def stored(self) -> tuple[str, str]:
        return self.name + _BLOCKS, self.name + _SCALES

    def read(self, read: ReadSlice, region: tuple[slice, ...]) -> Tensor:
        """The part of the weight in ``region``, float32."""
        whole = (*region, *(slice(None),) * (3 - len(region)))
        experts, inputs, outputs = (slice(*each.indices(size)[:2]) for each, size in zip(whole, self.shape, strict=True))
        touched = slice(inputs.start // _BLOCK, -(-inputs.stop // _BLOCK))
        blocks, scales = (read(name, (experts, outputs, touched)) for name in self.stored)
        first = inputs.start - touched.start * _BLOCK
        return dequantised(blocks, scales)[:, first : first + inputs.stop - inputs.start]


def find_mxfp4(
    directory: Path, config: Mapping[str, Any], stored: Mapping[str, tuple[tuple[int, ...], torch.dtype | str]]
) -> dict[str, MXFP4Weight]:
    """Name -> weight in MXFP4, where ``config.json`` says that there are any."""
    found: dict[str, MXFP4Weight] = {}
    if not stores_mxfp4(config):
        return found
    names = {name.removesuffix(end) for name in stored for end in (_BLOCKS, _SCALES) if name.endswith(end)}
    for name in sorted(names):
        blocks, scales = (stored.get(name + end) for end in (_BLOCKS, _SCALES))
        fits = blocks is not None and scales is not None and len(blocks[0]) == 4 and blocks[0][3] * 2 == _BLOCK
        if blocks is None or scales is None or not fits or blocks[0][:3] != scales[0] or {blocks[1], scales[1]} != {"U8"}:
            has = " and ".join("none" if part is None else f"{part[1]} of shape {part[0]}" for part in (blocks, scales))
            raise CheckpointError.at(
                directory,
                f"has {has} as {name}{_BLOCKS} and {name}{_SCALES}; expected U8 of shape (experts, outputs, inputs / "
                f"{_BLOCK}, {_BLOCK // 2}) and of the same without the last number; fetch the model again",
            )
        experts, outputs, count, _ = blocks[0]
        found[name] = MXFP4Weight(name, (experts, count * _BLOCK, outputs))
    return found


def dequantised(blocks: Tensor, scales: Tensor) -> Tensor:
    """(experts, outputs, inputs / 32, 16) and (experts, outputs, inputs / 32) -> (experts, inputs, outputs) float32."""
    values = torch.tensor((*_MAGNITUDES, *(-each for each in _MAGNITUDES)))
    numbers = torch.stack((blocks & 0xF, blocks >> 4), dim=-1).flatten(-2)
    scaled = torch.ldexp(values[numbers.int()], (scales.int() - _BIAS)[..., None])
    return scaled.flatten(-2).transpose(1, 2)


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks and exponents of an (experts, inputs, outputs) weight whose inputs are a multiple of 32."""
    # The exponent of a block is that of its largest number, less 2; what exceeds 6 times that power of two becomes 6 times
    # it, and other numbers the nearest. What was read from MXFP4 has the same numbers again.
    grouped = weight.transpose(1, 2).to(torch.float32).unflatten(-1, (-1, _BLOCK))
    largest = grouped.abs().amax(-1)
    # frexp's mantissas are below 1.
    exponents = (torch.frexp(largest).exponent - 1 - _LARGEST_EXPONENT).clamp(-_BIAS, _BIAS)
    exponents = torch.where(largest == 0.0, -_BIAS, exponents)
    scaled = torch.ldexp(grouped, -exponents[..., None])
    higher = torch.nextafter(torch.tensor(_TO_THE_HIGHER), torch.zeros(()))
    bounds = torch.cat((torch.tensor(_TO_THE_LOWER), higher)).sort().values
    numbers = torch.bucketize(scaled.abs().contiguous(), bounds) + 8 * torch.signbit(scaled)
    low, high = numbers.to(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
    return low | (high << 4), (exponents + _BIAS).to(torch.uint8)


def mxfp4_infos(infos: Iterable[TensorInfo]) -> list[TensorInfo]:
    """What :func:`in_mxfp4` makes of such tensors; :class:`CheckpointError` unless experts are laid out as gpt-oss's."""
    made, any_of_experts = list[TensorInfo](), False
    for info in infos:
        if not _is_quantised(info.name, info.shape):
            made.append(info)
            continue
        any_of_experts = True
        experts, inputs, outputs = info.shape
        if inputs % _BLOCK:
            raise CheckpointError(
                f"{info.name} has {inputs} inputs, which do not come in blocks of {_BLOCK}: it cannot be written in MXFP4; "
                "write bfloat16"
            )
        shape = (experts, outputs, inputs // _BLOCK)
        made.append(TensorInfo.of(info.name + _BLOCKS, (*shape, _BLOCK // 2), torch.uint8))
        made.append(TensorInfo.of(info.name + _SCALES, shape, torch.uint8))
    if not any_of_experts:
        raise CheckpointError("the model has no experts in the layout of gpt-oss, which alone are written in MXFP4")
    return made


def in_mxfp4(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        if _is_quantised(name, tuple(tensor.shape)):
            blocks, scales = quantised(tensor)
            yield from ((name + _BLOCKS, blocks), (name + _SCALES, scales))
        else:
            yield name, tensor


def mxfp4_config(config: Mapping[str, Any]) -> dict[str, Any]:
    if stores_mxfp4(config):
        return dict(config)
    others = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return {**config, "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": others}}


def _is_quantised(name: str, shape: tuple[int, ...]) -> bool:
    return name.endswith(_EXPERTS) and len(shape) == 3
