"""Activation functions of feed-forward blocks."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

type Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]


def squared_relu(x: Tensor) -> Tensor:
    """``relu(x) ** 2`` (So et al., arXiv 2109.08668)."""
    return F.relu(x).square()


ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
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
