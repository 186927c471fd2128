"""Elementwise functions: activations of feed-forward blocks and of gates."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

type Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
type Elementwise = Callable[[Tensor], Tensor]

_STRIDE_BYTES = 128
"""What the loops of torch's CPU kernels take at a time: two vectors of AVX-512."""


def by_whole_vectors(function: Elementwise) -> Elementwise:
    """``function``, with bits of a row of its argument, (rows, features), that on a CPU do not depend on the other rows.

    Compiled code has no such bits.
    """

    def of_rows(x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return function(x)
        features = x.shape[-1]
        missing = -features % (_STRIDE_BYTES // x.itemsize)
        if x.device.type != "cpu" or not missing:
            return function(x)
        # What does not fill a vector is computed number by number, with other last bits.
        return function(F.pad(x, (0, missing)))[..., :features]

    return of_rows


sigmoid = by_whole_vectors(torch.sigmoid)
silu = by_whole_vectors(F.silu)
softplus = by_whole_vectors(F.softplus)


def squared_relu(x: Tensor) -> Tensor:
    """``relu(x) ** 2`` (So et al., arXiv 2109.08668)."""
    return F.relu(x).square()


ACTIVATIONS: Mapping[Activation, Elementwise] = {
    "silu": silu,
    "gelu": by_whole_vectors(F.gelu),
    "gelu_tanh": by_whole_vectors(partial(F.gelu, approximate="tanh")),
    "relu": F.relu,
    "relu2": squared_relu,
}

HF_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
"""``hidden_act`` of a ``config.json`` -> the function."""
