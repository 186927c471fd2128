"""Weights through GPU memory that trainer and engine share, on vLLM's own CUDA IPC engine. Has not been run: needs CUDA.

For colocated training: every GPU of every engine also has a training rank. Each rank packs buckets of ``byte_budget`` bytes
into one buffer on its GPU, the engine's worker on that GPU maps it, checks and loads it.
"""

from __future__ import annotations

from actors.rollout.engines import EngineSet
from actors.sync.transport.base import PushPlan
from actors.sync.transport.streaming import VllmStreamingTransport
from rl_backend.contracts import UnsupportedError


class CudaIpcTransport(VllmStreamingTransport):
    """See the module."""

    name = "cuda_ipc"

    def check(self, plan: PushPlan, rollout: EngineSet) -> None:
        self.require_cuda(plan, rollout)
        for engine in rollout.engines:
            info = rollout.infos[engine]
            missing = set(info.device_ids) - set(plan.device_ids)
            if missing:
                raise UnsupportedError(
                    f"transport='cuda_ipc': {info.name} uses GPUs without a training rank ({', '.join(sorted(missing))}); "
                    "use transport='nccl'"
                )
