"""The mixer of gated DeltaNet against its formulas, token by token, in shapes that no released model has."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_backend.contracts import ConfigError
from rl_backend.model.blocks import Mixer
from rl_backend.model.mixers.deltanet import DeltaNetSpec
from rl_backend.primitive.attention import Segments
from rl_backend.primitive.norm import NormSpec

HIDDEN, EPS = 10, 1e-6
LENGTHS = (1, 63, 64, 65, 2, 129, 1)
SPECS = {
    "one head": DeltaNetSpec(num_key_heads=1, num_value_heads=1, key_dim=4, value_dim=4),
    "five values of one key": DeltaNetSpec(num_key_heads=1, num_value_heads=5, key_dim=3, value_dim=7, conv_width=2),
    "three heads": DeltaNetSpec(num_key_heads=3, num_value_heads=3, key_dim=5, value_dim=2, by_key_head=True),
    "no convolution": DeltaNetSpec(num_key_heads=3, num_value_heads=9, key_dim=4, value_dim=6, conv_width=1),
    "keys of one feature": DeltaNetSpec(
        num_key_heads=5, num_value_heads=10, key_dim=1, value_dim=3, conv_width=3, by_key_head=True
    ),
    "a convolution over a chunk": DeltaNetSpec(num_key_heads=2, num_value_heads=2, key_dim=4, value_dim=1, conv_width=70),
}


def whole_projections(mixer: Mixer, spec: DeltaNetSpec) -> list[Tensor]:
    """Of queries, keys, values, gates, write strengths and decays, each of all heads."""
    weights = dict(mixer.named_parameters())
    group = spec.num_value_heads // spec.num_key_heads
    if not spec.by_key_head:
        parts = [*weights["in_proj_qkv.weight"].split(spec.features)]
        return parts + [weights[f"in_proj_{name}.weight"] for name in "zba"]
    sizes = (spec.key_dim, spec.key_dim, group * spec.value_dim, group * spec.value_dim)
    parts = [*weights["in_proj_qkvz.weight"].unflatten(0, (spec.num_key_heads, -1)).split(sizes, dim=1)]
    parts += weights["in_proj_ba.weight"].unflatten(0, (spec.num_key_heads, -1)).split(group, dim=1)
    return [part.flatten(0, 1) for part in parts]


def token_by_token(mixer: Mixer, spec: DeltaNetSpec, x: Tensor) -> Tensor:
    """(T, HIDDEN) of one sequence."""
    weights = dict(mixer.named_parameters())
    *of_convolution, gate, write, rate = (x @ weight.t() for weight in whole_projections(mixer, spec))
    mixed = F.pad(torch.cat(of_convolution, dim=1).t(), (spec.conv_width - 1, 0))[None]
    mixed = F.silu(F.conv1d(mixed, weights["conv1d.weight"], groups=mixed.shape[1]))[0].t()
    query, key, value = mixed.split(spec.features, dim=1)
    query, key = (part.unflatten(1, (-1, spec.key_dim)) for part in (query, key))
    query, key = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (query, key))
    group = spec.num_value_heads // spec.num_key_heads
    query, key = (part.repeat_interleave(group, dim=1) for part in (query, key))
    value, gate = (part.unflatten(1, (-1, spec.value_dim)) for part in (value, gate))
    kept = (-weights["decay.A_log"].exp() * F.softplus(rate + weights["dt_bias"])).exp()
    state = x.new_zeros(spec.num_value_heads, spec.key_dim, spec.value_dim)
    outputs = []
    for q, k, v, decay, beta in zip(query, key, value, kept, write.sigmoid(), strict=True):
        state = decay[:, None, None] * state
        seen = (k[:, :, None] * state).sum(1)
        state = state + k[:, :, None] * (beta[:, None] * (v - seen))[:, None]
        outputs.append((q[:, :, None] * state).sum(1) / spec.key_dim**0.5)
    output = torch.stack(outputs)
    normed = output * (output.square().mean(-1, keepdim=True) + EPS).rsqrt() * weights["norm.weight"]
    return (normed * F.silu(gate)).flatten(1) @ weights["out_proj.weight"].t()


@pytest.mark.shows("model: gated DeltaNet with odd heads and any convolution equals its formulas to 1e-10, gradients too")
@pytest.mark.parametrize("name", SPECS)
def test_outputs_and_gradients_are_those_of_the_formulas(name: str) -> None:
    spec = SPECS[name]
    mixer = spec.build(HIDDEN, NormSpec(EPS, from_one=True)).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in mixer.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    x, mix = torch.randn(2, sum(LENGTHS), HIDDEN, dtype=torch.float64, generator=generator)
    leaves = [x.requires_grad_(), *mixer.parameters()]
    cumulative = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    found = mixer(x, None, Segments.of_sequences(cumulative, LENGTHS))
    expected = torch.cat([token_by_token(mixer, spec, sequence) for sequence in x.split(LENGTHS)])
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)
    for mine, exact in zip(*(torch.autograd.grad((out * mix).sum(), leaves) for out in (found, expected)), strict=True):
        assert float((mine - exact).norm()) <= 1e-10 * float(exact.norm())


def test_key_heads_that_do_not_divide_value_heads_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_value_heads=4: is no multiple of num_key_heads=3"):
        DeltaNetSpec(num_key_heads=3, num_value_heads=4, key_dim=4, value_dim=4)
