"""Weights by NCCL broadcast between GPUs, on vLLM's own NCCL transfer engine. Has not been run: needs CUDA.

The source rank and every worker of every engine form one NCCL group; buckets of ``byte_budget`` bytes are packed, broadcast,
checked and loaded. A rank of the group that dies leaves the others waiting in NCCL, as in any NCCL job.
"""

from __future__ import annotations

from actors.rollout.engines import EngineSet
from actors.sync.transport.base import SOURCE_RANK, PushPlan
from actors.sync.transport.streaming import VllmStreamingTransport
from rl_backend.contracts import UnsupportedError


class NcclTransport(VllmStreamingTransport):
    """See the module."""

    name = "nccl"
    kills_abandoned = True

    def check(self, plan: PushPlan, rollout: EngineSet) -> None:
        self.require_cuda(plan, rollout)
        for device, members in devices_of_two(plan, rollout).items():
            raise UnsupportedError(
                f"transport='nccl': {' and '.join(members)} share the GPU {device}, which members of an NCCL group cannot; "
                "use transport='cuda_ipc' where every engine shares GPUs with training ranks, else 'shared_memory' on one "
                "host or 'gloo'",
                device=device,
            )


def devices_of_two(plan: PushPlan, rollout: EngineSet) -> dict[str, list[str]]:
    """UUIDs of GPUs that more than one member of the transfer group has -> the members: the source rank and the engines."""
    members: dict[str, list[str]] = {plan.device_ids[SOURCE_RANK]: [f"rank {SOURCE_RANK} of the training group"]}
    for engine in rollout.engines:
        info = rollout.infos[engine]
        for device in info.device_ids:
            members.setdefault(device, []).append(info.name)
    return {device: names for device, names in members.items() if len(names) > 1}
