"""What Megatron lacks where Transformer Engine is missing, for which the runtime has layers and stacks of its own."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_decoder_layer_specs
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from rl_backend.contracts import UnsupportedError
from rl_backend.runtime.bridge.megatron import local_layers
from rl_backend.runtime.bridge.megatron.local_layers import LatentCoreAttention, RMSNormFromOne, _replace, use_local_layers

NORM = {
    "layernorm_zero_centered_gamma": False,
    "persist_layer_norm": False,
    "sequence_parallel": False,
    "memory_efficient_layer_norm": False,
    "normalization": "RMSNorm",
    "params_dtype": torch.float32,
}


@pytest.mark.parametrize("refused", ["layernorm_zero_centered_gamma", "sequence_parallel"])
def test_megatrons_own_norm_still_refuses(refused: str) -> None:
    WrappedTorchNorm(SimpleNamespace(**NORM), 8)
    with pytest.raises(AssertionError):
        WrappedTorchNorm(SimpleNamespace(**NORM | {refused: True}), 8)


def test_megatron_still_stacks_deltanet_with_transformer_engine_alone() -> None:
    config = SimpleNamespace(experimental_attention_variant="gated_delta_net", transformer_impl="local")
    with pytest.raises(AssertionError, match="not supported"):
        get_gpt_decoder_layer_specs(config, use_transformer_engine=False)
    with pytest.raises(AssertionError, match="only supports transformer engine"):
        variants.get_transformer_block_with_experimental_attention_variant_spec(config)


def test_a_norm_from_one_is_a_norm_whose_weight_is_one_more() -> None:
    norm = RMSNormFromOne(SimpleNamespace(**NORM | {"sequence_parallel": True}), 8, eps=1e-6)
    x = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(-0.5, 0.5, 8))
    expected = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * torch.linspace(0.5, 1.5, 8)
    torch.testing.assert_close(norm(x), expected)
    assert norm(x.bfloat16()).dtype == torch.bfloat16
    assert vars(norm.weight)["sequence_parallel"] is True


def test_a_layer_is_replaced_wherever_its_specification_names_it() -> None:
    def build(*args: object, **keywords: object) -> None: ...

    def spec(layer: type) -> ModuleSpec:
        return ModuleSpec(
            module=layer,
            params={"width": 3},
            submodules=[
                layer,
                ModuleSpec(module=str, submodules=partial(build, layer, 4, inner=ModuleSpec(module=layer), kept="name")),
            ],
        )

    def described(value: object) -> object:
        """What can be compared of a specification: partials compare by identity."""
        if isinstance(value, partial):
            return (
                value.func,
                [described(each) for each in value.args],
                {key: described(each) for key, each in value.keywords.items()},
            )
        if isinstance(value, list):
            return [described(each) for each in value]
        return (value.module, value.params, described(value.submodules)) if isinstance(value, ModuleSpec) else value

    assert described(_replace(spec(int), {int: float})) == described(spec(float))
    assert described(_replace(spec(int), {bytes: float})) == described(spec(int))


def usual(config: Any) -> None:
    """What Megatron-Bridge builds layers by where a model needs nothing else."""


def special(config: Any) -> None: ...


DELTANET = {
    "experimental_attention_variant": "gated_delta_net",
    "transformer_layer_spec": variants.get_transformer_block_with_experimental_attention_variant_spec,
}
LATENTS = {"multi_latent_attention": True, "q_lora_rank": 4}
IMPORTED: Any = local_layers


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({}, ()),
        ({"transformer_layer_spec": partial(get_gpt_decoder_block_spec, use_transformer_engine=True)}, ()),
        ({"transformer_layer_spec": partial(special, use_transformer_engine=True)}, ("special layers",)),
        ({"transformer_layer_spec": special}, ("special layers",)),
        ({"transformer_layer_spec": IMPORTED.minimax_m2_layer_spec}, ()),
        (DELTANET, ()),
        ({**DELTANET, "layernorm_zero_centered_gamma": True}, ()),
        ({**DELTANET, "transformer_layer_spec": usual}, ("special layers",)),
        ({"layernorm_zero_centered_gamma": True}, ("layernorm_zero_centered_gamma",)),
        ({"normalization": "LayerNorm"}, ("normalization 'LayerNorm'",)),
        (LATENTS, ()),
        ({"multi_latent_attention": True}, ("q_lora_rank=None",)),
        (
            {"multi_latent_attention": True, "normalization": "LayerNorm", "transformer_layer_spec": special},
            ("special layers", "normalization 'LayerNorm'", "q_lora_rank=None"),
        ),
    ],
    ids=str,
)
def test_all_that_only_transformer_engine_has_is_named(changes: dict[str, Any], refused: tuple[str, ...]) -> None:
    settings: dict[str, Any] = {
        "transformer_layer_spec": usual,
        "normalization": "RMSNorm",
        "layernorm_zero_centered_gamma": False,
        "multi_latent_attention": False,
        "q_lora_rank": None,
        "add_bias_linear": False,
        "num_moe_experts": None,
        "experimental_attention_variant": None,
    }
    provider = SimpleNamespace(**{**settings, **changes})
    before = provider.transformer_layer_spec
    if not refused:
        use_local_layers(provider, usual)
        assert provider.transformer_layer_spec not in (before, usual)
        return
    with pytest.raises(UnsupportedError, match=r"^only Transformer Engine .* has ") as failure:
        use_local_layers(provider, usual)
    words = ("special layers", "normalization 'LayerNorm'", "layernorm_zero_centered_gamma", "q_lora_rank=None")
    assert tuple(word for word in words if word in str(failure.value)) == refused
    assert provider.transformer_layer_spec is before


def test_attention_of_latents_is_causal_with_the_scale_that_it_is_given() -> None:
    attention = LatentCoreAttention(None, 3, softmax_scale=0.3, attention_type="self")
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(5, 2, 3, size, generator=generator) for size in (6, 6, 4))
    found = attention(query, key, value, None, attn_mask_type="causal")
    scores = torch.einsum("qbhd,kbhd->bhqk", query, key) * 0.3
    scores = scores.masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -torch.inf)
    expected = torch.einsum("bhqk,kbhd->qbhd", scores.softmax(-1), value).flatten(2)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
