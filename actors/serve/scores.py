"""Log-probs of a text by the trainer's forward pass: what is asked for, its row of a pass, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from actors.serve.wire import Cells, read_cells
from rl_backend.contracts import TARGET_IDS, BatchError, ForwardResult, TokenSequence

_MOST_CELLS = 1 << 22
"""Of one request: tokens of the text times what is asked of each."""
_NO_TARGET = -100
EMPTY = (0, -99999.0)
"""Token and log-prob of a cell that has none."""


class Scores(NamedTuple):
    """Row t is of the distribution that token t was taken from; the first token has none.

    Attributes:
        log_probs: (P,) float32, NaN for the first.
        top_ids, top_log_probs: (P, top), likeliest first; :data:`EMPTY` for the first.
        targets: (P - 1, K) of the ids that were asked for, from the second token on; 0 where none was.
    """

    log_probs: np.ndarray
    top_ids: np.ndarray
    top_log_probs: np.ndarray
    targets: np.ndarray


@dataclass(frozen=True)
class Scoring:
    """Attributes:
    tokens: P ids.
    top: how many of the likeliest tokens at each.
    targets: (P - 1, K) ids whose log-probs are wanted, from the second token on; -1 for none.
    """

    tokens: Sequence[int]
    top: int = 0
    targets: Cells | None = None
    temperature: float = 1.0

    @classmethod
    def of(cls, asked: Mapping[str, Any], prompt: Sequence[int], vocab_size: int) -> Scoring | None:
        """What a request for samples asks of its prompt; None for nothing.

        Raises:
            BatchError: ids, shapes or sizes that cannot be.
        """
        top, targets = width_in(asked, "topk_prompt_logprobs", len(prompt), vocab_size), None
        if (given := asked.get("target_prompt_logprobs")) is not None:
            targets = read_cells("target_prompt_logprobs", given, absent=-1)
            ids = targets.whole
            if ids.ndim != 2 or len(ids) != len(prompt) - 1 or ids.size * 2 > _MOST_CELLS:
                raise BatchError(
                    f"target_prompt_logprobs has the shape {ids.shape}; expected ({len(prompt) - 1}, K) for a prompt of "
                    f"{len(prompt)} tokens, and at most {_MOST_CELLS // 2} cells"
                )
            if not ids.size or ids.max() < 0 or ids.min() < -1 or ids.max() >= vocab_size:
                raise BatchError(
                    f"target_prompt_logprobs: expected ids from 0 to {vocab_size - 1}, at least one, and -1 for none"
                )
        wanted = asked.get("prompt_logprobs") or top or targets is not None
        return cls(prompt, top, targets) if wanted else None

    @property
    def kind(self) -> tuple[int, int, float]:
        """Rows of one pass have the same."""
        return self.top, 0 if self.targets is None else self.targets.whole.shape[1], self.temperature

    @property
    def meta(self) -> Mapping[str, Any]:
        return {"top_log_probs": self.top, "temperature": self.temperature}

    @property
    def row(self) -> TokenSequence:
        tokens = torch.tensor(self.tokens)
        if self.targets is None:
            return TokenSequence(tokens)
        wanted = torch.from_numpy(self.targets.whole.astype(np.int64))
        ids = torch.full((len(tokens), 1 + wanted.shape[1]), _NO_TARGET)
        ids[:-1, 0] = tokens[1:]
        ids[:-1, 1:] = wanted.where(wanted >= 0, _NO_TARGET)
        return TokenSequence(tokens, {TARGET_IDS: ids})

    def scores(self, result: ForwardResult, index: int) -> Scores:
        """Of row ``index`` of a pass."""
        length = len(self.tokens)
        found = result.output("log_probs")[index].float().numpy().reshape(length, -1)
        ids, values = np.full((length, self.top), EMPTY[0]), np.full((length, self.top), EMPTY[1], np.float32)
        if self.top:
            ids[1:] = result.output("top_ids")[index].numpy()[:-1]
            values[1:] = result.output("top_log_probs")[index].float().numpy()[:-1]
        own = np.concatenate([np.full(1, np.nan, np.float32), found[:-1, 0]])
        return Scores(own, ids, values, found[:-1, 1:])


def width_in(asked: Mapping[str, Any], name: str, length: int, vocab_size: int) -> int:
    """How many of the likeliest tokens a request wants at each of ``length`` places; 0 for none.

    Raises:
        BatchError: no number, or more than there are.
    """
    width = asked.get(name) or 0
    most = min(vocab_size, _MOST_CELLS // length)
    if type(width) is not int or not 0 <= width <= most:
        raise BatchError(f"{name}={width!r}: expected a number up to {most} for {length} tokens")
    return width
