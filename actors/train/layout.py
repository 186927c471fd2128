"""Layouts of a training group: how many ranks it has, and what each of them is to a model."""

from __future__ import annotations

from typing import NamedTuple

from rl_backend.contracts import ConfigError, ParallelConfig, RuntimeConfig
from rl_backend.lab.text import count


class Layout(NamedTuple):
    config: RuntimeConfig
    num_ranks: int

    def describe(self) -> str:
        """As in ``4 ranks (dp=2, tp=2)``; of another runtime than the native one with its name."""
        parallel: ParallelConfig = self.config.backend_cfg.parallel
        sizes = {"dp": parallel.data_parallel_size(self.num_ranks), **parallel.model_dump()}
        shown = ", ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
        runtime = "" if self.config.backend == "native" else f" of the {self.config.backend} runtime"
        return count(self.num_ranks, "rank") + runtime + (f" ({shown})" if shown else "")

    def smaller(self, fewest: int, most: int) -> Layout | None:
        """The largest with fewer data-parallel ranks, of ``fewest`` to ``most`` ranks; None without one."""
        for num_ranks in range(min(self.num_ranks - 1, most), max(fewest, 1) - 1, -1):
            try:
                self.config.backend_cfg.parallel.data_parallel_size(num_ranks)
            except ConfigError:
                continue
            return self._replace(num_ranks=num_ranks)
        return None


def check_fewest(owner: str, parallel: ParallelConfig, num_ranks: int, min_ranks: int) -> None:
    """Refuses ``min_ranks`` that no layout with fewer data-parallel ranks can have; 0 is any group's."""
    if min_ranks > num_ranks:
        raise ConfigError.of(f"{owner}.min_ranks", min_ranks, f"the group has {num_ranks} ranks; use at most that")
    try:
        parallel.data_parallel_size(min_ranks)
    except ConfigError as error:
        raise ConfigError.of(f"{owner}.min_ranks", min_ranks, str(error)) from None
