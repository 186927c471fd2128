"""The runtime that an example trains with: which one, on how many ranks and in which layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from examples.common.cluster import resolve_dtype
from rl_backend.contracts import (
    BACKEND_CONFIGS,
    BaseConfig,
    ConfigError,
    OptimizerConfig,
    ParallelConfig,
    RuntimeConfig,
)
from rl_backend.contracts.runtime_config import import_plugins

_OWN_OPTIONS = {
    "parallel": "--tp, --pp, --vpp, --cp, --ep and --etp",
    "optimizer": "--lr and its neighbours",
    "param_dtype": "--dtype",
}
_WITHOUT_EFFECT = {"post_validation": "the loop waits for the result of each step before the next; leave it out"}


def _object(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ConfigError.of("backend_options", value, f"is not a JSON object: {error}") from None


class RuntimeOptions(BaseConfig):
    """Which runtime trains, on how many ranks, laid out how."""

    model_config = ConfigDict(allow_inf_nan=False)

    plugins: str = Field(default="", description="modules that register model families or runtimes, with commas between")
    backend: str = Field(default="native", description="runtime that trains: native, bridge (Megatron), or a plugin's")
    backend_options: Annotated[Mapping[str, Any], BeforeValidator(_object)] = Field(
        default={}, description='more fields of its configuration, as JSON: {"log_prob_chunk_tokens": 512}'
    )
    ranks: int = Field(default=1, ge=1, description="training ranks; data parallel as far as tp, pp and cp leave")
    tp: int = Field(default=1, ge=1, description="tensor-parallel ranks, with sequence parallel")
    pp: int = Field(default=1, ge=1, description="pipeline ranks")
    vpp: int = Field(default=1, ge=1, description="stages of each pipeline rank")
    cp: int = Field(default=1, ge=1, description="context-parallel ranks")
    ep: int = Field(default=1, ge=1, description="expert-parallel ranks")
    etp: int = Field(default=1, ge=1, description="tensor-parallel ranks of each expert")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(default="auto", description="auto: bfloat16 with GPUs")

    @model_validator(mode="after")
    def _check_runtime(self) -> Self:
        import_plugins(self._plugin_names())
        for name, options in _OWN_OPTIONS.items():
            if name in self.backend_options:
                raise ConfigError.of(
                    f"{type(self).__name__}.backend_options", dict(self.backend_options), f"{name} follows from {options}"
                )
        for name, reason in _WITHOUT_EFFECT.items():
            if self.backend_options.get(name):
                raise ConfigError.of(f"{type(self).__name__}.backend_options[{name!r}]", self.backend_options[name], reason)
        BACKEND_CONFIGS.get(self.backend)(parallel=self.parallel, **self.backend_options)
        self.parallel.data_parallel_size(self.ranks)
        return self

    @property
    def parallel(self) -> ParallelConfig:
        return ParallelConfig(tp=self.tp, pp=self.pp, vpp=self.vpp, cp=self.cp, ep=self.ep, etp=self.etp)

    @property
    def data_parallel_size(self) -> int:
        return self.parallel.data_parallel_size(self.ranks)

    def describe_ranks(self) -> str:
        """Runtime, ranks and layout, for a run's first line."""
        layout = "".join(f", {name}={size}" for name, size in self.parallel.model_dump().items() if size > 1)
        return f"{self.ranks} training rank(s) of {self.backend}{layout}"

    def runtime_options(self) -> dict[str, Any]:
        """These options, for another configuration that has them."""
        return {name: getattr(self, name) for name in RuntimeOptions.model_fields}

    def make_runtime_config(
        self, *, model: str, seed: int, max_tokens_per_micro_batch: int, optimizer: OptimizerConfig
    ) -> RuntimeConfig:
        """Needs Ray, which knows the GPUs. A runtime without ``param_dtype`` in its options keeps to its own dtype.

        Raises:
            ConfigError: a dtype is asked of a runtime that has no choice.
        """
        options: dict[str, Any] = {"optimizer": optimizer, "parallel": self.parallel, **self.backend_options}
        if "param_dtype" in BACKEND_CONFIGS.get(self.backend).model_fields:
            options["param_dtype"] = resolve_dtype(self.dtype)
        elif self.dtype != "auto":
            raise ConfigError.of("dtype", self.dtype, f"runtime {self.backend!r} has no param_dtype; use auto")
        return RuntimeConfig(
            plugins=self._plugin_names(),
            backend=self.backend,
            hf_path=model,
            seed=seed,
            max_tokens_per_micro_batch=max_tokens_per_micro_batch,
            backend_cfg=options,
        )

    def _plugin_names(self) -> tuple[str, ...]:
        """``"a, b"`` -> ``("a", "b")``."""
        return tuple(name for part in self.plugins.split(",") if (name := part.strip()))
