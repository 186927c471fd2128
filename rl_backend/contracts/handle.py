"""Handles: the models that a runtime holds, and their heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

type Head = Literal["log_probs", "values"]
"""``log_probs``: a language-model head (a policy, a reference). ``values``: one number per token (a critic)."""

VALUE_HEAD_WEIGHTS = ("score.weight", "score.bias")
"""Hugging Face names of a critic's head, (1, hidden_size) and (1,), as in transformers' ``...ForTokenClassification``."""


@dataclass(eq=False)
class ModelHandle:
    """What every atom takes. Runtimes subclass it and keep the model, optimizer and process groups in it.

    Attributes:
        name: for messages.
        forward_only: no optimizer and no gradients (a reference policy).
        weight_version: a whole number that a successful ``optimizer_step`` advances and a checkpoint keeps.
        data_parallel_rank, data_parallel_size: this rank's place among those that see different data.
        head: what it computes: ``log_probs`` of the next token, or ``values`` (a critic).
        micro_batch_multiple: ``forward_backward`` takes a multiple of so many micro-batches (an interleaved pipeline).
        base: the model whose weights an adapter handle shares; None for a model of its own.
    """

    name: str
    forward_only: bool
    weight_version: int
    data_parallel_rank: int
    data_parallel_size: int
    head: Head = "log_probs"
    micro_batch_multiple: int = 1
    base: ModelHandle | None = None

    @property
    def is_settled(self) -> bool:
        """Whether the last step is final. With post-validation a rank may still have to take it back."""
        return True
