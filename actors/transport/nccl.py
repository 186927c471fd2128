"""Weights by NCCL broadcast between GPUs, on vLLM's own NCCL transfer engine. Has not been run: needs CUDA.

The source rank and every worker of every engine form one NCCL group; buckets of ``byte_budget`` bytes are packed, broadcast,
checked and loaded. A rank of the group that dies leaves the others waiting in NCCL, as in any NCCL job.
"""

from __future__ import annotations

from actors.rollout_engines import EngineSet
from actors.transport.base import PushPlan
from actors.transport.streaming import VllmStreamingTransport


class NcclTransport(VllmStreamingTransport):
    """See the module."""

    name = "nccl"
    kills_abandoned = True

    def check(self, plan: PushPlan, rollout: EngineSet) -> None:
        self.require_cuda(plan, rollout)
