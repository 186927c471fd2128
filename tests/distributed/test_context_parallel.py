"""Attention over sequences whose tokens several ranks share gives what one rank computes."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rl_backend.parallel.context import attend_over_ranks, gather_outputs, lay_out_tokens
from rl_backend.primitive.attention import Segments, packed_attention
from rl_backend.primitive.rope import Rotary, apply_rotary, rotary_cos_sin
from tests.support.rank_pool import RankPool

HEAD_DIM = 8
MICRO_BATCHES = ((17, 1, 64, 3), (2,), (150, 5, 5, 33))


class Case(NamedTuple):
    heads: int = 4
    kv_heads: int = 4
    window: int | None = None
    checkpointed: bool = False
    multiple: int = 1
    dtype: str = "float64"


CASES = {
    "as many heads of keys as of queries": Case(),
    "grouped queries": Case(heads=6, kv_heads=2),
    "one head of keys": Case(kv_heads=1),
    "a window": Case(kv_heads=2, window=20),
    "a window of one token": Case(window=1),
    "a window as long as a sequence": Case(window=150),
    "activation checkpointing": Case(kv_heads=2, checkpointed=True),
    "rows in fours": Case(kv_heads=2, multiple=4),
    "everything": Case(heads=6, kv_heads=2, window=20, checkpointed=True, multiple=4),
    "float32": Case(kv_heads=2, window=20, dtype="float32"),
    "bfloat16": Case(kv_heads=2, window=20, dtype="bfloat16"),
}
TOLERANCES = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 5e-2}


class Layer(nn.Module):
    """Attention with rotary embedding, added to its input."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.window, self.attend = case.window, packed_attention
        self.split = [case.heads, case.kv_heads, case.kv_heads]
        width = case.heads * HEAD_DIM
        self.qkv = nn.Linear(width, sum(self.split) * HEAD_DIM)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, segments: Segments) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (-1, HEAD_DIM)).split(self.split, dim=1)
        query, key = apply_rotary(query, cos, sin), apply_rotary(key, cos, sin)
        return x + self.out(self.attend(query, key, value, segments, self.window).flatten(1))


def attention_job(case: Case) -> list[Tensor]:
    """Outputs of every micro-batch, then gradients of their inputs and of two layers' parameters, over all ranks."""
    group = dist.group.WORLD if dist.is_initialized() else None
    cp_size, cp_rank = (1, 0) if group is None else (group.size(), group.rank())
    torch.manual_seed(0)
    dtype = getattr(torch, case.dtype)
    layers = nn.ModuleList(Layer(case) for _ in range(2)).to(dtype)
    outputs, inputs = [], []
    for layer in layers:
        if group is not None:
            layer.attend = partial(attend_over_ranks, group=group)
        if case.checkpointed:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    for seq_lens in MICRO_BATCHES:
        tokens = torch.randn(sum(seq_lens), case.heads * HEAD_DIM, dtype=dtype, requires_grad=True)
        mix = torch.randn(tokens.shape, dtype=dtype)
        layout = lay_out_tokens(seq_lens, cp_size=cp_size, cp_rank=cp_rank, multiple=case.multiple)
        hidden = layout.take(tokens, 0.0)
        cos, sin = rotary_cos_sin(layout.position_ids, Rotary(HEAD_DIM, 1e4), dtype)
        for layer in layers:
            hidden = layer(hidden, cos, sin, layout.segments)
        out = hidden[layout.places] if group is None else gather_outputs(hidden, layout, group)
        # Not linear, so that the gradient of a rank's tokens depends on those of the others.
        (out * mix).sum(-1).square().mean().backward()
        outputs.append(out.detach())
        inputs.append(tokens)
    gradients = [tensor.grad for tensor in (*inputs, *layers.parameters())]
    for gradient in gradients:
        if group is not None:
            dist.all_reduce(gradient)
    return [*outputs, *gradients]


@pytest.mark.shows(
    "parallel: attention over 2 and 4 context-parallel ranks equals one rank's, with windows and grouped queries"
)
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_context_parallel_ranks_give_the_outputs_and_gradients_of_one(ranks: RankPool, case: Case, world_size: int) -> None:
    expected = attention_job(case._replace(multiple=1))
    for found in ranks.run(attention_job, case, world_size=world_size):
        for mine, one_rank in zip(found, expected, strict=True):
            assert mine.dtype == one_rank.dtype and mine.shape == one_rank.shape
            assert (mine - one_rank).norm() <= TOLERANCES[case.dtype] * one_rank.norm()


def test_padding_on_one_rank_changes_nothing() -> None:
    alone, padded = (attention_job(Case(kv_heads=2, window=20, multiple=multiple)) for multiple in (1, 4))
    torch.testing.assert_close(padded, alone)
