"""Fake process groups: one rank of a layout whose other ranks do not exist."""

import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist

from rl_backend.contracts import ParallelConfig, UnsupportedError
from rl_backend.parallel.groups import ParallelGroups, close_groups, open_groups

META = torch.device("meta")


@contextmanager
def fake_rank(parallel: ParallelConfig, rank: int, world_size: int) -> Generator[ParallelGroups]:
    """The groups of global rank ``rank``, with which a model can be laid out, and run, on the meta device.

    They are torch's fake process groups: collectives return at once and move nothing.

    Raises:
        UnsupportedError: this process has a process group.
        ConfigError: ``world_size`` does not fit ``parallel``.
    """
    if dist.is_initialized():
        raise UnsupportedError("this process has a process group already; imagine ranks in a process of its own")
    # Importing it makes the backend known.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with ExitStack() as undone:
        # torch puts the rank before every line of an error, once more with each group.
        undone.callback(setattr, sys, "excepthook", sys.excepthook)
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        undone.callback(dist.destroy_process_group)
        groups = open_groups(parallel, torch.device("cpu"))
        undone.callback(close_groups, groups)
        yield replace(groups, device=META)
