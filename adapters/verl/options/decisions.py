"""Decisions on single fields: verl's, and Megatron's in verl's ``override_`` dictionaries.

Tests compare this table with ``docs/reference/verl_fields.md`` and with the classes of verl 0.9.1.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl_backend.contracts import ConfigError
from rl_backend.runtime.bridge.config import NEEDS_TRANSFORMER_ENGINE

ENGINE, OPTIMIZER, MODEL, CHECKPOINT = "McoreEngineConfig", "McoreOptimizerConfig", "HFModelConfig", "CheckpointConfig"
"""verl's configurations."""
OURS = "RLBackendEngineConfig"
LORA = f"{MODEL}.lora"
TRANSFORMER = f"{ENGINE}.override_transformer_config"
DDP = f"{ENGINE}.override_ddp_config"
ADAM = f"{OPTIMIZER}.override_optimizer_config"

FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
LAYOUT = "pipeline_model_parallel_layout"
STAGE_FIELDS = (FIRST, LAST, EMBEDDING, LOSS, LAYOUT)
"""Megatron's fields for uneven pipeline stages."""


@dataclass(frozen=True)
class Decision:
    """Attributes:
    accepts: the values that ask for nothing, verl's default the first of them.
    reason: why others are refused; None where a runtime may honour them.
    is_kernel: the value chooses among kernels of Megatron's with the same results.
    """

    accepts: tuple[Any, ...] = ()
    reason: str | None = None
    is_kernel: bool = False

    def takes(self, value: object) -> bool:
        return any(same(value, each) for each in self.accepts)


def _only(reason: str, *accepts: Any) -> Decision:
    return Decision(accepts, reason)


def _fields(names: str, decision: Decision) -> dict[str, Decision]:
    return dict.fromkeys(names.split(), decision)


_ONE_SIZE = "context-parallel groups have one size"
_IN_THE_BATCH = "routes travel in the batch, never through files (verl reads it nowhere)"
_EACH_EXPERT = "each expert has its own adapter, in every layout"
_FLOAT32 = ("masters, moments and gradients are float32", "fp32", "float32", "32")
_SHARDED = "the optimizer's state is always sharded"
_KERNEL = Decision(is_kernel=True)
_UNSET = Decision((0, None))

DECISIONS: Mapping[str, Mapping[str, Decision]] = {
    OURS: {"backend": _only("the runtimes of this package are native and bridge", "native", "bridge")},
    ENGINE: {
        "dtype": _only("both runtimes train in bfloat16 or float32", "bfloat16", "float32"),
        "dynamic_context_parallel": _only(_ONE_SIZE, False),
        "max_seqlen_per_dp_cp_rank": _only(_ONE_SIZE, None),
        "use_distributed_optimizer": _only(f"{_SHARDED} over data parallelism", True),
        "pad_to_length": _only("packed micro-batches keep their length", False),
        "dist_checkpointing_prefix": _only("first weights come from model.path, a Hugging Face directory", ""),
        "distrib_optim_fully_reshardable_mem_efficient": _only("checkpoints are written in one way only", False),
        "override_mcore_model_config": _only("config.json decides what the model is", {}),
        "use_mbridge": _only("weights are always read and exported with Hugging Face names", True),
    },
    f"{ENGINE}.router_replay": _fields("record_file replay_file", _only(_IN_THE_BATCH, None)),
    f"{ENGINE}.qat": {"enable": _only("training does not simulate quantization", False)},
    OPTIMIZER: {
        "optimizer": _only("the only optimizer is AdamW, which is Megatron's `adam`", "adam", "adamw", "AdamW"),
        "use_checkpoint_opt_param_scheduler": _only(
            "a checkpoint always restores the position in the schedule; its rates are always those of this run", False
        ),
        **_fields("main_grads_dtype exp_avg_dtype exp_avg_sq_dtype", _only(*_FLOAT32)),
    },
    MODEL: {
        "override_config": _only("config.json of path decides what the model is; write the change there", {}),
        "enable_activation_offload": _only("activations stay on the device", False),
        "fused_kernel_options": _only(
            "log-probabilities have one implementation, in PyTorch", {}, {"impl_backend": "torch"}
        ),
        "use_liger": _only("models are this package's own", False),
        "target_parameters": _only("adapters belong to linear layers; name those of experts in target_modules", None),
    },
    f"{MODEL}.tiled_mlp": {"enabled": _only("models are this package's own", False)},
    f"{MODEL}.mtp": _fields(
        "enable enable_train enable_rollout",
        _only("multi-token prediction is not trained; saved models keep its layers unchanged", False),
    ),
    LORA: {
        "dropout_position": _only("dropout is applied to an adapter's input", "pre"),
        "a2a_experimental": _only("adapters here need no communication of this kind", False),
        "normalize_moe_lora": _only("adapters of experts have the same rank as the others", False),
        **_fields("share_expert_adapters experts_shared_outer_loras", _only(_EACH_EXPERT, False)),
    },
    CHECKPOINT: {"mbridge_config": _only("belongs to the legacy package mbridge", {})},
    TRANSFORMER: {
        **dict.fromkeys(NEEDS_TRANSFORMER_ENGINE, _KERNEL),
        "attention_backend": Decision(("flash", "auto"), is_kernel=True),
        # The middle two lines are options of MindSpeed, or of models that neither runtime has.
        **_fields(
            """deallocate_pipeline_outputs tp_comm_overlap
            apply_dsa_kernel_fusion context_parallel_algo persist_layer_norm use_flash_attn use_fused_mhc use_fused_rmsnorm
            use_fused_swiglu use_naive_l2norm dsa_indexer_use_sparse_loss
            moe_token_dispatcher_type moe_enable_deepep moe_shared_expert_overlap""",
            _KERNEL,
        ),
        "sequence_parallel": _only("on exactly when tp > 1", True),
        "use_distributed_optimizer": _only(_SHARDED, True),
        "normalization": _only("config.json decides; every model of both runtimes has this one", "RMSNorm"),
        "swiglu": _only("config.json decides; every model of both runtimes has this one", True),
        "moe_router_enable_expert_bias": _only(
            "config.json decides; taken with moe_router_bias_update_rate=0, where the bias stays 0", False
        ),
        "moe_router_bias_update_rate": _only("the bias of a router never moves", 0, None),
        "dsa_indexer_loss_coeff": _only("the indexers of sparse attention are not trained through verl", 0, None),
        "attention_softmax_in_fp32": Decision((True,)),
        "fp32_residual_connection": Decision((False,)),
        "moe_router_dtype": Decision(("fp32", "float32", None)),
        **_fields("hidden_dropout attention_dropout", Decision((0.0,))),
        **_fields("moe_aux_loss_coeff moe_z_loss_coeff", _UNSET),
        # No value is unset: Megatron's default has an effect with moe_aux_loss_coeff.
        "moe_router_load_balancing_type": Decision(),
        **dict.fromkeys((FIRST, LAST, LAYOUT), Decision((None,))),
        **dict.fromkeys((EMBEDDING, LOSS), Decision((False,))),
    },
    DDP: {
        "grad_reduce_in_fp32": _only("gradients are summed in float32", True),
        "use_distributed_optimizer": _only(_SHARDED, True),
        **_fields("overlap_grad_reduce overlap_param_gather", Decision((False,))),
    },
    ADAM: {
        "overlap_cpu_optimizer_d2h_h2d": _KERNEL,
        "use_precision_aware_optimizer": _only("in float32, as here, its results are those of the usual one", True, False),
        **_fields("main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype", _only(*_FLOAT32, "torch.float32")),
    },
}
"""Configuration or dictionary -> its fields. A field that is not here goes somewhere, or means nothing here."""


def require_supported(where: str, config: Any) -> None:
    """Checks the fields of one of verl's configurations, or of a dictionary in one; those that it lacks are unset.

    Raises:
        ConfigError: all values that are refused.
    """
    given = config if isinstance(config, Mapping) else vars(config)
    ConfigError.refuse_all(
        (f"{where}.{name}", value, f"{decision.reason}; leave it at {decision.accepts[0]!r}")
        for name, decision in DECISIONS[where].items()
        if (value := given.get(name, decision.accepts[0])) not in decision.accepts
    )


def same(value: object, other: object) -> bool:
    """Whether two values of a field are one: 0 is 0.0, but neither False nor None."""
    if isinstance(value, bool) or isinstance(other, bool) or value is None or other is None:
        return value is other
    return value == other
