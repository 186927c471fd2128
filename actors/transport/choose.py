"""Which transport serves a training group and its engines."""

from __future__ import annotations

from actors.rollout_group import RolloutGroup
from actors.transport.base import PushPlan, Transport
from actors.transport.shared_memory import SharedMemoryTransport
from rl_backend.contracts import ConfigError

_TRANSPORTS: dict[str, type[Transport]] = {transport.name: transport for transport in (SharedMemoryTransport,)}


def make_transport(name: str) -> Transport:
    """The transport of that name; raises :class:`~rl_backend.contracts.ConfigError` for any other."""
    if name not in _TRANSPORTS:
        raise ConfigError.of("transport", name, f"expected auto or one of {', '.join(_TRANSPORTS)}")
    return _TRANSPORTS[name]()


def choose_transport(plan: PushPlan, rollout: RolloutGroup) -> Transport:
    """CUDA IPC on a shared GPU, NCCL between GPUs, shared memory on one host, gloo otherwise."""
    infos = [rollout.infos[engine] for engine in rollout.engines]
    if plan.device_id and all(info.device == "cuda" for info in infos):
        shared = all(plan.device_id in info.device_ids for info in infos)
        return make_transport("cuda_ipc" if shared else "nccl")
    return make_transport("shared_memory" if all(info.host == plan.host for info in infos) else "gloo")
