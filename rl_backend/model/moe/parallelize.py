"""How a decoder with mixtures of experts is laid out over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from rl_backend.contracts import NativeConfig
from rl_backend.model.dense.parallelize import shard_decoder, split_decoder, split_feed_forward
from rl_backend.model.moe.model import MoEDecoder, MoELayer
from rl_backend.parallel.collectives import sum_over
from rl_backend.parallel.expert import AllToAllDispatcher
from rl_backend.parallel.tensor import TensorParallel, distribute_experts
from rl_backend.primitive.feed_forward import MoE, SwiGLUExperts

if TYPE_CHECKING:
    from rl_backend.parallel.groups import ParallelGroups

_SPLIT_DIMENSIONS = {"gate_up_proj": (0, 2), "down_proj": (0, 2)}


def parallelize(module: nn.Module, groups: ParallelGroups, config: NativeConfig) -> None:
    """Tensor, context and expert parallelism, activation checkpointing and FSDP2, each layer a unit of its own.

    Experts are a unit of their own where their copies are on other ranks than those of the rest of the layer.
    """
    if not isinstance(module, MoEDecoder):
        raise TypeError(f"parallelize got a {type(module).__name__}; expected MoEDecoder")
    split_decoder(module, groups)
    experts = []
    for layer in module.layers.values():
        if isinstance(layer, MoELayer):
            _split_mixture(layer.mlp, groups)
            experts.append(layer.mlp.experts)
        elif groups.tp_group.size() > 1:
            split_feed_forward(layer.mlp, TensorParallel(groups.tp_mesh))
    same_copies = groups.expert_group.size() == groups.tp_group.size() == 1
    shard_decoder(module, groups, config, experts=() if same_copies else experts)


def _split_mixture(moe: MoE, groups: ParallelGroups) -> None:
    """Experts over ep and etp; the router, and what gates shared experts, on every rank for its own tokens."""
    if groups.token_group.size() > 1:
        moe.sum_over_ranks = sum_over(groups.token_group)
    if groups.expert_group.size() > 1:
        _split_experts(moe.experts, groups)
    if groups.tp_group.size() == 1:
        return
    tensor = TensorParallel(groups.tp_mesh)
    tensor.replicate(moe.gate)
    if moe.shared_expert is not None:
        split_feed_forward(moe.shared_expert, tensor)
    if moe.shared_expert_gate is not None:
        tensor.replicate(moe.shared_expert_gate)


def _split_experts(experts: SwiGLUExperts, groups: ParallelGroups) -> None:
    parallel = groups.parallel
    experts.dispatcher = AllToAllDispatcher(groups.expert_group, experts.gate_up_proj.shape[0], parallel.ep, parallel.etp)
    distribute_experts(experts, groups.ep_etp_mesh if parallel.etp > 1 else groups.ep_mesh, _SPLIT_DIMENSIONS)
