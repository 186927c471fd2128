"""Building a model for one rank: Megatron-Bridge's provider, its chunks with their weights, optimizer and adapters."""

from collections.abc import Sequence
from typing import Any

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.utils import unwrap_model
from torch import nn

from rl_backend.checkpoint.hf_reader import HFReader, read_hf_config
from rl_backend.checkpoint.kept_weights import find_kept
from rl_backend.contracts import (
    Head,
    RuntimeConfig,
    UnsupportedError,
    text_config,
)
from rl_backend.model import model_kept_prefixes
from rl_backend.runtime.bridge.config import BridgeConfig
from rl_backend.runtime.bridge.engine.handle import BridgeHandle
from rl_backend.runtime.bridge.megatron.all_heads import NormOfAllHeads
from rl_backend.runtime.bridge.megatron.deltanet import has_deltanet, keep_decay_in_float32
from rl_backend.runtime.bridge.megatron.groups import BridgeGroups
from rl_backend.runtime.bridge.model.adapters import attach_adapters
from rl_backend.runtime.bridge.model.conversion import WeightConverter
from rl_backend.runtime.bridge.model.loading import load_model, open_bridge
from rl_backend.runtime.bridge.model.output_heads import OutputProcessor
from rl_backend.runtime.bridge.model.provider import make_provider, override, packs_sequences, uses_transformer_engine
from rl_backend.runtime.bridge.model.text_models import set_mappings
from rl_backend.runtime.bridge.passes.balance import ExpertBalance
from rl_backend.runtime.bridge.passes.routes import connect_routers
from rl_backend.runtime.bridge.state.optimizer import BridgeOptimizer

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
    """Builds the model of ``config.hf_path``. A collective: Megatron spreads weights from one rank of each group.

    Args:
        adaptable: LoRA tenants may be made of it. Its layers are Megatron's own on every device: those of Transformer Engine
            compute the norm before a projection together with it, which leaves adapters without their input.
    """
    options = config.options(BridgeConfig)
    hf_config = read_hf_config(config.hf_path)
    bridge = open_bridge(config.hf_path)
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
        kept = model_kept_prefixes(hf_config)
        load_model(chunks, pretrained, model_bridge, groups, hf_path=config.hf_path, head=head, kept=kept)
        if forward_only:
            for chunk in chunks:
                chunk.requires_grad_(False)
        return chunks

    chunks = provider.provide_distributed_model(
        ddp_config=ddp_config,
        wrap_with_ddp=not forward_only,
        use_cpu_initialization=groups.device.type == "cpu",
        init_model_with_meta_device=False,
        pre_wrap_hook=load,
        pg_collection=groups.pg,
    )
    for chunk in chunks:
        # Megatron computes activations again in training alone, and tenants train through the chunks of a frozen model.
        chunk.train(adaptable or not forward_only)
    optimizer = None
    models = unwrap_model(list(chunks))
    rate = options.expert_bias_rate
    if not forward_only:
        balance = ExpertBalance(models, rate, groups) if rate else None
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
        max_length=text_config(hf_config).get("max_position_embeddings"),
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
    for chunk in chunks:
        assert isinstance(chunk, DistributedDataParallel), "trained chunks are wrapped"
