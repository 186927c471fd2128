"""What a model ends in."""

from __future__ import annotations

from typing import Literal

type Head = Literal["log_probs", "values"]
"""``log_probs``: a language-model head (a policy, a reference). ``values``: one number per token (a critic)."""

VALUE_HEAD_WEIGHTS = ("score.weight", "score.bias")
"""Hugging Face names of a critic's head, (1, hidden_size) and (1,), as in transformers' ``...ForTokenClassification``."""
