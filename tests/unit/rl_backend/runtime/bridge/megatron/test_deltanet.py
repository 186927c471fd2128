"""The torch stand-ins for the kernels of flash-linear-attention compute what Megatron's own torch form does, packed too."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rl_backend.runtime.bridge.megatron import deltanet

LENGTHS = (5, 1, 70, 64)
HEADS, KEY, VALUE = 2, 16, 24


def inputs(tokens: int) -> dict[str, Tensor]:
    """Of the rule, float64, in one row; the decay is strong in places."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(1, tokens, HEADS, *shape, generator=generator, dtype=torch.float64)

    return {
        "query": F.normalize(random(KEY), dim=-1),
        "key": F.normalize(random(KEY), dim=-1),
        "value": random(VALUE),
        "g": -3.0 * random().exp(),
        "beta": random().sigmoid(),
    }


def rule(tensors: dict[str, Tensor], cu_seqlens: Tensor | None = None) -> Tensor:
    outputs, state = deltanet.chunk_gated_delta_rule(
        tensors["query"],
        tensors["key"],
        tensors["value"],
        g=tensors["g"],
        beta=tensors["beta"],
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=False,
        cu_seqlens=cu_seqlens,
    )
    assert state is None
    return outputs


def convolution(x: Tensor, weight: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    return deltanet.causal_conv1d(
        x=x,
        weight=weight,
        bias=None,
        activation="silu",
        initial_state=None,
        output_final_state=False,
        cu_seqlens=cu_seqlens,
    )[0]


def test_the_rule_is_megatrons() -> None:
    from megatron.core.ssm.gated_delta_net.common import torch_chunk_gated_delta_rule

    tensors = {name: tensor.float() for name, tensor in inputs(130).items()}
    expected, _ = torch_chunk_gated_delta_rule(*tensors.values())
    torch.testing.assert_close(rule(tensors), expected, atol=2e-6, rtol=0)


@pytest.mark.shows("bridge: on a CPU DeltaNet's state and convolution begin anew with each sequence, forward and backward")
def test_packed_sequences_do_not_see_each_other() -> None:
    tensors = {name: tensor.requires_grad_() for name, tensor in inputs(sum(LENGTHS)).items()}
    boundaries = torch.tensor((0, *LENGTHS)).cumsum(0)
    weight = torch.randn(HEADS * VALUE, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def run(parts: dict[str, Tensor], cu_seqlens: Tensor | None) -> Tensor:
        convolved = convolution(parts["value"].flatten(2), weight, cu_seqlens).unflatten(2, (HEADS, VALUE))
        return rule({**parts, "value": convolved}, cu_seqlens)

    together = run(tensors, boundaries)
    splits = {name: tensor.split(LENGTHS, dim=1) for name, tensor in tensors.items()}
    alone = torch.cat([run({name: parts[index] for name, parts in splits.items()}, None) for index in range(4)], dim=1)
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=0)
    # A loss on one sequence reaches no other.
    (gradient,) = torch.autograd.grad(together[:, :5].sum(), tensors["value"])
    assert gradient[:, :5].abs().min() > 0
    assert not gradient[:, 5:].any()


def test_rows_of_a_padded_batch_are_sequences() -> None:
    tensors = inputs(60)
    rows = {name: torch.cat((tensor, tensor.flip(1))) for name, tensor in tensors.items()}
    torch.testing.assert_close(rule(rows)[:1], rule(tensors), atol=1e-6, rtol=0)


def test_vectors_are_normalised_as_the_kernel_does_it() -> None:
    x = 1e-3 * torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))
    expected = x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(deltanet.l2norm(x), expected)
    assert deltanet.l2norm(x.bfloat16()).dtype == torch.bfloat16
