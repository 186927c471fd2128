"""Gated DeltaNet over sequences whose tokens, or heads, several ranks share gives what one rank computes."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from rl_backend.contracts import ParallelConfig
from rl_backend.model.blocks import Mixer
from rl_backend.model.mixers.deltanet import DeltaNetSpec
from rl_backend.parallel.collectives import all_gather
from rl_backend.parallel.context import gather_outputs, lay_out_tokens
from rl_backend.parallel.groups import ParallelGroups, close_groups, open_groups
from rl_backend.primitive.norm import NormSpec
from tests.support.rank_pool import RankPool

HIDDEN = 12
MICRO_BATCHES = ((17, 1, 300, 3), (2,), (150, 5, 5, 129), (1, 255, 257))
"""Sequences shorter than there are ranks, and around a chunk of the recurrence on each."""


class Case(NamedTuple):
    cp: int = 1
    tp: int = 1
    by_key_head: bool = False
    conv_width: int = 4
    checkpointed: bool = False
    heads: tuple[int, int] = (4, 8)


CASES = (
    Case(cp=2),
    Case(cp=2, by_key_head=True, checkpointed=True),
    Case(tp=2),
    Case(tp=2, by_key_head=True),
    Case(cp=4, conv_width=6),
    Case(cp=2, tp=2),
    Case(tp=4),
    Case(tp=4, by_key_head=True, conv_width=2),
    Case(tp=3, heads=(3, 9)),
    Case(cp=3, heads=(1, 5), conv_width=1),
    Case(cp=4, heads=(3, 3), conv_width=2, by_key_head=True),
)


def mixer_of(case: Case) -> Mixer:
    """Random, float64, the same on every rank."""
    key_heads, heads = case.heads
    spec = DeltaNetSpec(
        num_key_heads=key_heads,
        num_value_heads=heads,
        key_dim=4,
        value_dim=6,
        conv_width=case.conv_width,
        by_key_head=case.by_key_head,
    )
    mixer = spec.build(HIDDEN, NormSpec(1e-6, from_one=True)).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in mixer.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    return mixer


def split_over(mixer: Mixer, groups: ParallelGroups) -> None:
    """Cuts it, and gives every rank its part of what it had."""
    whole = {name: parameter.detach().clone() for name, parameter in mixer.named_parameters()}
    mixer.split(groups)
    for name, parameter in mixer.named_parameters():
        if isinstance(parameter, DTensor):
            (placement,) = parameter.placements
            value = whole[name]
            if isinstance(placement, Shard):
                value = value.chunk(groups.tp_group.size(), dim=placement.dim)[groups.tp_group.rank()]
            with torch.no_grad():
                parameter.to_local().copy_(value)


def deltanet_job(case: Case) -> list[Tensor]:
    """Outputs of every micro-batch, then gradients of their inputs and of the parameters, over all ranks."""
    torch.manual_seed(0)
    mixer, groups = mixer_of(case), None
    if dist.is_initialized():
        groups = open_groups(ParallelConfig(cp=case.cp, tp=case.tp), torch.device("cpu"))
        split_over(mixer, groups)
    cp, tp = (groups.cp_group, groups.tp_group) if groups is not None else (None, None)
    outputs, inputs = [], []
    for seq_lens in MICRO_BATCHES:
        tokens = torch.randn(sum(seq_lens), HIDDEN, dtype=torch.float64, requires_grad=True)
        mix = torch.randn(tokens.shape, dtype=torch.float64)
        cp_rank = 0 if cp is None else cp.rank()
        layout = lay_out_tokens(seq_lens, cp_size=case.cp if cp else 1, cp_rank=cp_rank, multiple=case.tp)
        hidden = layout.take(tokens, 0.0)
        if tp is not None and tp.size() > 1:
            hidden = hidden.chunk(tp.size())[tp.rank()]
        arguments = (hidden, None, layout.segments)
        out = checkpoint(mixer, *arguments, use_reentrant=False) if case.checkpointed else mixer(*arguments)
        if tp is not None and tp.size() > 1:
            out = all_gather(out, tp, sum_gradients=False)
        out = out[layout.places] if cp is None or cp.size() == 1 else gather_outputs(out, layout, cp)
        # Not linear, so that the gradient of a rank's tokens depends on those of the others.
        (out * mix).sum(-1).square().mean().backward()
        outputs.append(out.detach())
        inputs.append(tokens)
    gradients = []
    for tensor in (*inputs, *mixer.parameters()):
        assert tensor.grad is not None
        gradient = tensor.grad.full_tensor() if isinstance(tensor.grad, DTensor) else tensor.grad
        # Over ranks that share tokens; of inputs over those that share rows too.
        for group in (cp, None if isinstance(tensor, nn.Parameter) else tp):
            if group is not None and group.size() > 1:
                gradient = gradient.clone()
                dist.all_reduce(gradient, group=group)
        gradients.append(gradient.detach())
    if groups is not None:
        close_groups(groups)
    return [*outputs, *gradients]


@pytest.mark.shows("parallel: gated DeltaNet over context- and tensor-parallel ranks equals one rank's to 1e-12 in float64")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_give_the_outputs_and_gradients_of_one(ranks: RankPool, case: Case) -> None:
    expected = deltanet_job(case)
    for found in ranks.run(deltanet_job, case, world_size=case.cp * case.tp):
        for mine, one_rank in zip(found, expected, strict=True):
            assert mine.shape == one_rank.shape
            assert float((mine - one_rank).norm()) <= 1e-12 * float(one_rank.norm())
