"""Options of the bridge runtime: Megatron-Core through Megatron-Bridge. Megatron is not imported."""

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from rl_backend.contracts.base_config import MAY_CHANGE, HasEffect
from rl_backend.contracts.errors import ConfigError
from rl_backend.contracts.runtime_config import BackendConfig, ParallelConfig

_PARALLEL = "BridgeConfig.parallel"
_OPTIMIZER = "BridgeConfig.optimizer"
_PRECISION = dict.fromkeys(("params_dtype", "bf16", "fp16"), "BridgeConfig.param_dtype")
_RUNTIME = "the runtime, which would be wrong with another value"

SIZES = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "virtual_pipeline_model_parallel_size": "vpp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
}
"""Megatron's names of the sizes in :class:`~rl_backend.contracts.ParallelConfig`."""


def megatron_sizes(parallel: ParallelConfig) -> dict[str, int | None]:
    """The layout in Megatron's names; without virtual stages their number is None."""
    sizes = {name: getattr(parallel, size) for name, size in SIZES.items()}
    return {**sizes, "virtual_pipeline_model_parallel_size": parallel.vpp if parallel.vpp > 1 else None}


class Overrides(NamedTuple):
    """What a user may set of a dataclass of Megatron's."""

    allowed: Collection[str]
    elsewhere: Mapping[str, str]  # field -> what decides it, for those that a user may look for here
    needs: Mapping[str, str]  # field -> the field without which Megatron ignores it


NEEDS_TRANSFORMER_ENGINE = (
    "apply_rope_fusion",
    "attention_backend",
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "gradient_accumulation_fusion",
    "masked_softmax_fusion",
    "moe_grouped_gemm",
    "moe_permute_fusion",
    "moe_router_fusion",
)
"""Fields of ``TRANSFORMER`` that choose a kernel which only layers of Transformer Engine have."""

TRANSFORMER = Overrides(
    allowed=(
        # pipeline stages
        "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage",
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
        "pipeline_model_parallel_layout",
        "microbatch_group_size_per_vp_stage",
        "deallocate_pipeline_outputs",
        # numerics
        "hidden_dropout",
        "attention_dropout",
        "attention_softmax_in_fp32",
        "fp32_residual_connection",
        "deterministic_mode",
        # kernels
        *NEEDS_TRANSFORMER_ENGINE,
        "tp_comm_overlap",
        # experts
        "moe_router_load_balancing_type",
        "moe_aux_loss_coeff",
        "moe_z_loss_coeff",
        "moe_router_dtype",
        "moe_input_jitter_eps",
        "moe_expert_capacity_factor",
        "moe_pad_expert_input_to_capacity",
        "moe_token_drop_policy",
    ),
    elsewhere={
        **{name: f"{_PARALLEL}.{size}" for name, size in SIZES.items()},
        "sequence_parallel": f"{_PARALLEL}.tp (on when tp > 1)",
        **_PRECISION,
        **{
            f"recompute_{name}": f"BridgeConfig.recompute_{name}"
            for name in ("granularity", "method", "num_layers", "modules")
        },
        "moe_token_dispatcher_type": "the runtime: all-to-all, which takes another number of tokens on every rank",
        "moe_router_bias_update_rate": "BridgeConfig.expert_bias_rate",
        "distribute_saved_activations": f"{_PARALLEL}.tp: with sequence parallelism each rank keeps its part of them",
        "persist_layer_norm": "the layers: these models have RMSNorm, whose kernels are chosen without it",
    },
    needs={
        "moe_pad_expert_input_to_capacity": "moe_expert_capacity_factor",
        "moe_token_drop_policy": "moe_expert_capacity_factor",
    },
)
"""Of Megatron-Bridge's model provider, which is a ``TransformerConfig``."""

DDP = Overrides(
    allowed=(
        "overlap_grad_reduce",
        "overlap_param_gather",
        "align_param_gather",
        "bucket_size",
        "average_in_collective",
        "pad_buckets_for_high_nccl_busbw",
    ),
    elsewhere={
        "use_distributed_optimizer": _RUNTIME,
        "use_megatron_fsdp": _RUNTIME,
        "grad_reduce_in_fp32": "the runtime: gradients are always summed in float32",
        "check_for_nan_in_grad": "optimizer_step, which skips the step on every rank",
    },
    needs={
        "overlap_param_gather": "overlap_grad_reduce",
        "align_param_gather": "overlap_param_gather",
        "bucket_size": "overlap_grad_reduce",
    },
)
"""Of ``DistributedDataParallelConfig``."""

SAME_IN_MEGATRON = ("optimizer", "lr", "min_lr", "weight_decay", "clip_grad", "log_num_zeros_in_grad")
"""Fields of ours that Megatron's ``OptimizerConfig`` has by the same name."""

OPTIMIZER = Overrides(
    allowed=("apply_wd_to_qk_layernorm",),
    elsewhere={
        **{name: f"{_OPTIMIZER}.{name}" for name in SAME_IN_MEGATRON},
        "adam_beta1": f"{_OPTIMIZER}.betas",
        "adam_beta2": f"{_OPTIMIZER}.betas",
        "adam_eps": f"{_OPTIMIZER}.eps",
        "grad_norm_skip_threshold": "optimizer_step, which skips only steps that are not finite",
        **_PRECISION,
        "use_distributed_optimizer": _RUNTIME,
        "use_precision_aware_optimizer": _RUNTIME,
        "optimizer_cpu_offload": "Runtime.to(handle, 'cpu')",
        "overlap_param_gather": "BridgeConfig.override_ddp_config['overlap_param_gather']",
    },
    needs={},
)
"""Of Megatron's ``OptimizerConfig``."""


def _ignored_or_fixed(field: str, values: Mapping[str, Any], overrides: Overrides) -> Iterator[tuple[str, Any, str]]:
    """Fields that may not be set, or that Megatron would ignore beside the others."""
    for name, value in values.items():
        here, needed = f"{field}[{name!r}]", overrides.needs.get(name)
        if any(isinstance(each, float) and not math.isfinite(each) for each in _listed(value)):
            yield here, value, "expected a finite number"
        elif name in overrides.elsewhere:
            yield here, value, f"this is decided by {overrides.elsewhere[name]}"
        elif name not in overrides.allowed:
            yield (
                here,
                value,
                "not a field of Megatron that can be set here: it does not exist, config.json decides it, or it would have "
                f"no effect; these can: {', '.join(overrides.allowed)}",
            )
        elif needed is not None and value and not values.get(needed):
            yield here, value, f"Megatron would ignore it without {needed!r}; set both"


def _wrong_in_layout(field: str, values: Mapping[str, Any], parallel: ParallelConfig) -> Iterator[tuple[str, Any, str]]:
    """Fields of the model provider that Megatron would ignore in a layout, or that fail in the first layer."""
    for name, value in values.items():
        here = f"{field}[{name!r}]"
        needed = "vpp" if name == "microbatch_group_size_per_vp_stage" else "pp" if "pipeline" in name else None
        if value and needed is not None and getattr(parallel, needed) == 1:
            yield here, value, f"Megatron would ignore it: needs {_PARALLEL}.{needed} > 1"
        if value and name == "tp_comm_overlap":
            yield (
                here,
                value,
                "needs Transformer Engine's buffers (initialize_ub), which the runtime does not make; leave it out",
            )


# Megatron takes another name for one that adds no loss.
_BALANCING = ("none", "aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn")


def _wrong_balancing(field: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    kind, coefficient = "moe_router_load_balancing_type", "moe_aux_loss_coeff"
    kinds, coefficients = _listed(values.get(kind, "none")), _listed(values.get(coefficient, 0.0))
    of_kind, of_coefficient = (f"{field}[{name!r}]" for name in (kind, coefficient))
    expected = f"expected one of {', '.join(map(repr, _BALANCING))}"
    if "quantile_balancing" in kinds:
        problem = f"Megatron's quantile balancing takes no batches in which padding is marked, as it is here; {expected}"
        yield of_kind, values[kind], problem
    elif set(map(str, kinds)) - set(_BALANCING):
        yield of_kind, values[kind], expected
    elif "sinkhorn" in kinds and values[kind] != "sinkhorn":
        yield of_kind, values[kind], "Megatron would ignore 'sinkhorn' in a list; give it alone, or leave it out"
    elif any(isinstance(each, bool) or not isinstance(each, int | float | None) for each in coefficients):
        yield of_coefficient, values[coefficient], "expected a number"
    elif len(kinds) != len(coefficients):
        yield of_coefficient, values.get(coefficient), f"expected one number for each of {kind}={kinds}"
    else:
        for each, weight in zip(kinds, coefficients, strict=True):
            adds_loss = str(each).endswith("aux_loss")
            if weight and not adds_loss:
                instead = "set that to 'aux_loss', 'seq_aux_loss' or 'global_aux_loss' too"
                yield of_coefficient, values[coefficient], f"Megatron would ignore it with {kind!r}={each!r}; {instead}"
            if adds_loss and not weight:
                yield of_kind, values[kind], f"Megatron would ignore it without {coefficient!r} above 0; set both"


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _read_by(granularity: str) -> HasEffect:
    because = f"Megatron reads it with recompute_granularity={granularity!r} only, here it is {{0.recompute_granularity!r}}"
    return HasEffect(lambda config: config.recompute_granularity == granularity, because)


class BridgeConfig(BackendConfig):
    """Options of the ``bridge`` runtime.

    The three ``override_`` dictionaries set fields of Megatron's own dataclasses. Those that an option here, ``config.json``
    or the runtime decides, or that Megatron would ignore here, are refused.

    Attributes:
        device: ``auto`` takes CUDA when there is a device.
        param_dtype: dtype of parameters in forward and backward; the optimizer works on float32 masters.
        recompute_granularity: ``full`` recomputes whole layers in the backward pass, ``selective`` the parts named in
            ``recompute_modules``.
        recompute_method: for ``full``: ``uniform`` recomputes in groups of ``recompute_num_layers`` layers, ``block`` the
            first ``recompute_num_layers`` layers of each stage.
        recompute_modules: for ``selective``; None takes Megatron's default, the core of attention.
        log_prob_chunk_tokens: tokens whose full-vocabulary logits are computed at one time.
        expert_bias_rate: what loss-free balancing moves the biases of routers by in a step, by the native runtime's rule; 0
            leaves them as they are, whatever Megatron-Bridge gives a family.
        override_transformer_config: fields of the model provider (Megatron's ``TransformerConfig`` and more).
        override_ddp_config: fields of ``DistributedDataParallelConfig``.
        override_optimizer_config: fields of Megatron's ``OptimizerConfig``.
    """

    device: Annotated[Literal["auto", "cpu", "cuda"], MAY_CHANGE] = "auto"
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    recompute_granularity: Annotated[Literal["full", "selective"] | None, MAY_CHANGE] = None
    recompute_method: Annotated[Literal["uniform", "block"] | None, MAY_CHANGE, _read_by("full")] = None
    recompute_num_layers: Annotated[int | None, Field(ge=1), MAY_CHANGE, _read_by("full")] = None
    recompute_modules: Annotated[tuple[str, ...] | None, MAY_CHANGE, _read_by("selective")] = None
    log_prob_chunk_tokens: Annotated[int, MAY_CHANGE] = Field(default=1024, ge=1)
    expert_bias_rate: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    override_transformer_config: dict[str, Any] = Field(default_factory=dict)
    override_ddp_config: dict[str, Any] = Field(default_factory=dict)
    override_optimizer_config: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> Self:
        ConfigError.refuse_all(self._problems())
        return self

    def _problems(self) -> Iterator[tuple[str, Any, str]]:
        if self.parallel.vpp > 1 and self.parallel.pp == 1:
            yield f"{_PARALLEL}.vpp", self.parallel.vpp, "needs pp > 1, got pp=1; set pp or leave vpp at 1"
        for name in ("method", "num_layers"):
            if self.recompute_granularity == "full" and getattr(self, f"recompute_{name}") is None:
                needed = (
                    "recompute_granularity='full' needs recompute_method ('uniform' or 'block') and recompute_num_layers"
                )
                yield f"BridgeConfig.recompute_{name}", None, needed
        transformer = "BridgeConfig.override_transformer_config"
        yield from _ignored_or_fixed(transformer, self.override_transformer_config, TRANSFORMER)
        yield from _wrong_in_layout(transformer, self.override_transformer_config, self.parallel)
        yield from _wrong_balancing(transformer, self.override_transformer_config)
        yield from _ignored_or_fixed("BridgeConfig.override_ddp_config", self.override_ddp_config, DDP)
        yield from _ignored_or_fixed("BridgeConfig.override_optimizer_config", self.override_optimizer_config, OPTIMIZER)
