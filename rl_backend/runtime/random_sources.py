"""Whose random state of a checkpoint a rank takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ValidationError

from rl_backend.contracts import ConfigError, ParallelConfig

type Differs = Literal["replicas", "tensor_ranks", "expert_ranks", "nowhere"]
"""Between which ranks a stream of random numbers differs: those of one replica, or those at one place, have it in common."""


@dataclass(frozen=True)
class RankLayout:
    """A runtime's layout over its ranks, which both runtimes number with tp first, then cp, data parallelism and pp."""

    backend: str
    parallel: ParallelConfig
    world_size: int

    @classmethod
    def of(cls, runtime_config: Mapping[str, Any], world_size: int) -> RankLayout | None:
        """That of a dumped ``RuntimeConfig``; None for a runtime whose configuration has no ``parallel`` of ours."""
        try:
            parallel = ParallelConfig.model_validate(runtime_config["backend_cfg"]["parallel"])
            parallel.data_parallel_size(world_size)
            return cls(str(runtime_config["backend"]), parallel, world_size)
        except (ConfigError, KeyError, TypeError, ValidationError):
            return None

    @property
    def data_parallel_size(self) -> int:
        return self.parallel.data_parallel_size(self.world_size)

    @property
    def stride(self) -> int:
        """From one data-parallel rank to the next."""
        return self.parallel.tp * self.parallel.cp


def source_rank(rank: int, here: RankLayout, saved: RankLayout, differs: Differs) -> int | None:
    """The rank of ``saved`` whose state of a stream ``rank`` continues, or None where there is no such rank.

    In the same layout it is the rank itself. In another one all ranks of a replica continue the first rank of the replica of
    their data-parallel rank, so that ranks which must draw the same numbers do. Streams that differ inside a replica
    continue where the layout still has as many of them.
    """
    if saved == here:
        return rank
    parallel, experts = here.parallel, here.parallel.ep * here.parallel.etp
    match differs:
        case "replicas":
            data_parallel_rank = rank // here.stride % here.data_parallel_size
            return data_parallel_rank * saved.stride if data_parallel_rank < saved.data_parallel_size else None
        case "tensor_ranks":
            return rank % parallel.tp if parallel.tp == saved.parallel.tp else None
        case "expert_ranks":
            same = (parallel.ep, parallel.etp) == (saved.parallel.ep, saved.parallel.etp)
            return rank % experts if same else None
        case "nowhere":
            return 0
