"""Decisions on Megatron's own fields in verl's three ``override_`` dictionaries, as in ``docs/reference/verl_fields.md``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from adapters.verl.pipeline_stages import STAGE_FIELDS, STAGE_SWITCHES
from rl_backend.runtime.bridge.config import NEEDS_TRANSFORMER_ENGINE


@dataclass(frozen=True)
class MegatronField:
    """What becomes of one field.

    Attributes:
        native: with ``backend=native``.
        bridge: with ``backend=bridge``.
        chooses_kernel: the value chooses among kernels of Megatron's with the same results: ``native`` takes any.
        at_rest: values that ask for nothing in either runtime.
        only: no other values are taken.
    """

    native: str
    bridge: str
    chooses_kernel: bool = False
    at_rest: tuple[object, ...] = ()
    only: bool = False


def same(value: object, other: object) -> bool:
    """Whether two values of a field are one: 0 is 0.0, but neither False nor None."""
    if isinstance(value, bool) or isinstance(other, bool) or value is None or other is None:
        return value is other
    return value == other


_PASSED_ON = "`BridgeConfig.override_transformer_config`"
_OTHER_KERNELS = "no meaning: of MindSpeed, or of models that neither runtime has"
_ALL_TO_ALL = MegatronField(
    "no meaning: how tokens travel between Megatron's experts", "refused, except for all-to-all", chooses_kernel=True
)


def _kernel(bridge: str) -> MegatronField:
    return MegatronField("no meaning: chooses a kernel of Megatron's for the same results", bridge, chooses_kernel=True)


def _decided_by(what: str) -> MegatronField:
    text = f"accepted if it equals {what}; any other value is refused"
    return MegatronField(text, text)


def _only(text: str, *values: object) -> MegatronField:
    return MegatronField(text, text, at_rest=values, only=True)


_DROPOUT = MegatronField("only 0.0: models have no dropout", _PASSED_ON, at_rest=(0.0,))
_COUNTED = "`NativeConfig.pipeline_layers`, counted as Megatron counts"

TRANSFORMER: Mapping[str, MegatronField] = {
    **{
        name: _kernel(f"{_PASSED_ON}; refused where Transformer Engine cannot be used")
        for name in NEEDS_TRANSFORMER_ENGINE
        if name != "attention_backend"
    },
    **dict.fromkeys(("deallocate_pipeline_outputs", "tp_comm_overlap"), _kernel(_PASSED_ON)),
    "attention_backend": MegatronField(
        "no meaning: chooses a kernel of Megatron's for the same results",
        f"`flash`, verl's default, and `auto` leave the choice to Megatron; others: {_PASSED_ON}; refused where Transformer "
        "Engine cannot be used",
        chooses_kernel=True,
        at_rest=("flash", "auto"),
    ),
    **dict.fromkeys(
        (
            "apply_dsa_kernel_fusion",
            "context_parallel_algo",
            "persist_layer_norm",
            "use_flash_attn",
            "use_fused_mhc",
            "use_fused_rmsnorm",
            "use_fused_swiglu",
            "use_naive_l2norm",
        ),
        MegatronField(_OTHER_KERNELS, _OTHER_KERNELS, chooses_kernel=True),
    ),
    "moe_token_dispatcher_type": _ALL_TO_ALL,
    "moe_enable_deepep": _ALL_TO_ALL,
    "moe_shared_expert_overlap": _ALL_TO_ALL,
    "tensor_model_parallel_size": _decided_by("the engine's tensor_model_parallel_size"),
    "pipeline_model_parallel_size": _decided_by("the engine's pipeline_model_parallel_size"),
    "virtual_pipeline_model_parallel_size": _decided_by("the engine's virtual_pipeline_model_parallel_size"),
    "context_parallel_size": _decided_by("the engine's context_parallel_size"),
    "expert_model_parallel_size": _decided_by("the engine's expert_model_parallel_size"),
    "expert_tensor_parallel_size": _decided_by("the engine's expert_tensor_parallel_size"),
    "sequence_parallel": _only("on exactly when tp > 1", True),
    "use_distributed_optimizer": _only("the optimizer's state is always sharded", True),
    "normalization": _only("models that both runtimes have are of this kind; config.json decides", "RMSNorm"),
    "swiglu": _only("models that both runtimes have are of this kind; config.json decides", True),
    "attention_softmax_in_fp32": MegatronField("always on", _PASSED_ON, at_rest=(True,)),
    "fp32_residual_connection": MegatronField("always off", _PASSED_ON, at_rest=(False,)),
    "moe_router_dtype": MegatronField(
        "routers compute in float32; of `gpt_oss`, `qwen3_5_moe` and `qwen3_next` the logits are in the dtype of the "
        "parameters, as in vLLM, whatever is given here",
        f"routers compute in float32; other values: {_PASSED_ON}",
        at_rest=("fp32", "float32", None),
    ),
    "hidden_dropout": _DROPOUT,
    "attention_dropout": _DROPOUT,
    "moe_aux_loss_coeff": MegatronField("`DecoderOptions.router_aux_loss_coef`", _PASSED_ON, at_rest=(0, None)),
    "moe_z_loss_coeff": MegatronField("`DecoderOptions.router_z_loss_coef`", _PASSED_ON, at_rest=(0, None)),
    "moe_router_load_balancing_type": MegatronField(
        "`aux_loss`, Megatron's default, or `none` without moe_aux_loss_coeff; others are refused",
        f"{_PASSED_ON}; `aux_loss` where moe_aux_loss_coeff is set without it",
    ),
    "moe_router_enable_expert_bias": _only(
        "with moe_router_bias_update_rate=0 only: a bias that is 0 and stays so; config.json decides on others", False
    ),
    "moe_router_bias_update_rate": _only("the bias of a router never moves", 0, None),
    "dsa_indexer_loss_coeff": _only("the indexers of sparse attention are not trained through verl", 0, None),
    "dsa_indexer_use_sparse_loss": MegatronField(
        "no meaning: read with dsa_indexer_loss_coeff only", "no meaning: read with dsa_indexer_loss_coeff only", True
    ),
    **{
        name: MegatronField(_COUNTED, _PASSED_ON, at_rest=(False if name in STAGE_SWITCHES else None,))
        for name in STAGE_FIELDS
    },
}
"""Of ``override_transformer_config``, without the fields of recomputation."""

DDP: Mapping[str, MegatronField] = {
    "grad_reduce_in_fp32": _only("gradients are summed in float32", True),
    "use_distributed_optimizer": _only("the optimizer's state is always sharded", True),
    **dict.fromkeys(
        ("overlap_grad_reduce", "overlap_param_gather"),
        MegatronField("only False", "`BridgeConfig.override_ddp_config`", at_rest=(False,)),
    ),
}
"""Of ``override_ddp_config``."""

_FLOAT32 = _only("masters, moments and gradients are float32", "fp32", "float32", "32", "torch.float32")
_HOST = (
    "with optimizer_offload_fraction=1 as `optimizer_offload`: the state is on the host but while it trains; refused "
    "without a fraction, where Megatron offloads nothing"
)
OPTIMIZER: Mapping[str, MegatronField] = {
    "optimizer_cpu_offload": MegatronField(_HOST, _HOST, at_rest=(False,)),
    "optimizer_offload_fraction": _only("1 with optimizer_cpu_offload only; a part of the state is refused", 0, None),
    "overlap_cpu_optimizer_d2h_h2d": MegatronField(
        "no meaning: when Megatron copies; results are the same", "no meaning: when Megatron copies", chooses_kernel=True
    ),
    "use_precision_aware_optimizer": _only("in float32, as here, its results are those of the usual one", True, False),
    **dict.fromkeys(("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"), _FLOAT32),
}
"""Of ``override_optimizer_config``, without Adam's betas and epsilon."""
