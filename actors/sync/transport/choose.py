"""Which transport serves a training group and its engines."""

from __future__ import annotations

from actors.rollout.engines import EngineSet
from actors.sync.transport.base import PushPlan, Transport
from actors.sync.transport.cuda_ipc import CudaIpcTransport
from actors.sync.transport.gloo import GlooTransport
from actors.sync.transport.nccl import NcclTransport, devices_of_two
from actors.sync.transport.shared_memory import SharedMemoryTransport
from rl_backend.contracts import ConfigError

_TRANSPORTS: dict[str, type[Transport]] = {
    transport.name: transport for transport in (SharedMemoryTransport, GlooTransport, NcclTransport, CudaIpcTransport)
}


def make_transport(name: str) -> Transport:
    """The transport of that name; raises :class:`~rl_backend.contracts.ConfigError` for any other."""
    if name not in _TRANSPORTS:
        raise ConfigError.of("transport", name, f"expected auto or one of {', '.join(_TRANSPORTS)}")
    return _TRANSPORTS[name]()


def choose_transport(plan: PushPlan, rollout: EngineSet) -> Transport:
    """CUDA IPC where every engine's GPUs have training ranks, NCCL where each member has a GPU of its own, shared memory on
    one node, else gloo.

    One node is one Ray node whose processes share one /dev/shm. Two Ray nodes on one machine, as tests and containers make
    them, count as two, although shared memory can be asked for by name where they do share it.
    """
    infos = [rollout.infos[engine] for engine in rollout.engines]
    if plan.device_ids and all(info.device == "cuda" for info in infos):
        if all(set(info.device_ids) <= set(plan.device_ids) for info in infos):
            return make_transport("cuda_ipc")
        if not devices_of_two(plan, rollout):
            return make_transport("nccl")
    on_node = all((info.node_id, info.host) == (plan.node_id, plan.host) for info in infos)
    return make_transport("shared_memory" if on_node else "gloo")
