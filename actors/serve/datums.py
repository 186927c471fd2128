"""Data of training requests as the backend's sequences, and the names of losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from actors.serve.wire import Datum
from actors.train.loss import Loss
from rl_backend.contracts import TARGET_IDS, BatchError, TokenSequence, UnsupportedError
from rl_backend.contracts.lora import LORA_FIELD

_MODULE = "rl_backend.algorithm.tinker_losses"
_OF_A_POLICY = ("logprobs", "advantages")
_MASK = "sequence_ratio_mask"
_CLIPS = ("clip_low_threshold", "clip_high_threshold")
LOSSES: Mapping[str, tuple[str, ...]] = {
    "cross_entropy": (),
    "importance_sampling": _OF_A_POLICY,
    "ppo": _OF_A_POLICY,
    "cispo": _OF_A_POLICY,
    "dro": _OF_A_POLICY,
    "gspo": (*_OF_A_POLICY, _MASK),
}
"""Name of a loss -> columns that it needs beside the targets. cross_entropy takes weights of 1 where there are none."""
_OPTIONAL: Mapping[str, tuple[str, ...]] = {
    "cross_entropy": ("weights",),
    "ppo": _CLIPS,
    "cispo": _CLIPS,
    "gspo": _CLIPS,
}
_LARGEST_RATIO = 88.0
"""Nats whose exponential float32 still has."""
# Every row of a pass has these, so that clients with different losses share it.
_SHARED = ("weights", *_OF_A_POLICY, _MASK)

type Signature = tuple[int, tuple[str, ...]]
"""Targets of a token, 0 for a plain (N,), and the further columns: rows of one pass have the same."""


def loss_of(name: str, options: Mapping[str, Any]) -> Loss:
    """Raises :class:`UnsupportedError` for a loss that is not served, :class:`ConfigError` for an option of another one."""
    if name not in LOSSES:
        raise UnsupportedError(f"loss_fn={name!r} is not served here; there are {', '.join(LOSSES)}")
    return Loss(f"{_MODULE}:{name}", **options)


def signature_of(datum: Datum, loss: str) -> Signature:
    targets = datum.inputs["target_tokens"]
    extra = [name for name in datum.inputs if name in (*LOSSES[loss], *_OPTIONAL.get(loss, ())) and name not in _SHARED]
    return (0 if targets.ndim == 1 else targets.shape[1]), tuple(sorted(extra))


def check(where: str, datum: Datum, loss: str, *, vocab_size: int, longest: int, forward_only: bool) -> None:
    """Refuses a datum that would fail the pass that it shares with those of others.

    Raises:
        BatchError: names the datum and the column.
    """
    tokens, inputs = datum.tokens, datum.inputs
    if not 0 < len(tokens) <= longest:
        raise BatchError(f"{where}: {len(tokens)} tokens; expected 1 to {longest}")
    missing = [name for name in ("target_tokens", *LOSSES[loss]) if name not in inputs]
    unknown = [name for name in inputs if name not in ("target_tokens", *LOSSES[loss], *_OPTIONAL.get(loss, ()))]
    # A custom loss on the client begins with a forward pass over its own columns.
    inputs = {name: values for name, values in inputs.items() if name not in unknown}
    unknown = [] if forward_only else unknown
    if missing or unknown:
        problem = f"lacks {', '.join(missing)}" if missing else f"has {', '.join(unknown)}, which it does not read"
        raise BatchError(f"{where}: loss_fn={loss!r} {problem}; give {', '.join(('target_tokens', *LOSSES[loss]))}")
    targets = inputs["target_tokens"]
    if targets.ndim not in (1, 2) or len(targets) != len(tokens) or not targets.size:
        raise BatchError(f"{where}: {len(tokens)} input tokens, but target_tokens has the shape {targets.shape}")
    if targets.ndim == 2 and loss != "cross_entropy":
        raise BatchError(f"{where}: loss_fn={loss!r} takes one target a token; target_tokens has the shape {targets.shape}")
    for name, ids in (("model_input", tokens), ("target_tokens", targets)):
        if ids.min() < 0 or ids.max() >= vocab_size:
            raise BatchError(f"{where}: {name} has ids from {ids.min()} to {ids.max()}; expected 0 to {vocab_size - 1}")
    for name, values in inputs.items():
        wanted = targets.shape if name == "weights" else targets.shape[:1]
        if name != "target_tokens" and values.shape != wanted:
            raise BatchError(f"{where}: {name} has the shape {values.shape}; expected {wanted}")
        if not np.isfinite(values).all():
            raise BatchError(f"{where}: {name} has values that are not finite")


def sequence_of(datum: Datum, loss: str, lora_id: int) -> TokenSequence:
    """A checked datum of the tenant of that number."""
    targets = torch.from_numpy(datum.inputs["target_tokens"].astype(np.int64))
    columns = {
        name: torch.from_numpy(values.astype(np.float32))
        for name, values in datum.inputs.items()
        if name in (*LOSSES[loss], *_OPTIONAL.get(loss, ()))
    }
    length = len(datum.tokens)
    blank = {name: torch.zeros(length) for name in (*_OF_A_POLICY, _MASK)}
    blank["weights"] = torch.ones(targets.shape)
    fields = {**blank, **columns, TARGET_IDS: targets, "loss_mask": torch.ones(length)}
    # What numpy read is a view of the request's bytes, which torch may not write to; astype has copied it.
    return TokenSequence(torch.from_numpy(datum.tokens.copy()), fields, {LORA_FIELD: torch.tensor(lora_id)})


def not_finite(first: int, data: Sequence[Datum], log_probs: Sequence[np.ndarray]) -> str:
    """Why the loss of these data, of which the first has the number ``first``, is no finite number."""
    for number, (datum, found) in enumerate(zip(data, log_probs, strict=True), first):
        if not np.isfinite(found).all():
            return f"datum {number}: the adapter gives log-probs that are not finite"
        if "advantages" in datum.inputs and "logprobs" in datum.inputs:
            gaps = np.abs(found - datum.inputs["logprobs"])[datum.inputs["advantages"] != 0]
            if gaps.max(initial=0.0) > _LARGEST_RATIO:
                return f"datum {number}: logprobs are up to {gaps.max():.3g} nats from the adapter's; their ratio overflows"
    return "its sum over tokens and data is not finite"
