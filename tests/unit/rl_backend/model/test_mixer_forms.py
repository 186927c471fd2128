"""Attention of each kind against its formula: rotated parts, norms, gates, biases, latents, and what is told of layouts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rl_backend.contracts import ConfigError, ModelOptions, NativeConfig
from rl_backend.model.feedforward.dense import SwiGLUSpec
from rl_backend.model.feedforward.moe import MoE, MoESpec
from rl_backend.model.mixers import deltanet
from rl_backend.model.mixers.deltanet import DeltaNetSpec, GatedDeltaNet
from rl_backend.model.mixers.gqa import GQASpec
from rl_backend.model.mixers.mla import MLASpec
from rl_backend.model.options import DecoderOptions
from rl_backend.primitive.activation import ACTIVATIONS, Activation
from rl_backend.primitive.attention import Segments
from rl_backend.primitive.experts import LIMIT, ClampedExperts
from rl_backend.primitive.norm import NormSpec
from rl_backend.primitive.rope import Rotary, rotary_cos_sin
from rl_backend.primitive.router import RouterLossCoefficients, RouterSettings, Routing

HIDDEN, LENGTHS = 10, (4, 1, 6)
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])


def filled[M: nn.Module](module: M) -> M:
    generator = torch.Generator().manual_seed(0)
    module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.6 * torch.randn(parameter.shape, generator=generator))
    return module


def segments() -> Segments:
    return Segments.of_sequences(torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32), LENGTHS)


def tokens() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(sum(LENGTHS), HIDDEN, generator=generator, dtype=torch.float64).requires_grad_()


def turned(x: Tensor, theta: float, *, neighbours: bool = False) -> Tensor:
    """(T, heads, dim) as complex numbers times their angles; in which order the results lie makes no difference to products
    of queries and keys.
    """
    half = x.shape[-1] // 2
    real, imaginary = (x[..., 0::2], x[..., 1::2]) if neighbours else (x[..., :half], x[..., half:])
    frequencies = 1.0 / theta ** (torch.arange(0, x.shape[-1], 2) / x.shape[-1])
    angles = (POSITIONS[:, None] * frequencies).double()[:, None]
    whole = torch.complex(real, imaginary) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((whole.real, whole.imag), -1)


def attended(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int = 99, sinks: Tensor | None = None) -> Tensor:
    k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
    outputs, first = [], 0
    for length in LENGTHS:
        for row in range(first, first + length):
            seen = slice(max(first, row - window + 1), row + 1)
            scores = scale * torch.einsum("hd,khd->hk", q[row], k[seen])
            both = scores if sinks is None else torch.cat((scores, sinks[:, None]), 1)
            outputs.append(torch.einsum("hk,khd->hd", both.softmax(-1)[:, : scores.shape[1]], v[seen]))
        first += length
    return torch.stack(outputs)


def rms(x: Tensor, norm: nn.Module | None, eps: float, *, from_one: bool = False) -> Tensor:
    assert norm is not None
    weight: Any = norm.weight
    normed: Tensor = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (weight + from_one)
    return normed


GQA: dict[str, dict[str, Any]] = {
    "plain": {},
    "part of a head, biases": {"rotary": Rotary(4, 7.0), "qkv_bias": True, "output_bias": True},
    "norms of heads": {"qk_norm": True, "scale": 0.9},
    "norms over heads, window": {"qk_norm": True, "joint_qk_norm": True, "window": 2},
    "gates": {"output_gate": True, "qk_norm": True, "rotary": Rotary(2, 7.0), "qkv_bias": True},
    "sinks, window": {"sinks": True, "window": 3, "scale": 0.2},
    "gates and sinks": {"sinks": True, "output_gate": True, "num_kv_heads": 4},
}


@pytest.mark.parametrize("case", GQA)
@pytest.mark.parametrize("from_one", [False, True])
def test_grouped_query_attention_is_its_formula(case: str, from_one: bool) -> None:
    eps = 0.05
    fields = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "rotary": Rotary(6, 7.0), **GQA[case]}
    spec = GQASpec(**fields)
    mixer: Any = filled(spec.build(HIDDEN, NormSpec(eps, from_one=from_one)))
    x = tokens()
    found = mixer(x, rotary_cos_sin(POSITIONS, spec.rotary, torch.float64), segments())
    q, k, v = (
        x @ each.weight.t() + (each.bias if spec.qkv_bias else 0.0) for each in (mixer.q_proj, mixer.k_proj, mixer.v_proj)
    )
    gate: Any = 1.0
    if spec.output_gate:
        both = q.view(len(x), spec.num_heads, 2, 6)
        q, gate = both[:, :, 0].flatten(1), both[:, :, 1].sigmoid()
    if spec.joint_qk_norm:
        q, k = rms(q, mixer.q_norm, eps, from_one=from_one), rms(k, mixer.k_norm, eps, from_one=from_one)
    q, k, v = (each.view(len(x), -1, 6) for each in (q, k, v))
    if spec.qk_norm and not spec.joint_qk_norm:
        q, k = rms(q, mixer.q_norm, eps, from_one=from_one), rms(k, mixer.k_norm, eps, from_one=from_one)
    first = spec.rotary.head_dim
    q, k = (torch.cat((turned(each[..., :first], 7.0), each[..., first:]), -1) for each in (q, k))
    out = attended(q, k, v, spec.scale or 6**-0.5, spec.window or 99, mixer.sinks) * gate
    expected = out.flatten(1) @ mixer.o_proj.weight.t() + (mixer.o_proj.bias if spec.output_bias else 0.0)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    leaves = (x, *mixer.parameters())
    gradients = [torch.autograd.grad(each.square().sum(), leaves, retain_graph=True) for each in (found, expected)]
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("query_rank", "bias"), [(7, False), (7, True), (None, False), (None, True)])
def test_latent_attention_is_its_formula(interleaved: bool, query_rank: int | None, bias: bool) -> None:
    spec = MLASpec(
        num_heads=3,
        query_rank=query_rank,
        kv_rank=5,
        plain_dim=6,
        value_dim=8,
        rotary=Rotary(4, 7.0),
        interleaved=interleaved,
        scale=0.45,
        latent_eps=0.05,
        bias=bias,
    )
    mixer: Any = filled(spec.build(HIDDEN, NormSpec(9.0)))
    x = tokens()
    found = mixer(x, rotary_cos_sin(POSITIONS, spec.rotary, torch.float64), segments())

    def linear(module: nn.Linear, inputs: Tensor) -> Tensor:
        return inputs @ module.weight.t() + (0.0 if module.bias is None else module.bias)

    if query_rank is None:
        q = linear(mixer.q_proj, x)
    else:
        q = linear(mixer.q_b_proj, rms(linear(mixer.q_a_proj, x), mixer.q_a_layernorm, 0.05))
    q = q.view(len(x), 3, 10)
    latent = linear(mixer.kv_a_proj_with_mqa, x)
    kv = linear(mixer.kv_b_proj, rms(latent[:, :5], mixer.kv_a_layernorm, 0.05)).view(len(x), 3, 14)
    shared = turned(latent[:, None, 5:], 7.0, neighbours=interleaved).expand(-1, 3, -1)
    key = torch.cat((kv[..., :6], shared), -1)
    query = torch.cat((q[..., :6], turned(q[..., 6:], 7.0, neighbours=interleaved)), -1)
    expected = linear(mixer.o_proj, attended(query, key, kv[..., 6:], 0.45).flatten(1))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    leaves = (x, *mixer.parameters())
    gradients = [torch.autograd.grad(each.square().sum(), leaves, retain_graph=True) for each in (found, expected)]
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)
    assert (mixer.q_proj.bias is None) if query_rank is None else (mixer.q_a_proj.bias is not None) is bias
    assert (mixer.o_proj.bias is not None) is (mixer.kv_a_proj_with_mqa.bias is not None) is bias


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu", "relu2"])
def test_the_gate_alone_is_activated(activation: Activation) -> None:
    block: Any = filled(SwiGLUSpec(7, True, activation).build(HIDDEN, ModelOptions()))
    x = tokens()
    gate, up = (x @ each.weight.t() + each.bias for each in (block.gate_proj, block.up_proj))
    expected = (ACTIVATIONS[activation](gate) * up) @ block.down_proj.weight.t() + block.down_proj.bias
    torch.testing.assert_close(block(x), expected)


def test_options_of_a_mixture_are_told_to_its_router() -> None:
    spec = MoESpec(RouterSettings(3, 2, bias=True), 4, shared_intermediate_size=5, shared_gate=True)
    options = DecoderOptions(
        router_aux_loss_coef=0.1, router_z_loss_coef=0.2, router_sequence_loss_coef=0.3, freeze_router=True
    )
    for each, coefficients, frozen in (
        (options, RouterLossCoefficients(0.1, 0.2, 0.3), True),
        (DecoderOptions(expert_bias_rate=0.5), RouterLossCoefficients(), False),
        (ModelOptions(), RouterLossCoefficients(), False),
    ):
        moe = spec.build(HIDDEN, each)
        assert isinstance(moe, MoE) and moe.coefficients == coefficients
        trained = {name for name, parameter in moe.named_parameters() if parameter.requires_grad}
        every = {name for name, _ in moe.named_parameters()}
        assert every - trained == ({"gate.weight", "gate.bias"} if frozen else set())
        assert moe.shared_expert is not None and moe.shared_expert.gate_proj.weight.shape == (5, HIDDEN)
        assert moe.experts.get_parameter("down_proj").shape == (3, HIDDEN, 4)


def test_numbers_at_a_limit_have_gradients_and_those_beyond_have_none() -> None:
    experts = ClampedExperts(1, 2, 1).double()
    with torch.no_grad():
        experts.gate_up_proj.copy_(torch.eye(2)[None])
        experts.down_proj.fill_(1.0)
    for gate, up in ((LIMIT, LIMIT), (LIMIT, -LIMIT), (LIMIT + 1, 1.0), (-LIMIT - 1, LIMIT + 1), (1.0, -LIMIT - 1)):
        x = torch.tensor([[gate, up]], dtype=torch.float64, requires_grad=True)
        routes = Routing(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1, dtype=torch.float64), torch.empty(0))
        (found,) = torch.autograd.grad(experts(x, routes).sum(), x)
        clamped_gate, clamped_up = x[:, 0].clamp(max=LIMIT), x[:, 1].clamp(-LIMIT, LIMIT)
        expected = (clamped_up + 1.0) * clamped_gate * torch.sigmoid(1.702 * clamped_gate)
        torch.testing.assert_close(found, 2 * torch.autograd.grad(expected.sum(), x)[0])


@pytest.mark.parametrize(
    ("installed", "device", "dtype", "cp", "message"),
    [
        (True, "cuda", "bfloat16", 1, None),
        (False, "cuda", "bfloat16", 1, "flash-linear-attention is not installed .*; or use 'torch'"),
        (True, "cpu", "bfloat16", 1, "its kernels run on CUDA, not on cpu; or use 'torch'"),
        (True, "cuda", "float32", 1, "its kernels have no param_dtype='float32'; set 'bfloat16'"),
        (True, "cuda", "bfloat16", 2, r"it does not say what ParallelConfig.cp=2 ranks tell each other"),
    ],
)
def test_a_kernel_is_taken_where_it_can_run(
    monkeypatch: pytest.MonkeyPatch, installed: bool, device: str, dtype: Any, cp: int, message: str | None
) -> None:
    monkeypatch.setattr(deltanet, "has_fla", lambda: installed)
    mixer = DeltaNetSpec(num_key_heads=1, num_value_heads=1, key_dim=2, value_dim=2).build(4, NormSpec(1e-6))
    assert isinstance(mixer, GatedDeltaNet) and not mixer.takes_fla
    groups: Any = SimpleNamespace(device=torch.device(device), parallel=SimpleNamespace(cp=cp))
    config = NativeConfig(device="cpu", param_dtype=dtype, model="qwen3_5", model_cfg=DecoderOptions(delta_kernel="fla"))
    if message is None:
        mixer.choose_kernels(groups, config)
        assert mixer.takes_fla
    else:
        with pytest.raises(ConfigError, match=rf"NativeConfig\.model_cfg\.delta_kernel='fla': {message}"):
            mixer.choose_kernels(groups, config)
    plain = NativeConfig(device="cpu", param_dtype=dtype, model="qwen3_5", model_cfg=DecoderOptions())
    mixer.choose_kernels(groups, plain)
    assert not mixer.takes_fla
