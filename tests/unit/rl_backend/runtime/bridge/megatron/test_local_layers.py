"""What Megatron lacks where Transformer Engine is missing, for which the runtime has layers and stacks of its own."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from rl_backend.runtime.bridge.megatron.local_layers import RMSNormFromOne, _replace

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
