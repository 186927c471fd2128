"""Input of a model: sequences, and packed micro-batches of them.

The shift is defined here, once. ``log_probs[t]``, and every token field that a loss reads beside it (``loss_mask``,
``advantages``, ``old_log_probs``, ...), belong to the *prediction of token t+1*, made at position t. The last position of
a sequence predicts nothing: its log-prob is 0 and its ``loss_mask`` must be 0. ``values[t]`` belongs to token t.

The token field :data:`TARGET_IDS` takes the place of the next tokens: ``log_probs[t]`` is then of ``target_ids[t]``, one
token or K of them, at every position, the last included.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_backend.contracts.errors import BatchError

TARGET_IDS = "target_ids"
"""Token field, (L,) or (L, K) int64: the tokens that log-probs are of, in place of the next ones; -100 asks for none."""

SAMPLING_MASK = "sampling_mask"
"""Token field, (L, K) int32 or int64: the words that the next token was sampled from, as the engine said; what they hold is
in :mod:`rl_backend.contracts.replay`."""

type SamplingMask = NDArray[np.int32]
"""(tokens, K), of a sample: the ids of the words that each token was sampled from, in ascending order, and -1 behind."""

EPISODE_SHARE = "episode_share"
"""Sequence field, 0-d floating: the part of its episode that a sequence is. Those of an episode add up to 1."""


def _require_rows(kind: str, fields: Mapping[str, Tensor], rows: int) -> None:
    for name, value in fields.items():
        if value.dim() == 0 or value.shape[0] != rows:
            raise BatchError(
                f"{kind} field {name!r} has shape {tuple(value.shape)}; its first dimension must be {rows}: one row per "
                f"{kind}",
                name=name,
            )


def _require_targets(fields: Mapping[str, Tensor]) -> None:
    targets = fields.get(TARGET_IDS)
    if targets is not None and (targets.dtype != torch.int64 or targets.dim() > 2 or targets.numel() == 0):
        raise BatchError(
            f"token field {TARGET_IDS!r} has shape {tuple(targets.shape)} and dtype {targets.dtype}; expected one int64 "
            "token for each position, or K >= 1 of them",
            name=TARGET_IDS,
        )


@dataclass(frozen=True, eq=False)
class TokenSequence:
    """One sequence of L tokens.

    Attributes:
        input_ids: (L,) int64, L >= 1.
        token_fields: name -> (L, ...) tensor.
        sequence_fields: name -> tensor of any shape, one value for the sequence (a scalar is a 0-d tensor).
    """

    input_ids: Tensor
    token_fields: Mapping[str, Tensor] = field(default_factory=dict)
    sequence_fields: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ids = self.input_ids
        if ids.dim() != 1 or ids.numel() == 0 or ids.dtype != torch.int64:
            raise BatchError(
                f"input_ids has shape {tuple(ids.shape)} and dtype {ids.dtype}; expected (L,) with L >= 1 and torch.int64: "
                "no batch dimension, no padding"
            )
        _require_rows("token", self.token_fields, len(self))
        _require_targets(self.token_fields)

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    def with_fields(
        self, token_fields: Mapping[str, Tensor] | None = None, sequence_fields: Mapping[str, Tensor] | None = None
    ) -> Self:
        return type(self)(
            self.input_ids,
            {**self.token_fields, **(token_fields or {})},
            {**self.sequence_fields, **(sequence_fields or {})},
        )

    @classmethod
    def from_prompt_and_response(
        cls,
        prompt_ids: Sequence[int] | Tensor,
        response_ids: Sequence[int] | Tensor,
        *,
        response_fields: Mapping[str, Sequence[float] | Tensor] | None = None,
        sequence_fields: Mapping[str, Tensor] | None = None,
    ) -> Self:
        """Prompt and response as one sequence, with ``loss_mask`` on the predictions of the response tokens.

        ``response_fields`` have one value for each response token (``rollout_log_probs`` for one), which is placed at the
        position that predicts its token, with zeros elsewhere.
        """
        if len(prompt_ids) == 0 or len(response_ids) == 0:
            raise BatchError(
                f"a prompt of {len(prompt_ids)} and a response of {len(response_ids)} tokens; both need at least one"
            )
        start, length = len(prompt_ids) - 1, len(prompt_ids) + len(response_ids)
        fields = {"loss_mask": torch.zeros(length)}
        fields["loss_mask"][start:-1] = 1.0
        for name, values in (response_fields or {}).items():
            tensor = torch.as_tensor(values)
            if tensor.dim() == 0 or tensor.shape[0] != len(response_ids):
                raise BatchError(
                    f"response field {name!r} has shape {tuple(tensor.shape)} for {len(response_ids)} response tokens",
                    name=name,
                )
            placed = tensor.new_zeros((length, *tensor.shape[1:]))
            placed[start:-1] = tensor
            fields[name] = placed
        input_ids = torch.cat([torch.as_tensor(prompt_ids), torch.as_tensor(response_ids)])
        return cls(input_ids, fields, sequence_fields or {})


class SamplingCuts(NamedTuple):
    """The tokens that are sampled from, as of vLLM's parameters: ``min_p``, of what is left ``top_k``, of that ``top_p``.

    Attributes:
        mask: of a batch with :data:`SAMPLING_MASK`, those that the engine said it sampled from, in place of these rules.
    """

    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    mask: Tensor | None = None


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """One micro-batch: B sequences laid end to end in T tokens, without padding.

    Attributes:
        input_ids: (T,) int64.
        seq_lens: (B,) int64 on the CPU, each >= 1, with sum T.
        token_fields: name -> (T, ...) tensor. ``target_ids`` are the tokens that log-probs are of. In a replay of routes the
            runtime reads ``routed_experts`` and ``routed_experts_mask``; :mod:`rl_backend.contracts.replay` says what they
            hold. Where they are there, ``indexed_keys`` and ``sampling_mask`` are read in every pass.
        sequence_fields: name -> (B, ...) tensor.
        meta: facts that all tokens share. The runtime reads ``temperature`` (a number; a (B,) sequence field of that name
            takes precedence), ``calculate_entropy`` (bool), ``top_log_probs`` (how many of the likeliest tokens the outputs
            have), ``top_p``, ``top_k`` and ``min_p`` (:class:`SamplingCuts`) and, in a replay, ``routed_experts_layers``.
            Losses read
            ``batch_num_tokens`` (the sum of ``loss_mask`` over the whole batch of all ranks), ``global_batch_size`` (its
            sequences; with the sequence field ``episode_share`` its episodes) and ``dp_size``.
        payload: the caller's own micro-batch object. Never read here; a loss adapter can pass it on.
    """

    input_ids: Tensor
    seq_lens: Tensor
    token_fields: Mapping[str, Tensor] = field(default_factory=dict)
    sequence_fields: Mapping[str, Tensor] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)
    payload: Any = None

    def __post_init__(self) -> None:
        tokens = self.input_ids.shape[0] if self.input_ids.dim() == 1 else -1
        if tokens < 1 or self.input_ids.dtype != torch.int64:
            raise BatchError(
                f"input_ids has shape {tuple(self.input_ids.shape)} and dtype {self.input_ids.dtype}; expected (T,) with "
                "T >= 1 and torch.int64"
            )
        lengths = self.seq_lens
        is_vector = lengths.dim() == 1 and lengths.dtype == torch.int64 and lengths.device.type == "cpu"
        if not is_vector or int(lengths.sum()) != tokens or bool((lengths < 1).any()):
            raise BatchError(
                f"seq_lens {lengths.tolist()} must be a (B,) int64 tensor on the CPU, positive, with the sum {tokens}: the "
                "tokens of input_ids"
            )
        _require_rows("token", self.token_fields, tokens)
        _require_targets(self.token_fields)
        _require_rows("sequence", self.sequence_fields, self.num_sequences)
        temperature = self.sequence_fields.get("temperature")
        if temperature is not None and temperature.dim() != 1:
            raise BatchError(
                f"sequence field 'temperature' has shape {tuple(temperature.shape)}; expected ({self.num_sequences},): one "
                "number per sequence",
                name="temperature",
            )

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]

    @property
    def num_sequences(self) -> int:
        return self.seq_lens.shape[0]

    @property
    def device(self) -> torch.device:
        return self.input_ids.device

    @property
    def cu_seqlens(self) -> Tensor:
        """(B + 1,) int32 on the batch's device: where each sequence starts, and T."""
        starts = torch.zeros(self.num_sequences + 1, dtype=torch.int32)
        starts[1:] = self.seq_lens.cumsum(0)
        return starts.to(self.device, non_blocking=True)

    @property
    def position_ids(self) -> Tensor:
        """(T,) int64: each token's position in its own sequence."""
        return torch.cat([torch.arange(length) for length in self.seq_lens.tolist()]).to(self.device, non_blocking=True)

    @property
    def sequence_ids(self) -> Tensor:
        """(T,) int64: which of the B sequences a token is in."""
        return torch.repeat_interleave(torch.arange(self.num_sequences), self.seq_lens).to(self.device, non_blocking=True)

    @property
    def next_ids(self) -> Tensor:
        """(T,) int64: the next token of the same sequence, -100 at each sequence's last position."""
        next_ids = torch.full_like(self.input_ids, -100)
        next_ids[:-1] = self.input_ids[1:]
        next_ids[(self.seq_lens.cumsum(0) - 1).to(self.device, non_blocking=True)] = -100
        return next_ids

    @property
    def labels(self) -> Tensor:
        """(T,) or (T, K) int64: the tokens that log-probs are of, ``target_ids`` or else the next ones; -100 for none."""
        targets = self.token_fields.get(TARGET_IDS)
        return self.next_ids if targets is None else targets

    @property
    def temperature(self) -> Tensor | float:
        """What logits are divided by: a (T,) tensor when it differs by sequence, else a number above 0 (1.0 by default)."""
        if "temperature" in self.sequence_fields:
            return self.sequence_fields["temperature"].to(torch.float32)[self.sequence_ids]
        temperature = float(self.meta.get("temperature", 1.0))
        if not temperature > 0:
            raise BatchError(f"meta['temperature'] is {temperature}; it must be above 0: log-probs of a greedy policy are 0")
        return temperature

    @property
    def cuts(self) -> SamplingCuts | None:
        """What log-probs and entropy are cut to; None where they are of all tokens."""
        defaults = SamplingCuts()
        found = SamplingCuts(*(self.meta.get(name, getattr(defaults, name)) for name in ("top_p", "top_k", "min_p")))
        if not (0 < found.top_p <= 1 and 0 <= found.min_p < 1 and found.top_k >= 0):
            raise BatchError(f"meta has {found}: top_p is above 0 and at most 1, min_p below 1, neither nor top_k negative")
        if found == defaults:
            return None
        if self.labels.dim() > 1:
            raise BatchError(f"meta has {found}, and {TARGET_IDS} several tokens at a position: which is sampled is unknown")
        return found._replace(mask=self.token_fields.get(SAMPLING_MASK))

    @property
    def num_top(self) -> int:
        """How many of the likeliest tokens are wanted after each token; 0 for none."""
        found = self.meta.get("top_log_probs", 0)
        if not isinstance(found, int) or found < 0:
            raise BatchError(f"meta['top_log_probs'] is {found!r}; it is how many of the likeliest tokens are wanted, or 0")
        return found

    def token_field(self, name: str) -> Tensor:
        """Raises :class:`BatchError` that lists what is there when it is missing."""
        if name not in self.token_fields:
            raise BatchError(f"token field {name!r} is missing; the batch has {sorted(self.token_fields)}", name=name)
        return self.token_fields[name]

    def split(self, packed: Tensor) -> tuple[Tensor, ...]:
        """(T, ...) -> B tensors of (L_i, ...)."""
        return torch.split(packed, self.seq_lens.tolist())

    def to(self, device: torch.device | str) -> Self:
        """A copy with every tensor but ``seq_lens`` on ``device``."""

        # A copy to the host that is not waited for could be read before it is there. One from the host that is waited for
        # waits for all that the device has to do.
        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=tensor.device.type == "cpu")

        token_fields = {name: moved(value) for name, value in self.token_fields.items()}
        sequence_fields = {name: moved(value) for name, value in self.sequence_fields.items()}
        return type(self)(moved(self.input_ids), self.seq_lens, token_fields, sequence_fields, self.meta, self.payload)
