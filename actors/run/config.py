"""Options of every run: runtime and layout, model, data, optimizer, resources, checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

import ray
from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from actors.cluster.placement import ClusterShare
from actors.rollout.config import RolloutConfig
from actors.run.metrics import writer_classes
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


class TrainingConfig(RuntimeOptions):
    """Model, data, optimizer, resources, checkpoints.

    Attributes:
        may_change: options in which a run that goes on from a checkpoint may differ from the one that saved it: where and
            how long it runs, and what it shows. All others decide what is learned.
        contents: options that are compared as what is in the files that they name.
    """

    may_change: ClassVar[frozenset[str]] = frozenset(RuntimeOptions.model_fields) - {"dtype", "plugins"} | {
        "run_dir",
        "steps",
        "placement",
        "max_tokens_per_micro_batch",
        "save_every",
        "keep_checkpoints",
        "async_save",
        "resume",
        "trace",
        "metrics_to",
    }
    contents: ClassVar[tuple[str, ...]] = ("dataset", "eval_dataset", "model")

    model: str = Field(description="local Hugging Face directory with config, safetensors and tokenizer")
    dataset: str = Field(description="training data: .jsonl (prompt, answer) or verl-style .parquet")
    eval_dataset: str | None = Field(default=None, description="held-out data")
    run_dir: str = Field(description="new folder for metrics and the trained model")
    steps: int = Field(default=100, ge=1, description="training steps")
    max_prompt_tokens: int = Field(default=512, ge=1, description="longest prompt")
    lr: float = Field(default=1e-6, gt=0, description="peak learning rate")
    lr_warmup_steps: int = Field(default=0, ge=0, description="optimizer steps of linear warm-up")
    lr_decay_style: Literal["constant", "linear", "cosine"] = Field(default="constant", description="after the warm-up")
    weight_decay: float = Field(default=0.01, ge=0, description="AdamW weight decay")
    clip_grad: float = Field(default=1.0, gt=0, description="largest norm of the gradient; larger ones are scaled down")
    placement: Literal["pack", "spread"] = Field(default="pack", description="ranks on few nodes of a cluster, or on many")
    max_tokens_per_micro_batch: int = Field(default=16384, ge=1, description="token budget of one micro-batch")
    seed: int = Field(default=0, ge=0, description="fixes data order, samples and training")
    save_every: int = Field(
        default=0, ge=0, description="steps between checkpoints in run_dir/checkpoints, and one after the last; 0: none"
    )
    keep_checkpoints: int = Field(default=2, ge=0, description="newest checkpoints that are kept; 0: all")
    async_save: bool = Field(default=True, description="train on while a checkpoint is written")
    trace: bool = Field(default=False, description="record all actors in run_dir/trace.json, for Perfetto")
    metrics_to: str | None = Field(
        default="tensorboard",
        description="where each step's metrics go beside metrics.jsonl, with commas between: tensorboard, wandb, mlflow, "
        "trackio, or package.module:Class of your own; none: nowhere",
    )
    resume: str | None = Field(
        default=None,
        description="auto: go on from the newest checkpoint in run_dir, if any; or the checkpoint to go on from",
    )

    @model_validator(mode="after")
    def _check_training(self) -> Self:
        if self.lr_warmup_steps and self.lr_warmup_steps >= self.optimizer_steps:
            raise ConfigError.of(
                f"{type(self).__name__}.lr_warmup_steps",
                self.lr_warmup_steps,
                f"the run has {self.optimizer_steps} optimizer steps and would never reach lr={self.lr:g}",
            )
        writer_classes(self.metrics_to)
        for name in ("keep_checkpoints", "async_save"):
            if self.is_set(name) and not self.save_every:
                raise ConfigError.of(
                    f"{type(self).__name__}.{name}", getattr(self, name), "save_every=0 saves no checkpoints; set it too"
                )
        return self

    @property
    def optimizer_steps(self) -> int:
        """Of the trained model in the whole run; its schedule ends with the last."""
        return self.steps

    @property
    def training_groups(self) -> int:
        """Groups of ``ranks`` ranks each."""
        return 1

    @property
    def num_engines(self) -> int:
        """vLLM engines; 0 for a run that samples nothing."""
        return 0

    @property
    def batches_ahead(self) -> int:
        """Batches that are sampled while earlier ones are trained on."""
        return 0

    def runtime_config(self) -> RuntimeConfig:
        """Of the trained model; needs Ray, which knows the GPUs."""
        return self.make_runtime_config(
            model=self.model,
            seed=self.seed,
            max_tokens_per_micro_batch=self.max_tokens_per_micro_batch,
            optimizer=self.optimizer_config(self.lr, self.optimizer_steps),
        )

    def rollout_config(self, share: ClusterShare) -> RolloutConfig | None:
        """Of the engines, with their share of the cluster; None without any."""
        return None

    def optimizer_config(self, lr: float, total_steps: int) -> OptimizerConfig:
        return OptimizerConfig(
            lr=lr,
            lr_warmup_steps=self.lr_warmup_steps,
            lr_decay_style=self.lr_decay_style,
            total_training_steps=total_steps,
            weight_decay=self.weight_decay,
            clip_grad=self.clip_grad,
        )


def resolve_dtype(dtype: Literal["auto", "float32", "bfloat16"]) -> Literal["float32", "bfloat16"]:
    """``auto`` is bfloat16 on a cluster with GPUs, else float32."""
    if dtype == "auto":
        return "bfloat16" if ray.cluster_resources().get("GPU", 0) > 0 else "float32"
    return dtype
