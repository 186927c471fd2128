"""Models of the bridge runtime."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from rl_backend.contracts import (
    AdamParams,
    BatchError,
    RoutedLayers,
    StepResult,
    TensorInfo,
)
from rl_backend.contracts.atoms import Part
from rl_backend.runtime.bridge.config import BridgeConfig
from rl_backend.runtime.bridge.megatron.groups import BridgeGroups
from rl_backend.runtime.bridge.model.adapters import ChunkAdapters
from rl_backend.runtime.bridge.model.conversion import WeightConverter
from rl_backend.runtime.bridge.model.output_heads import OutputProcessor
from rl_backend.runtime.bridge.passes.balance import PassLoads
from rl_backend.runtime.bridge.passes.gradients import drop_reductions, gather_again, overlaps_gathers, wait_for_gathers
from rl_backend.runtime.bridge.passes.routes import ModelRouters, require_routing_by_scores
from rl_backend.runtime.bridge.state.optimizer import BridgeOptimizer
from rl_backend.runtime.handle import GuardedHandle
from rl_backend.runtime.interface import RouterReplay


@dataclass(eq=False, kw_only=True)
class BridgeHandle(GuardedHandle[BridgeOptimizer]):
    """One model of a :class:`~rl_backend.runtime.bridge.BridgeRuntime`.

    Attributes:
        provider: what the model was built from; Megatron's ``TransformerConfig`` of it.
        chunks: this rank's model chunks, one per virtual stage; in Megatron's DDP when trained.
        processor: what the last stage computes from hidden states.
        packs_sequences: attention takes packed sequences; without it micro-batches are padded.
        routers: of this rank's layers with experts; None for a model without.
        converter: its parameters as Hugging Face tensors.
        adapters: of each chunk; empty for a model without tenants.
        has_gradients: a backward pass has run since the last ``zero_grad``.
    """

    groups: BridgeGroups
    provider: Any
    chunks: Sequence[Any]
    processor: OutputProcessor
    packs_sequences: bool
    routers: ModelRouters | None
    converter: WeightConverter
    adapters: Sequence[ChunkAdapters] = ()
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

    @property
    def in_float32(self) -> frozenset[str]:
        return frozenset(name for each in self.converter.conversions if each.in_float32 for name in each.shapes)

    @property
    def weights(self) -> tuple[TensorInfo, ...]:
        return tuple(
            TensorInfo.of(name, shape, conversion.dtype)
            for conversion in self.converter.conversions
            for name, shape in conversion.shapes.items()
        )

    def require_schedulable(self, num_micro_batches: int, *, forward_only: bool) -> None:
        multiple, pp, vpp = self.micro_batch_multiple, self.groups.parallel.pp, self.groups.parallel.vpp
        if 0 < num_micro_batches % multiple < pp:
            raise BatchError(
                f"{num_micro_batches} micro-batches with pp={pp} and vpp={vpp}: Megatron's interleaved schedule takes "
                f"groups of {multiple}, and the last must have at least pp={pp}; use a multiple of {multiple}",
                micro_batches=num_micro_batches,
            )

    def require_replayable(self, router_replay: RouterReplay) -> None:
        super().require_replayable(router_replay)
        require_routing_by_scores(self.provider, router_replay)

    def drop_gradients(self) -> None:
        self.offload.clear("grad")
        drop_reductions(self.chunks)
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        # Of the masters; those of the model are in the buffers.
        optimizer = self.trainer
        optimizer.megatron.zero_grad()
        if optimizer.balance is not None:
            optimizer.balance.drop()
        self.has_gradients = False

    def pass_loads(self, *, forward_only: bool) -> PassLoads:
        """What a pass that begins adds to the counts by which biases of routers move."""
        return PassLoads(None if forward_only or self.optimizer is None else self.optimizer.balance)

    def step(self, adam: AdamParams | None = None) -> StepResult:
        optimizer = self.trainer
        wait_for_gathers(self.chunks)
        result = optimizer.step(self.name, adam)
        if result.ok:
            gather_again(self.chunks)
        return result

    def finish_parameter_gathers(self) -> None:
        """With ``overlap_param_gather`` Megatron leaves it to the next forward pass to gather what the optimizer wrote."""
        for chunk in self.chunks:
            if self.optimizer is not None and overlaps_gathers(chunk):
                chunk.start_param_sync(force_sync=True)

    def part_tensors(self) -> Mapping[Part, Sequence[Tensor]]:
        parts: dict[Part, list[Tensor]] = {"model": [each.detach() for chunk in self.chunks for each in chunk.parameters()]}
        if self.optimizer is not None:
            # Gradients of one dtype share a buffer.
            buffers = [buffer for chunk in self.chunks for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]]
            parts["grad"] = [buffer.grad_data for buffer in buffers]
            # In float32 the optimizer's masters are views of the parameters, and go with the model.
            models = {tensor.untyped_storage()._cdata for tensor in parts["model"]}
            held = self.optimizer.held_tensors()
            parts["optimizer"] = [each.detach() for each in held if each.untyped_storage()._cdata not in models]
        return parts

    def roots(self) -> Iterable[nn.Module]:
        return self.chunks

    def release(self) -> None:
        for model in self.models:
            for module in model.modules():
                # It keeps tensors of the last pass, whose graph leads back to the model where Python cannot see the cycle.
                if hasattr(module, "token_dispatcher"):
                    vars(module.token_dispatcher).clear()
        super().release()
        self.chunks = ()
        self.provider = None
        self.converter.release()
