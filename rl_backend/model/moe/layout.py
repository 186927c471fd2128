"""Which layouts a decoder with mixtures of experts can have."""

from __future__ import annotations

from rl_backend.contracts import ParallelConfig
from rl_backend.model.dense.layout import check_decoder, require_divided
from rl_backend.model.moe.architecture import MoEArchitecture


def check_layout(arch: MoEArchitecture, parallel: ParallelConfig) -> None:
    """Raises :class:`~rl_backend.contracts.ConfigError` for sizes that do not divide the model."""
    check_decoder(arch, parallel)
    if not all(arch.sparse):
        require_divided("tp", parallel.tp, "intermediate_size", arch.intermediate_size)
    require_divided("ep", parallel.ep, "num_experts", arch.router.num_experts)
    require_divided("etp", parallel.etp, "moe_intermediate_size", arch.expert_intermediate_size)
