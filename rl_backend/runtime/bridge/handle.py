"""Models of the bridge runtime."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from rl_backend.contracts import RoutedLayers
from rl_backend.contracts.operations import Part
from rl_backend.runtime.bridge.batch import OutputProcessor
from rl_backend.runtime.bridge.conversion import WeightConverter
from rl_backend.runtime.bridge.groups import BridgeGroups
from rl_backend.runtime.bridge.optimizer import BridgeOptimizer
from rl_backend.runtime.bridge.optimizer_state import part_tensors
from rl_backend.runtime.bridge.routes import ModelRouters
from rl_backend.runtime.bridge_config import BridgeConfig
from rl_backend.runtime.handle import GuardedHandle
from rl_backend.runtime.offload import Offload


@dataclass(eq=False, kw_only=True)
class BridgeHandle(GuardedHandle[BridgeOptimizer]):
    """One model of a :class:`~rl_backend.runtime.bridge.BridgeRuntime`.

    Attributes:
        groups: device and process groups.
        bridge: Megatron-Bridge's ``AutoBridge`` of the directory.
        model_bridge: its part for this model family: the conversion of weights.
        provider: what the model was built from; Megatron's ``TransformerConfig`` of it.
        chunks: this rank's model chunks, one per virtual stage; in Megatron's DDP when trained.
        processor: what the last stage computes from hidden states.
        packs_sequences: attention takes packed sequences; otherwise micro-batches are padded.
        routers: of this rank's layers with experts; None for a model without.
        converter: its parameters as Hugging Face tensors.
        has_gradients: a backward pass has run since the last ``zero_grad``.
    """

    groups: BridgeGroups
    bridge: Any
    model_bridge: Any
    provider: Any
    chunks: Sequence[MegatronModule]
    processor: OutputProcessor
    packs_sequences: bool
    routers: ModelRouters | None
    converter: WeightConverter
    has_gradients: bool = False

    @property
    def options(self) -> BridgeConfig:
        return self.config.options(BridgeConfig)

    @property
    def routed_layers(self) -> RoutedLayers | None:
        """Its layers with experts; None for a model without."""
        return None if self.routers is None else self.routers.layers

    @property
    def models(self) -> list[nn.Module]:
        """This rank's ``GPTModel`` chunks without their wrappers."""
        models: list[nn.Module] = unwrap_model(list(self.chunks))
        return models

    def part_tensors(self) -> Mapping[Part, Sequence[Tensor]]:
        return part_tensors(self.chunks, None if self.optimizer is None else self.optimizer.megatron)

    def roots(self) -> Iterable[nn.Module]:
        return self.chunks

    def release(self) -> None:
        for model in self.models:
            for module in model.modules():
                # It keeps tensors of the last pass, whose graph leads back to the model where Python cannot see the cycle.
                if hasattr(module, "token_dispatcher"):
                    vars(module.token_dispatcher).clear()
        self.owner = None
        self.optimizer = None
        self.chunks = ()
        self.provider = self.bridge = self.model_bridge = None
        self.converter.release()
        self.offload = Offload(self.name, self.groups.device)
