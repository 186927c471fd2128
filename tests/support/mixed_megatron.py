"""Qwen3-MoE with dense layers in Megatron: families that Megatron-Bridge knows as such need Transformer Engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch


@contextmanager
def dense_layers(sparse: Sequence[bool]) -> Iterator[None]:
    """Models that are built in the context have experts in the layers that ``sparse`` says, all where it is empty."""
    if not sparse:
        yield
        return
    # The runtime makes Megatron-Bridge importable without Transformer Engine.
    import rl_backend.runtime.bridge.model.provider  # noqa: F401

    from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry  # isort: skip
    from megatron.bridge.models.conversion.param_mapping import AutoMapping, GatedMLPMapping  # isort: skip
    from megatron.bridge.models.qwen.qwen3_moe_bridge import Qwen3MoEBridge  # isort: skip

    known_names, known_provider = Qwen3MoEBridge.mapping_registry, Qwen3MoEBridge.provider_bridge

    def names(bridge: Qwen3MoEBridge) -> MegatronMappingRegistry:
        block, stored = "decoder.layers.*.mlp", "model.layers.*.mlp"
        return MegatronMappingRegistry(
            *known_names(bridge).get_all_mappings(),
            AutoMapping(f"{block}.linear_fc2.weight", f"{stored}.down_proj.weight"),
            GatedMLPMapping(f"{block}.linear_fc1.weight", f"{stored}.gate_proj.weight", f"{stored}.up_proj.weight"),
        )

    def provider(bridge: Qwen3MoEBridge, pretrained: Any) -> Any:
        made = known_provider(bridge, pretrained)
        made.moe_layer_freq = [int(has_experts) for has_experts in sparse]
        return made

    with patch.object(Qwen3MoEBridge, "mapping_registry", names), patch.object(Qwen3MoEBridge, "provider_bridge", provider):
        yield
