"""Megatron's own layers in place of Transformer Engine's: their norms, attention of latents, stacks with gated DeltaNet."""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch.nn.functional as F
from megatron.bridge.models.conversion.param_mapping import AutoMapping
from megatron.bridge.models.minimax_m2.minimax_m2_bridge import _FullDimQKNormMapping
from megatron.bridge.models.minimax_m2.minimax_m2_provider import (
    FullDimKNorm,
    FullDimQNorm,
    _FullDimRMSNorm,
    minimax_m2_layer_spec,
)
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_linear_attention_pattern,
    get_transformer_block_with_experimental_attention_variant_spec,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_decoder_layer_specs
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn

from rl_backend.contracts import UnsupportedError
from rl_backend.runtime.bridge.config import NEEDS_TRANSFORMER_ENGINE
from rl_backend.runtime.bridge.megatron.deltanet import has_deltanet

LOCAL_LAYERS: Mapping[str, Any] = {
    **{name: False for name in NEEDS_TRANSFORMER_ENGINE if name != "attention_backend"},
    "cross_entropy_loss_fusion": False,
    "persist_layer_norm": False,
    "fp8": None,
    "fp4": None,
    "tp_comm_overlap": False,
    "cuda_graph_impl": "none",
}
"""What Megatron's own layers do without: kernels of Transformer Engine, Apex or CUDA."""

# Of the norms of latents, in DeepSeek's code, in transformers and in the native runtime, whatever rms_norm_eps says.
LATENT_EPS = 1e-6


class SequenceParallelRMSNorm(nn.RMSNorm):
    """RMSNorm for Megatron's local layers: Megatron's own wrapper of ``torch.nn.RMSNorm`` refuses sequence parallelism."""

    # Each tensor-parallel rank normalises its part of the tokens or heads; the mark makes Megatron sum the gradient over the
    # ranks.

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        vars(self.weight)["sequence_parallel"] = config.sequence_parallel


class LatentNorm(SequenceParallelRMSNorm):
    """Of the latents of queries, and of keys and values."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__(config, hidden_size, LATENT_EPS)


class RMSNormFromOne(SequenceParallelRMSNorm):
    """The same with a weight stored as its difference from 1, which Megatron's wrapper refuses too; float32 inside."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), list(self.normalized_shape), 1.0 + self.weight.float(), self.eps).to(x.dtype)


class CopyingRowParallelLinear(RowParallelLinear):
    """Its output is a tensor of its own, and a bias of experts is not summed over the tensor-parallel ranks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        bias: Any = self.bias
        if self.is_expert and bias is not None:
            # With etp=1, the only size that Megatron has biases of experts for, tensor-parallel ranks are data parallel to
            # experts, or have other experts: Megatron would count gradients twice or mix them.
            bias.sequence_parallel = False

    def forward(self, input_: Tensor) -> Any:
        output, bias = super().forward(input_)
        # Megatron adds the bias of an expert in place, to the result of a function that needs it in the backward pass.
        return output.clone(), bias


class LatentCoreAttention(nn.Module):
    """Causal attention whose keys and values have different sizes, which Megatron's own ``DotProductAttention`` refuses."""

    # Sequences are padded on the right: the causal mask is the only one that real tokens need.

    def __init__(self, config: Any, layer_number: int, *, softmax_scale: float, **_: object) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> Tensor:
        """From (tokens, rows, heads, features) to (tokens, rows, heads * features of a value)."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.softmax_scale)
        return out.permute(2, 0, 1, 3).flatten(2)


def use_local_layers(provider: Any, default: Callable[..., Any]) -> None:
    """Sets the layers of a model provider, whose usual ones ``default`` makes; raises :class:`UnsupportedError` for all that
    needs Transformer Engine.
    """
    with_deltanet = has_deltanet(provider)
    of_all_heads = provider.transformer_layer_spec is minimax_m2_layer_spec
    needs_engine = {
        f"the special layers with which Megatron-Bridge builds {type(provider).__name__}": not of_all_heads
        and not _is_usual(provider.transformer_layer_spec, default, with_deltanet=with_deltanet),
        f"normalization {provider.normalization!r}": provider.normalization != "RMSNorm",
        "norms stored as differences from 1 (layernorm_zero_centered_gamma) in a model without gated DeltaNet": (
            provider.layernorm_zero_centered_gamma and not with_deltanet
        ),
        "latent attention without compressed queries (q_lora_rank=None)": (
            provider.multi_latent_attention and provider.q_lora_rank is None
        ),
    }
    if found := [what for what, needed in needs_engine.items() if needed]:
        raise UnsupportedError(
            f"only Transformer Engine (CUDA and the package transformer-engine) has {', '.join(found)}; the native runtime "
            "may serve the model"
        )
    norm = RMSNormFromOne if provider.layernorm_zero_centered_gamma else SequenceParallelRMSNorm
    replaced: dict[Any, Any] = {WrappedTorchNorm: norm}
    if provider.multi_latent_attention:
        replaced[DotProductAttention] = LatentCoreAttention
    if provider.add_bias_linear and provider.num_moe_experts is not None:
        # Megatron-Bridge knows by its name how a module is split over ranks.
        AutoMapping.register_module_type(CopyingRowParallelLinear.__name__, "row")
        replaced[RowParallelLinear] = CopyingRowParallelLinear

    norms: dict[str, Any] = {"q_layernorm": of_queries, "k_layernorm": of_keys} if of_all_heads else {}
    if provider.multi_latent_attention:
        norms = {"q_layernorm": LatentNorm, "kv_layernorm": LatentNorm}

    def layer_spec(config: Any, vp_stage: int | None = None) -> Any:
        if with_deltanet:
            spec = _block_with_deltanet(config, vp_stage)
        else:
            spec = get_gpt_decoder_block_spec(
                config, use_transformer_engine=False, normalization=config.normalization, vp_stage=vp_stage
            )
        for layer in spec.layer_specs if norms else ():
            attention = layer.submodules.self_attention
            attention.submodules = dataclasses.replace(attention.submodules, **norms)
        return _replace(spec, replaced)

    provider.transformer_layer_spec = layer_spec


def _is_usual(layer_spec: Any, default: Callable[..., Any], *, with_deltanet: bool) -> bool:
    """Whether Megatron-Bridge builds a model of layers that Megatron has without Transformer Engine too."""
    if with_deltanet:
        return layer_spec is get_transformer_block_with_experimental_attention_variant_spec
    of_blocks = isinstance(layer_spec, partial) and layer_spec.func is get_gpt_decoder_block_spec
    return of_blocks or layer_spec is default


def _block_with_deltanet(config: Any, vp_stage: int | None) -> TransformerBlockSubmodules:
    # One stage's layers of attention and of gated DeltaNet, which Megatron stacks with Transformer Engine's layers only.
    attention = copy.copy(config)
    attention.experimental_attention_variant = None
    layers = get_gpt_decoder_layer_specs(attention, use_transformer_engine=False, normalization=config.normalization)
    # The norm at the output is an ordinary one: Hugging Face stores its weight as it is.
    deltanet = ModuleSpec(
        module=GatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(
            in_proj=ColumnParallelLinear, out_norm=SequenceParallelRMSNorm, out_proj=RowParallelLinear
        ),
    )
    for number, is_linear in enumerate(get_linear_attention_pattern(config)):
        if is_linear:
            submodules = dataclasses.replace(layers[number].submodules, self_attention=deltanet)
            layers[number] = dataclasses.replace(layers[number], submodules=submodules)
    layout = config.pipeline_model_parallel_layout
    if layout is not None:
        numbers = layout.get_layer_id_list(layer_type=LayerType.decoder, vp_stage=vp_stage)
    else:
        first = get_transformer_layer_offset(config, vp_stage=vp_stage)
        numbers = range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))
    return TransformerBlockSubmodules(layer_specs=[layers[number] for number in numbers], layer_norm=WrappedTorchNorm)


def _replace(spec: Any, replaced: Mapping[Any, Any]) -> Any:
    if isinstance(spec, type):
        return replaced.get(spec, spec)
    if isinstance(spec, list):
        return [_replace(each, replaced) for each in spec]
    if isinstance(spec, partial):
        keywords = {name: _replace(value, replaced) for name, value in spec.keywords.items()}
        return partial(spec.func, *(_replace(each, replaced) for each in spec.args), **keywords)
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        values = {each.name: getattr(spec, each.name) for each in dataclasses.fields(spec)}
        return dataclasses.replace(spec, **{name: _replace(value, replaced) for name, value in values.items()})
    return spec


class NormOfAllHeads(_FullDimRMSNorm):
    """MiniMax-M2's norm over the heads of all tensor-parallel ranks: Megatron-Bridge's, with whole gradients."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Marked as a part, without which the global gradient norm would have that of the first rank alone.
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(L, B, heads here, features)."""
        wide = x.flatten(2).float()
        squares = wide.square().sum(-1, keepdim=True)
        group = self._tp_group_getter()
        if group is not None and group.size() > 1:
            # Backward, gradients of all ranks are summed: the squares of a rank's heads are in the outputs of all.
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
