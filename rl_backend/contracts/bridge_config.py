"""Options of the ``bridge`` runtime: Megatron-Core through Megatron-Bridge."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from rl_backend.contracts.bridge_overrides import DDP, OPTIMIZER, TRANSFORMER, check_in_layout, check_overrides
from rl_backend.contracts.errors import ConfigError
from rl_backend.contracts.runtime_config import BACKEND_CONFIGS, BackendConfig

type RecomputeGranularity = Literal["full", "selective"]
type RecomputeMethod = Literal["uniform", "block"]


class BridgeConfig(BackendConfig):
    """Options of the ``bridge`` runtime.

    The three ``override_`` dictionaries set fields of Megatron's own dataclasses: those of
    :mod:`rl_backend.contracts.bridge_overrides`. Others are refused, because an option here, ``config.json`` or the runtime
    decides them, or Megatron would ignore them here.

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
        if self.parallel.vpp > 1 and self.parallel.pp == 1:
            raise ConfigError.of(
                "BridgeConfig.parallel.vpp", self.parallel.vpp, "needs pp > 1, got pp=1; set pp or leave vpp at 1"
            )
        self._check_recompute()
        check_overrides("BridgeConfig.override_transformer_config", self.override_transformer_config, TRANSFORMER)
        check_in_layout("BridgeConfig.override_transformer_config", self.override_transformer_config, self.parallel)
        check_overrides("BridgeConfig.override_ddp_config", self.override_ddp_config, DDP)
        check_overrides("BridgeConfig.override_optimizer_config", self.override_optimizer_config, OPTIMIZER)
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


BACKEND_CONFIGS.add("bridge", BridgeConfig)
