"""Options of every example that trains a model of the user's on data of the user's."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from examples.common.runtime import RuntimeOptions
from rl_backend import OptimizerConfig, RuntimeConfig
from rl_backend.contracts import ConfigError


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

    def runtime_config(self) -> RuntimeConfig:
        """Of the trained model; needs Ray, which knows the GPUs."""
        return self.make_runtime_config(
            model=self.model,
            seed=self.seed,
            max_tokens_per_micro_batch=self.max_tokens_per_micro_batch,
            optimizer=self.optimizer_config(self.lr, self.optimizer_steps),
        )

    def optimizer_config(self, lr: float, total_steps: int) -> OptimizerConfig:
        return OptimizerConfig(
            lr=lr,
            lr_warmup_steps=self.lr_warmup_steps,
            lr_decay_style=self.lr_decay_style,
            total_training_steps=total_steps,
            weight_decay=self.weight_decay,
            clip_grad=self.clip_grad,
        )
