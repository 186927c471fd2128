"""Models of the bridge runtime."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from rl_backend.checkpoint.hf_reader import HFReader, read_hf_config
from rl_backend.checkpoint.kept_weights import find_kept
from rl_backend.contracts import (
    AdamParams,
    BatchError,
    Head,
    RoutedLayers,
    RuntimeConfig,
    StepResult,
    TensorInfo,
    UnsupportedError,
)
from rl_backend.contracts.atoms import Part
from rl_backend.model import model_kept_prefixes, model_positions
from rl_backend.runtime.balance import PassLoads
from rl_backend.runtime.bridge.config import BridgeConfig
from rl_backend.runtime.bridge.engine.optimizer import BridgeOptimizer, mark_sinks
from rl_backend.runtime.bridge.megatron.deltanet import has_deltanet, keep_decay_in_float32
from rl_backend.runtime.bridge.megatron.groups import BridgeGroups
from rl_backend.runtime.bridge.megatron.local_layers import NormOfAllHeads
from rl_backend.runtime.bridge.model.adapters import ChunkAdapters, attach_adapters
from rl_backend.runtime.bridge.model.conversion import WeightConverter
from rl_backend.runtime.bridge.model.loading import load_model, open_bridge, set_mappings
from rl_backend.runtime.bridge.model.output_heads import OutputProcessor
from rl_backend.runtime.bridge.model.provider import (
    build_chunks,
    make_provider,
    override,
    packs_sequences,
    uses_transformer_engine,
)
from rl_backend.runtime.bridge.passes.gradients import drop_reductions, gather_again, overlaps_gathers, wait_for_gathers
from rl_backend.runtime.bridge.passes.routers import (
    ModelRouters,
    connect_routers,
    expert_balance,
    require_routing_by_scores,
)
from rl_backend.runtime.handle import GuardedHandle
from rl_backend.runtime.interface import RouterReplay


@dataclass(eq=False, kw_only=True)
class BridgeHandle(GuardedHandle[BridgeOptimizer]):
    """One model of the bridge runtime.

    Attributes:
        provider: what the model was built from; Megatron's ``TransformerConfig`` of it.
        chunks: this rank's model chunks, one per virtual stage; in Megatron's DDP when trained.
        packs_sequences: attention takes packed sequences; without it micro-batches are padded.
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
        return None if self.routers is None else self.routers.layers

    @property
    def models(self) -> list[nn.Module]:
        """This rank's chunks without their wrappers."""
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
        # With overlap_param_gather Megatron leaves it to the next forward pass to gather what the optimizer wrote.
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


_DDP_SETTINGS = {
    "use_distributed_optimizer": True,
    "grad_reduce_in_fp32": True,
    "overlap_grad_reduce": False,
    "overlap_param_gather": False,
    "check_for_nan_in_grad": False,
}


def build_handle(
    config: RuntimeConfig,
    groups: BridgeGroups,
    *,
    forward_only: bool,
    adaptable: bool,
    name: str,
    head: Head,
) -> BridgeHandle:
    """Builds the model of ``config.hf_path``. A collective: Megatron spreads weights from one rank of each group."""
    options = config.options(BridgeConfig)
    hf_config = read_hf_config(config.hf_path)
    bridge = open_bridge(config.hf_path)
    # Transformer Engine's layers compute the norm before a projection together with it, which leaves adapters without input.
    transformer_engine = uses_transformer_engine(groups.device) and not adaptable
    provider = make_provider(bridge, config, groups, head, transformer_engine=transformer_engine)
    if has_deltanet(provider) and adaptable:
        raise UnsupportedError(
            f"{config.hf_path} has layers of gated DeltaNet, beside whose fused projections the bridge runtime has no "
            "adapters; train LoRA tenants of it with backend='native'",
            layers="gated_delta_net",
        )
    ddp_config = override(
        "BridgeConfig.override_ddp_config", DistributedDataParallelConfig, options.override_ddp_config, _DDP_SETTINGS
    )
    pretrained, model_bridge = bridge.hf_pretrained, bridge._model_bridge
    # It draws a bar for every load and export.
    model_bridge._with_progress_tracking = lambda tasks, *_, **__: iter(tasks)

    set_mappings(model_bridge, hf_config["model_type"], local_layers=not transformer_engine)

    def load(chunks: list[nn.Module]) -> list[nn.Module]:
        keep_decay_in_float32(chunks)
        mark_sinks(chunks)
        kept = model_kept_prefixes(hf_config)
        load_model(chunks, pretrained, model_bridge, groups, hf_path=config.hf_path, head=head, kept=kept)
        if forward_only:
            for chunk in chunks:
                chunk.requires_grad_(False)
        return chunks

    chunks = build_chunks(provider, ddp_config, groups, trained=not forward_only, prepare=load)
    for chunk in chunks:
        # Megatron computes activations again in training alone, and tenants train through the chunks of a frozen model.
        chunk.train(adaptable or not forward_only)
    optimizer = None
    models = unwrap_model(list(chunks))
    rate = options.expert_bias_rate
    if not forward_only:
        # After the weights, of which it makes its masters.
        balance = expert_balance(models, rate, groups) if rate else None
        optimizer = BridgeOptimizer(options, chunks, groups, vocab_size=provider.vocab_size, balance=balance)
        _connect(provider, chunks, ddp_config)
    # Megatron's interleaved schedule takes micro-batches in groups.
    interleaved = groups.parallel.vpp > 1
    multiple = (provider.microbatch_group_size_per_vp_stage or groups.parallel.pp) if interleaved else 1
    converter = WeightConverter(models, pretrained, model_bridge, groups.pg, head, config.hf_path)
    adapters, offered = attach_adapters(models, converter.conversions, provider, groups, rate) if adaptable else ([], None)
    return BridgeHandle(
        name=name,
        forward_only=forward_only,
        head=head,
        micro_batch_multiple=multiple,
        config=config,
        groups=groups,
        provider=provider,
        hf_config=hf_config,
        kept=find_kept(HFReader(config.hf_path), model_kept_prefixes(hf_config), converter.names),
        chunks=chunks,
        processor=OutputProcessor(groups, provider.vocab_size, options.log_prob_chunk_tokens),
        vocab_size=provider.vocab_size,
        max_length=model_positions(hf_config),
        packs_sequences=packs_sequences(options, transformer_engine=transformer_engine),
        optimizer=optimizer,
        routers=connect_routers(models, provider, groups),
        converter=converter,
        adapters=adapters,
        adaptable=offered,
    )


def _connect(provider: Any, chunks: Sequence[Any], ddp_config: Any) -> None:
    """What the pipeline schedules call, as Megatron's own training loop sets it."""
    provider.finalize_model_grads_func = finalize_model_grads
    if any(isinstance(module, NormOfAllHeads) for chunk in chunks for module in chunk.modules()):
        # finalize_model_grads takes norms of queries for the same on all ranks, and would add up those of other heads.
        provider.qk_layernorm = False
    if ddp_config.overlap_grad_reduce:
        functions = [chunk.no_sync for chunk in chunks]
        provider.no_sync_func = functions if len(functions) > 1 else functions[0]
    if ddp_config.overlap_param_gather and ddp_config.align_param_gather:
        gather = [chunk.start_param_sync for chunk in chunks]
        provider.param_sync_func = gather if len(gather) > 1 else gather[0]
