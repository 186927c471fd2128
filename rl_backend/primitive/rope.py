"""Rotary position embedding in the half-split layout of Hugging Face checkpoints, and its scaling to longer contexts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation (Chen et al., arXiv 2306.15595); ``linear`` in transformers' ``modeling_rope_utils``."""

    factor: float  # what every frequency is divided by
    attention_factor: float = 1.0

    def scale(self, frequencies: Tensor, rotary: Rotary) -> Tensor:
        return frequencies / self.factor


@dataclass(frozen=True)
class Llama3Scaling:
    """Scaling of Llama 3.1 (Grattafiori et al., arXiv 2407.21783); ``llama3`` in transformers' ``modeling_rope_utils``.

    With r rotations that fit into the original context, frequencies with ``r > high_freq_factor`` stay, those with ``r <
    low_freq_factor`` are divided by ``factor``, and between the two the result is linear in r.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int
    attention_factor: float = 1.0

    def scale(self, frequencies: Tensor, rotary: Rotary) -> Tensor:
        rotations = self.original_max_position_embeddings / (2 * math.pi / frequencies)
        kept = (rotations - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = kept.clamp(0.0, 1.0)
        return (1 - kept) * frequencies / self.factor + kept * frequencies


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al., arXiv 2309.00071, sections 3.2 to 3.4); ``yarn`` in transformers' ``modeling_rope_utils``."""

    factor: float  # what low frequencies are divided by
    original_max_position_embeddings: int  # length of the original context, in tokens
    attention_factor: float  # of cosines and sines; see :func:`yarn_attention_factor`
    beta_fast: float = 32.0  # rotations within the original context above which a frequency stays
    beta_slow: float = 1.0  # those below which it is divided; between the two it is linear in the dimension's number
    truncate: bool = True  # whether these dimensions are rounded outwards to whole numbers

    def scale(self, frequencies: Tensor, rotary: Rotary) -> Tensor:
        low, high = self._dimension(self.beta_fast, rotary), self._dimension(self.beta_slow, rotary)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotary.head_dim - 1)
        high = high if high != low else high + 0.001
        dimensions = torch.arange(rotary.head_dim // 2, dtype=torch.float32, device=frequencies.device)
        kept = 1 - ((dimensions - low) / (high - low)).clamp(0.0, 1.0)
        return frequencies / self.factor * (1 - kept) + frequencies * kept

    def _dimension(self, rotations: float, rotary: Rotary) -> float:
        """The dimension, as a real number, whose frequency makes so many rotations within the original context."""
        wavelengths = self.original_max_position_embeddings / (rotations * 2 * math.pi)
        return rotary.head_dim * math.log(wavelengths) / (2 * math.log(rotary.theta))


def yarn_attention_factor(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """``0.1 ln(factor) + 1`` (YaRN, equation 22), or with both ``mscale`` the quotient that DeepSeek-V2 made of it."""
    if mscale and mscale_all_dim:
        return yarn_temperature(factor, mscale) / yarn_temperature(factor, mscale_all_dim)
    return yarn_temperature(factor)


def yarn_temperature(factor: float, mscale: float = 1.0) -> float:
    """``0.1 mscale ln(factor) + 1``, and 1 where nothing is divided."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


type RotaryScaling = LinearScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True)
class Rotary:
    """A rotary embedding: the facts that determine its angles."""

    head_dim: int  # even
    theta: float  # base of the frequencies
    scaling: RotaryScaling | None = None  # None for the original embedding (``default`` in transformers)

    def frequencies(self, device: torch.device | None = None) -> Tensor:
        """(head_dim / 2,) float32, radians per position."""
        exponents = torch.arange(0, self.head_dim, 2, device=device).to(torch.float32) / self.head_dim
        frequencies = 1.0 / self.theta**exponents
        return frequencies if self.scaling is None else self.scaling.scale(frequencies, self)


def rotary_cos_sin(position_ids: Tensor, rotary: Rotary, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of each position's angles (Su et al., arXiv 2104.09864), times the scaling's attention factor.

    (T,) positions -> two (T, 1, head_dim) tensors of ``dtype``; the second half of the last dimension repeats the first.
    """
    # Not from a buffer: there is nothing to restore after a model was built on the meta device.
    angles = position_ids.to(torch.float32)[:, None] * rotary.frequencies(position_ids.device)
    angles = torch.cat((angles, angles), dim=-1)[:, None, :]
    cos, sin = angles.cos(), angles.sin()
    if rotary.scaling is not None and rotary.scaling.attention_factor != 1.0:
        cos, sin = cos * rotary.scaling.attention_factor, sin * rotary.scaling.attention_factor
    return cos.to(dtype), sin.to(dtype)


class Rotations:
    """Cosines and sines of a micro-batch by rotary embedding, each computed when a layer first asks."""

    def __init__(self, position_ids: Tensor, dtype: torch.dtype) -> None:
        self._position_ids, self._dtype = position_ids, dtype
        self._known: dict[Rotary, tuple[Tensor, Tensor]] = {}

    def of(self, rotary: Rotary | None) -> tuple[Tensor, Tensor] | None:
        if rotary is None:
            return None
        if rotary not in self._known:
            self._known[rotary] = rotary_cos_sin(self._position_ids, rotary, self._dtype)
        return self._known[rotary]


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates (T, heads, head_dim) by the angles of :func:`rotary_cos_sin`."""
    if torch.compiler.is_compiling():
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin
    rotated: Tensor = _Rotary.apply(x, cos, sin)
    return rotated


class _Rotary(torch.autograd.Function):
    """Three kernels and one output, forward and backward; the usual form concatenates and negates halves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, sign=1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, sin, sign=-1.0), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    half = x.shape[-1] // 2
    rotated = x * cos
    rotated[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-sign)
    rotated[..., half:].addcmul_(x[..., :half], sin[..., half:], value=sign)
    return rotated
