"""MiniMax-M2's norms over all heads of queries or keys, on tensor-parallel ranks that have some of the heads each."""

from collections.abc import Callable
from typing import Any

from megatron.bridge.models.minimax_m2.minimax_m2_bridge import _FullDimQKNormMapping
from megatron.bridge.models.minimax_m2.minimax_m2_provider import FullDimKNorm, FullDimQNorm, _FullDimRMSNorm
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor, nn


class NormOfAllHeads(_FullDimRMSNorm):
    """Megatron-Bridge's with whole gradients: the squares of a rank's heads are in the outputs of all ranks.

    Its weight is marked as a part, without which the global gradient norm would have that of the first rank alone.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(L, B, heads here, features)."""
        wide = x.flatten(2).float()
        squares = wide.square().sum(-1, keepdim=True)
        group = self._tp_group_getter()
        if group is not None and group.size() > 1:
            # Backward: gradients of all ranks are summed.
            squares = copy_to_tensor_model_parallel_region(squares, group=group)
            squares = reduce_from_tensor_model_parallel_region(squares, group=group)
            squares = squares * (self.shard_world_size / group.size())
        normed = wide * (squares / self.global_dim + self.eps).rsqrt()
        scaled: Tensor = self.weight * normed.to(x.dtype)
        return scaled.reshape(x.shape)


def of_queries(hidden_size: int, config: Any, eps: float = 1e-6) -> NormOfAllHeads:
    return _made_by(FullDimQNorm, hidden_size, config, eps)


def of_keys(hidden_size: int, config: Any, eps: float = 1e-6) -> NormOfAllHeads:
    return _made_by(FullDimKNorm, hidden_size, config, eps)


def _made_by(make: Callable[..., Any], hidden_size: int, config: Any, eps: float) -> NormOfAllHeads:
    """With the sizes that Megatron-Bridge gives its norm."""
    norm = make(hidden_size, config, eps)
    sizes = (norm.local_dim, norm.global_dim, norm.shard_world_size)
    return NormOfAllHeads(*sizes, norm._tp_group_getter, eps, dtype=norm.weight.dtype)


class NormMapping(_FullDimQKNormMapping):
    """Megatron-Bridge's without CUDA: each rank takes its part of what it has read."""

    def hf_to_megatron(self, hf_weights: Tensor, megatron_module: nn.Module) -> Tensor:
        weight: Any = megatron_module.weight
        size = weight.shape[0]
        _, rank = self._get_shard_spec(shard_size=size, megatron_module=megatron_module, global_size_attr="global_dim")
        return hf_weights[rank * size : (rank + 1) * size].to(weight)
