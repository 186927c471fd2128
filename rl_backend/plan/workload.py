"""What a job does with a model, as far as its memory depends on it."""

from __future__ import annotations

from typing import Literal, Self

import torch
from pydantic import Field, model_validator

from rl_backend.contracts import ConfigError, Head, PackedBatch
from rl_backend.contracts.base_config import BaseConfig
from rl_backend.contracts.operations import Part


class Workload(BaseConfig):
    """One step of training and what goes on around it.

    Attributes:
        sequence_length: tokens of every sequence.
        micro_batch_tokens: tokens of every micro-batch.
        num_micro_batches: of a step, on each data-parallel rank.
        head: what the model ends in.
        calculate_entropy: whether the loss takes the entropy.
        offload: parts that are in host memory whenever they are not in use.
        sync_dtype: of the weights that the rollout engines get.
        byte_budget: of ``export_weights``; None gathers one tensor at a time.
    """

    sequence_length: int = Field(default=4096, ge=1)
    micro_batch_tokens: int = Field(default=8192, ge=1)
    num_micro_batches: int = Field(default=8, ge=1)
    head: Head = "log_probs"
    calculate_entropy: bool = False
    offload: tuple[Part, ...] = ()
    sync_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    byte_budget: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.sequence_length > self.micro_batch_tokens:
            raise ConfigError.of(
                "Workload.sequence_length",
                self.sequence_length,
                f"does not fit into micro_batch_tokens={self.micro_batch_tokens}; sequences are never split: raise that",
            )
        if self.calculate_entropy and self.head != "log_probs":
            raise ConfigError.of(
                "Workload.calculate_entropy",
                True,
                f"head={self.head!r} gives no probabilities and has no entropy; leave it out",
            )
        return self

    def micro_batch(self) -> PackedBatch:
        """A micro-batch of zeros: as many whole sequences as fit, and a shorter one."""
        whole, rest = divmod(self.micro_batch_tokens, self.sequence_length)
        seq_lens = torch.tensor([self.sequence_length] * whole + [rest] * (rest > 0))
        tokens = torch.zeros(self.micro_batch_tokens, dtype=torch.int64)
        return PackedBatch(tokens, seq_lens, meta={"calculate_entropy": self.calculate_entropy})
