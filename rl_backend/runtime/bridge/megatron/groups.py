"""Megatron's process groups of one rank."""

from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.process_groups_config import ProcessGroupCollection

from rl_backend.contracts import ConfigError, ParallelConfig
from rl_backend.parallel.groups import COLLECTIVE_TIMEOUT, RankGroups, join_default_group, leave_default_group, world_group
from rl_backend.runtime.bridge.config import megatron_sizes
from rl_backend.runtime.bridge.megatron.cpu import on_cpu


@dataclass(frozen=True, kw_only=True)
class BridgeGroups(RankGroups):
    """Ranks as Megatron numbers them, with Megatron's groups ``pg`` of this layout."""

    pg: ProcessGroupCollection

    @property
    def has_outputs(self) -> bool:
        """Whether this is the one rank of its model replica that gives outputs: last stage, first of tp and cp."""
        pg = self.pg
        return bool(pg.pp.rank() == pg.pp.size() - 1 and pg.tp.rank() == 0 and pg.cp.rank() == 0)


# Megatron keeps its groups in globals of the process; runtimes of one layout share them.
@dataclass
class _ModelParallelState:
    parallel: ParallelConfig | None = None
    users: int = 0


_state = _ModelParallelState()


def open_groups(parallel: ParallelConfig, device: torch.device, timeout: timedelta = COLLECTIVE_TIMEOUT) -> BridgeGroups:
    """Makes the groups of the layout. A collective over all ranks of the job; :func:`close_groups` undoes it."""
    join_default_group(device, timeout)
    with ExitStack() as undone_on_error:
        undone_on_error.callback(leave_default_group)
        dp_size = parallel.data_parallel_size(dist.get_world_size())
        _join_model_parallel(parallel, device, timeout)
        undone_on_error.callback(_leave_model_parallel)
        host_group = dist.new_group(backend="gloo", timeout=timeout)
        undone_on_error.pop_all()
    pg = ProcessGroupCollection.use_mpu_process_groups()
    return BridgeGroups(
        parallel=parallel,
        device=device,
        pg=pg,
        replica_group=pg.mp,
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=dp_size,
        dp_group=parallel_state.get_data_parallel_group(),
        world_group=world_group(),
        host_group=host_group,
        timeout=timeout,
    )


def close_groups(groups: BridgeGroups) -> None:
    """Destroys what :func:`open_groups` made: Megatron's groups after the last runtime that uses them."""
    if not dist.is_initialized():
        return
    dist.destroy_process_group(groups.host_group)
    _leave_model_parallel()
    leave_default_group()


def _leave_model_parallel() -> None:
    _state.users -= 1
    if _state.users == 0:
        _destroy_model_parallel()


def _destroy_model_parallel() -> None:
    # Megatron's own function forgets only some of its groups; each keeps three threads over gloo. None is destroyed: that
    # waits for what a rank that failed has not received. They end with the default group. The rotary embeddings' caches of
    # angles hold groups as well.
    _state.parallel = None
    parallel_state.destroy_model_parallel()
    for name, value in vars(parallel_state).items():
        if isinstance(value, dist.ProcessGroup) or name == "_global_process_group_list":
            setattr(parallel_state, name, None)
    for cached in (RotaryEmbedding.forward, YarnRotaryEmbedding.forward):
        cached.cache_clear()


def _join_model_parallel(parallel: ParallelConfig, device: torch.device, timeout: timedelta) -> None:
    if _state.users == 0:
        if parallel_state.is_initialized():
            raise ConfigError(
                "other code has made Megatron's model parallel groups in this process; let the bridge runtime make them, or "
                "use another process"
            )
        try:
            with on_cpu(device):
                parallel_state.initialize_model_parallel(
                    **megatron_sizes(parallel), distributed_timeout_minutes=timeout / timedelta(minutes=1)
                )
        except BaseException:
            _destroy_model_parallel()
            raise
        _state.parallel = parallel
    elif _state.parallel != parallel:
        raise ConfigError.of(
            "BridgeConfig.parallel",
            parallel,
            f"this process already uses Megatron with {_state.parallel!r}, and Megatron keeps one layout per process; use "
            "another process for each layout",
        )
    _state.users += 1
