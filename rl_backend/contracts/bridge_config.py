"""Options of the ``bridge`` runtime: Megatron-Core through Megatron-Bridge."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from rl_backend.contracts.errors import ConfigError
from rl_backend.contracts.runtime_config import BACKEND_CONFIGS, BackendConfig

type RecomputeGranularity = Literal["full", "selective"]
type RecomputeMethod = Literal["uniform", "block"]

_PARALLEL = "BridgeConfig.parallel"
_OPTIMIZER = "BridgeConfig.optimizer"
_PRECISION = "BridgeConfig.param_dtype"
_RUNTIME = "the runtime, which would be wrong with another value"

_OWNED_TRANSFORMER = {
    "tensor_model_parallel_size": f"{_PARALLEL}.tp",
    "sequence_parallel": f"{_PARALLEL}.tp (on when tp > 1)",
    "pipeline_model_parallel_size": f"{_PARALLEL}.pp",
    "virtual_pipeline_model_parallel_size": f"{_PARALLEL}.vpp",
    "context_parallel_size": f"{_PARALLEL}.cp",
    "expert_model_parallel_size": f"{_PARALLEL}.ep",
    "expert_tensor_parallel_size": f"{_PARALLEL}.etp",
    "params_dtype": _PRECISION,
    "pipeline_dtype": _PRECISION,
    "autocast_dtype": _PRECISION,
    "enable_autocast": _PRECISION,
    "bf16": _PRECISION,
    "fp16": _PRECISION,
    "recompute_granularity": "BridgeConfig.recompute_granularity",
    "recompute_method": "BridgeConfig.recompute_method",
    "recompute_num_layers": "BridgeConfig.recompute_num_layers",
    "recompute_modules": "BridgeConfig.recompute_modules",
    "calculate_per_token_loss": _RUNTIME,
    "variable_seq_lengths": _RUNTIME,
    "mtp_num_layers": _RUNTIME,
    "seq_length": _RUNTIME,
    "vocab_size": "the model's config.json",
    "num_layers": "the model's config.json",
    "hidden_size": "the model's config.json",
    "finalize_model_grads_func": _RUNTIME,
    "grad_scale_func": _RUNTIME,
    "no_sync_func": _RUNTIME,
    "grad_sync_func": _RUNTIME,
    "param_sync_func": _RUNTIME,
    "timers": _RUNTIME,
}
_OWNED_DDP = {
    "use_distributed_optimizer": _RUNTIME,
    "use_megatron_fsdp": _RUNTIME,
    "use_custom_fsdp": _RUNTIME,
    "num_distributed_optimizer_instances": _RUNTIME,
    "param_name_patterns_for_fp32_local_accumulation": "override_ddp_config['grad_reduce_in_fp32'], which is on for all",
    "fp8_param_gather": _PRECISION,
    "fp4_param_gather": _PRECISION,
    "check_for_nan_in_grad": "optimizer_step, which skips the step on every rank",
    "check_for_large_grads": "optimizer_step, which skips the step on every rank",
}
_OWNED_OPTIMIZER = {
    "optimizer": f"{_OPTIMIZER}.optimizer",
    "lr": f"{_OPTIMIZER}.lr",
    "min_lr": f"{_OPTIMIZER}.min_lr",
    "weight_decay": f"{_OPTIMIZER}.weight_decay",
    "clip_grad": f"{_OPTIMIZER}.clip_grad",
    "adam_beta1": f"{_OPTIMIZER}.betas",
    "adam_beta2": f"{_OPTIMIZER}.betas",
    "adam_eps": f"{_OPTIMIZER}.eps",
    "log_num_zeros_in_grad": f"{_OPTIMIZER}.log_num_zeros_in_grad",
    "grad_norm_skip_threshold": "optimizer_step, which skips steps that are not finite only",
    "params_dtype": _PRECISION,
    "bf16": _PRECISION,
    "fp16": _PRECISION,
    "loss_scale": _PRECISION,
    "use_distributed_optimizer": _RUNTIME,
    "use_layer_wise_distributed_optimizer": _RUNTIME,
    "use_precision_aware_optimizer": _RUNTIME,
    "optimizer_cpu_offload": "Runtime.to(handle, 'cpu')",
    "overlap_param_gather": "BridgeConfig.override_ddp_config['overlap_param_gather']",
    "timers": _RUNTIME,
}


class BridgeConfig(BackendConfig):
    """Options of the ``bridge`` runtime.

    The three ``override_`` dictionaries set fields of Megatron's own dataclasses. Fields that an option here or the runtime
    decides are refused, and so is a name that the installed Megatron does not have (when the runtime is created).

    Attributes:
        device: ``auto`` takes CUDA when there is a device.
        param_dtype: dtype of parameters in forward and backward; the optimizer works on float32 masters.
        recompute_granularity: ``full`` recomputes whole layers in the backward pass, ``selective`` the parts named in
            ``recompute_modules``.
        recompute_method: for ``full``: ``uniform`` recomputes in groups of ``recompute_num_layers`` layers, ``block`` the
            first ``recompute_num_layers`` layers of each stage.
        recompute_modules: for ``selective``; None takes Megatron's default, the core of attention.
        log_prob_chunk_tokens: tokens whose full-vocabulary logits exist at one time.
        override_transformer_config: fields of the model provider (Megatron's ``TransformerConfig`` and more).
        override_ddp_config: fields of ``DistributedDataParallelConfig``.
        override_optimizer_config: fields of Megatron's ``OptimizerConfig``.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    recompute_granularity: RecomputeGranularity | None = None
    recompute_method: RecomputeMethod | None = None
    recompute_num_layers: int | None = Field(default=None, ge=1)
    recompute_modules: tuple[str, ...] | None = None
    log_prob_chunk_tokens: int = Field(default=1024, ge=1)
    override_transformer_config: dict[str, Any] = Field(default_factory=dict)
    override_ddp_config: dict[str, Any] = Field(default_factory=dict)
    override_optimizer_config: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_recompute()
        for field, owned in (
            ("override_transformer_config", _OWNED_TRANSFORMER),
            ("override_ddp_config", _OWNED_DDP),
            ("override_optimizer_config", _OWNED_OPTIMIZER),
        ):
            _refuse_owned(f"BridgeConfig.{field}", getattr(self, field), owned)
        return self

    def _check_recompute(self) -> None:
        granularity = self.recompute_granularity
        for name, needs in (("method", "full"), ("num_layers", "full"), ("modules", "selective")):
            value = getattr(self, f"recompute_{name}")
            if value is not None and granularity != needs:
                raise ConfigError.of(
                    f"BridgeConfig.recompute_{name}",
                    value,
                    f"Megatron reads it with recompute_granularity={needs!r} only, here it is {granularity!r}",
                )
            if value is None and granularity == needs == "full":
                raise ConfigError.of(
                    f"BridgeConfig.recompute_{name}",
                    None,
                    "recompute_granularity='full' needs recompute_method ('uniform' or 'block') and recompute_num_layers",
                )


def _refuse_owned(field: str, overrides: Mapping[str, Any], owned: Mapping[str, str]) -> None:
    for name in overrides:
        if name in owned:
            raise ConfigError.of(f"{field}[{name!r}]", overrides[name], f"this is decided by {owned[name]}")


BACKEND_CONFIGS.add("bridge", BridgeConfig)
