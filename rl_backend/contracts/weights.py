"""What a weight sync says about the weights it sends."""

from __future__ import annotations

import math
from typing import NamedTuple, Self

from pydantic import Field, model_validator
from torch import Tensor

from rl_backend.contracts.base_config import BaseConfig
from rl_backend.contracts.errors import ConfigError

UNVERSIONED = -1
"""Version of an engine that serves weights no trainer has pushed."""


class WeightShard(NamedTuple):
    """A rank's share of one weight: a rectangle. The shares of all ranks are the whole weight, once.

    Attributes:
        name: Hugging Face name.
        shape: of the whole weight.
        offset: where the share begins, in each dimension.
        tensor: the share; of no elements on ranks that have none.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: Tensor


class TensorInfo(BaseConfig):
    """One tensor under its Hugging Face name.

    Attributes:
        dtype: torch's name without the module, for example ``bfloat16``.
        offset: bytes from the start of the staging buffer; 0 where a transport has none.
        digest: of the bytes, see :func:`~rl_backend.weights.digest.tensor_digest`; empty where it is computed per bucket.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int = Field(default=0, ge=0)
    nbytes: int = Field(ge=0)
    digest: str = ""

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


class WeightManifest(BaseConfig):
    """All tensors of one push, in the order in which they are sent."""

    version: int = Field(ge=0)
    tensors: tuple[TensorInfo, ...]

    @model_validator(mode="after")
    def _unique_names(self) -> Self:
        names = [tensor.name for tensor in self.tensors]
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ConfigError.of("WeightManifest.tensors", twice, "each name may be sent once")
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, without padding between them."""
        return sum(tensor.nbytes for tensor in self.tensors)
