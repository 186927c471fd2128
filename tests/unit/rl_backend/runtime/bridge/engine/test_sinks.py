"""Sinks are in the gradient norm, whoever's layers they belong to."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from megatron.core.tensor_parallel.layers import (
    param_is_not_tensor_parallel_duplicate,
    set_defaults_if_not_set_tensor_model_parallel_attributes,
)
from torch import nn

from rl_backend.runtime.bridge.engine.optimizer import mark_sinks


class Attention(nn.Module):
    """As Transformer Engine's: a parameter called softmax_offset."""

    def __init__(self) -> None:
        super().__init__()
        self.softmax_offset = nn.Parameter(torch.zeros(2))


def test_sinks_of_every_rank_count_once() -> None:
    layer = nn.ModuleDict({"core_attention": Attention(), "norm": nn.LayerNorm(2)})
    for parameter in layer.parameters():
        set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    mark_sinks([layer])
    second_rank = SimpleNamespace(rank=lambda: 1, size=lambda: 2)
    counted = {name for name, each in layer.named_parameters() if param_is_not_tensor_parallel_duplicate(each, second_rank)}
    assert counted == {"core_attention.softmax_offset"}
