"""Norms over the heads of all ranks, and the parameter of DeltaNet that stays in float32."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from torch import Tensor, nn

from rl_backend.runtime.bridge.megatron import local_layers
from rl_backend.runtime.bridge.megatron.deltanet import has_deltanet, keep_decay_in_float32
from rl_backend.runtime.bridge.megatron.local_layers import NormMapping, NormOfAllHeads


@pytest.mark.parametrize(("ranks", "copies"), [(1, 1), (2, 1), (4, 2)])
def test_a_norm_over_all_heads_has_the_squares_of_every_rank_and_each_head_once(
    monkeypatch: pytest.MonkeyPatch, ranks: int, copies: int
) -> None:
    """Where there are fewer heads than ranks, several have a copy of one."""
    shards = ranks // copies
    whole = torch.randn(5, 2, 2 * shards, 3, generator=torch.Generator().manual_seed(0))
    weight = torch.linspace(0.5, 2.0, 6 * shards)
    parts = [whole.chunk(shards, dim=2)[rank // copies] for rank in range(ranks)]
    asked: list[str] = []

    def reduce(squares: Tensor, group: Any) -> Tensor:
        asked.append("reduce")
        return torch.stack([part.flatten(2).square().sum(-1, keepdim=True) for part in parts]).sum(0)

    monkeypatch.setattr(local_layers, "copy_to_tensor_model_parallel_region", lambda x, group: asked.append("copy") or x)
    monkeypatch.setattr(local_layers, "reduce_from_tensor_model_parallel_region", reduce)
    expected = whole.flatten(2)
    expected = expected * (expected.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * weight
    for rank in range(ranks):
        norm: Any = NormOfAllHeads(6, 6 * shards, shards, lambda: SimpleNamespace(size=lambda: ranks), 1e-3)
        with torch.no_grad():
            norm.weight.copy_(weight.chunk(shards)[rank // copies])
        mine = expected.view(whole.shape).chunk(shards, dim=2)[rank // copies]
        torch.testing.assert_close(norm(parts[rank]), mine)
        assert norm(parts[rank].bfloat16()).dtype == torch.bfloat16 or norm.weight.dtype == torch.float32
        assert norm.weight.tensor_model_parallel and norm.weight.partition_dim == 0
    assert asked == ([] if ranks == 1 else ["copy", "reduce"] * (2 * ranks))


def test_a_rank_takes_its_part_of_a_norm_that_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def spec(self: Any, **options: Any) -> tuple[int, int]:
        asked.update(options)
        return 3, 1

    monkeypatch.setattr(NormMapping, "_get_shard_spec", spec)
    module: Any = SimpleNamespace(weight=torch.zeros(2, dtype=torch.bfloat16))
    mapping = object.__new__(NormMapping)
    found = mapping.hf_to_megatron(torch.arange(6.0), module)
    assert found.tolist() == [2.0, 3.0] and found.dtype == torch.bfloat16
    assert asked == {"shard_size": 2, "megatron_module": module, "global_size_attr": "global_dim"}


def test_the_decay_of_every_deltanet_of_every_chunk_stays_in_float32() -> None:
    def net() -> Any:
        made = object.__new__(GatedDeltaNet)
        nn.Module.__init__(made)
        made.A_log = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        made.dt_bias = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        return made

    nets = [net() for _ in range(3)]
    other = nn.Linear(2, 2).bfloat16()
    parameters = [each.A_log for each in nets]
    keep_decay_in_float32([nn.Sequential(nets[0], other, nets[1]), nn.Sequential(nets[2])])
    for each, parameter in zip(nets, parameters, strict=True):
        assert each.A_log is parameter and parameter.dtype == torch.float32 and each.dt_bias.dtype == torch.bfloat16
        assert each._keep_in_float32_parameter_names == ("A_log",)
    assert other.weight.dtype == torch.bfloat16
    assert has_deltanet(SimpleNamespace(experimental_attention_variant="gated_delta_net"))
    assert not has_deltanet(SimpleNamespace(experimental_attention_variant="dsa"))
