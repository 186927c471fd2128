"""Layout of a model over ranks."""

from __future__ import annotations

from pydantic import Field

from rl_backend.contracts.base_config import BaseConfig
from rl_backend.contracts.errors import ConfigError


class ParallelConfig(BaseConfig):
    """Sizes of the model-parallel dimensions; the data-parallel size follows from the world size.

    Attributes:
        tp: tensor parallel, with sequence parallel.
        pp: pipeline stages (ranks).
        vpp: stages per pipeline rank.
        cp: context parallel.
        ep: expert parallel; divides ``dp * cp * tp / etp``.
        etp: tensor parallel inside an expert.
    """

    tp: int = Field(default=1, ge=1)
    pp: int = Field(default=1, ge=1)
    vpp: int = Field(default=1, ge=1)
    cp: int = Field(default=1, ge=1)
    ep: int = Field(default=1, ge=1)
    etp: int = Field(default=1, ge=1)

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the dense model: ``tp * pp * cp``."""
        return self.tp * self.pp * self.cp

    def data_parallel_size(self, world_size: int) -> int:
        """``world_size / (tp * pp * cp)``; raises :class:`ConfigError` when that, or the expert layout, does not divide."""
        size = self.model_parallel_size
        if world_size % size:
            fitting = [size * copies for copies in (world_size // size, world_size // size + 1) if copies]
            raise ConfigError(
                f"world size {world_size} is not a multiple of tp*pp*cp = {self.tp}*{self.pp}*{self.cp} = {size}; "
                f"use {' or '.join(map(str, fitting))} ranks",
                world_size=world_size,
                model_parallel_size=size,
            )
        experts = self.ep * self.etp * self.pp
        if world_size % experts:
            raise ConfigError(
                f"world size {world_size} is not a multiple of ep*etp*pp = {self.ep}*{self.etp}*{self.pp} = {experts}",
                world_size=world_size,
                expert_parallel_size=experts,
            )
        return world_size // size
