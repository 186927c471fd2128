"""Tiles of logits: some tokens by some of the vocabulary, in memory that every tile uses again.

The gradient of next-token log-probs and entropy is computed from them too, from logits that are computed again.
"""

from collections.abc import Collection
from typing import NamedTuple, Self

import torch
from torch import Tensor

from rl_backend.primitive.adapted_layers import ENOUGH_ROWS

_TILE_ELEMENTS = {"cpu": 2**21, "cuda": 2**26}
"""Logits of a tile: on a CPU what its cache holds."""


class LowRank(NamedTuple):
    """What an adapter adds to logits: ``narrow @ wide.T``."""

    narrow: Tensor  # (N, rank)
    wide: Tensor  # (vocabulary, rank), or words of it
    grad_wide: Tensor  # of that shape; what the gradient is added to


class Tokens(NamedTuple):
    """The tokens that take part.

    Where they are ``several`` adapters', vocabulary and tokens are cut so that what is computed of one does not depend on
    how many others there are.
    """

    hidden: Tensor  # (N, hidden_size)
    labels: Tensor  # (N,)
    temperature: Tensor | None  # (N, 1); None stands for 1
    start: int  # token of the first row of the weight
    added: LowRank | None = None
    several: bool = False
    bias: Tensor | None = None  # (vocabulary,)

    @classmethod
    def select(
        cls,
        hidden: Tensor,
        labels: Tensor,
        temperature: Tensor | float,
        active: Tensor,
        start: int,
        added: LowRank | None = None,
        *,
        several: bool = False,
    ) -> tuple[Self, Tensor]:
        """The tokens where ``active`` and their positions; the first several times where ``several`` have few.

        Args:
            start: token of the first row of the weight.
        """
        # On the meta device, which knows no labels, all tokens count.
        positions = torch.arange(len(active), device="meta") if active.is_meta else active.nonzero().squeeze(1)
        if several and 0 < len(positions) < ENOUGH_ROWS:
            positions = torch.cat([positions, positions[:1].expand(ENOUGH_ROWS - len(positions))])
        if not isinstance(temperature, Tensor):
            chosen = None if temperature == 1.0 else hidden.new_full((1, 1), temperature, dtype=wide(hidden.dtype))
            temperatures = None if chosen is None else chosen.expand(positions.shape[0], 1)
        else:
            temperatures = temperature.to(hidden.device, wide(hidden.dtype))[positions][:, None]
        added = None if added is None else added._replace(narrow=added.narrow[positions])
        return cls(hidden[positions], labels[positions], temperatures, start, added, several), positions

    def chunks(self, size: int) -> list[slice]:
        """Of at most ``size`` tokens; where they are ``several`` adapters', as equal as can be, so that none is short."""
        total = self.hidden.shape[0]
        return _slices(total, -(-total // -(-total // size)) if self.several and total else size)

    def rows_of_tile(self, size: int) -> int:
        """For which the vocabulary is cut."""
        return size if self.several else min(size, self.hidden.shape[0])


class Tile(NamedTuple):
    """Some tokens by some of the vocabulary: what exists at one time."""

    hidden: Tensor  # (tokens, hidden_size)
    weight: Tensor  # (words, hidden_size)
    column: Tensor  # (tokens, 1) int64: the label's column, 0 where it lies in another tile
    inside: Tensor  # (tokens,) bool: whether the label lies in this tile
    temperature: Tensor | None  # (tokens, 1)
    added: LowRank | None
    bias: Tensor | None  # (words,)

    @classmethod
    def of(cls, tokens: Tokens, chunk: slice, weight: Tensor, words: slice) -> Self:
        column = tokens.labels[chunk] - (tokens.start + words.start)
        inside = (column >= 0) & (column < words.stop - words.start)
        temperature = tokens.temperature[chunk] if tokens.temperature is not None else None
        added = tokens.added
        added = added and LowRank(added.narrow[chunk], added.wide[words], added.grad_wide[words])
        bias = None if tokens.bias is None else tokens.bias[words]
        return cls(tokens.hidden[chunk], weight[words], column.where(inside, 0)[:, None], inside, temperature, added, bias)

    def logits(self, buffer: Tensor) -> Tensor:
        out = buffer[: self.hidden.shape[0] * self.weight.shape[0]].view(self.hidden.shape[0], self.weight.shape[0])
        _matmul(self.hidden, self.weight.t(), out)
        if self.added is not None:
            add_matmul(out, self.added.narrow, self.added.wide.t(), beta=1)
        if self.bias is not None:
            out.add_(self.bias)
        return out if self.temperature is None else out.div_(self.temperature)


def _matmul(a: Tensor, b: Tensor, out: Tensor) -> None:
    """``a @ b`` into ``out``, which may be wider than the factors."""
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    elif a.is_cuda:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


def add_matmul(out: Tensor, a: Tensor, b: Tensor, *, beta: int) -> None:
    """``out = beta * out + a @ b``, accumulated in the dtype of ``out``."""
    if a.dtype == out.dtype:
        out.addmm_(a, b, beta=beta)
    elif a.is_cuda:
        product = torch.mm(a, b, out_dtype=out.dtype)
        out.copy_(product) if beta == 0 else out.add_(product)
    else:
        out.addmm_(a.to(out.dtype), b.to(out.dtype), beta=beta)


def buffers_for(tokens: Tokens, weight: Tensor, chunk_tokens: int, count: int) -> list[Tensor]:
    """Memory for the logits of a tile, ``count`` times; every tile uses it again."""
    size = _tile_elements(tokens.rows_of_tile(chunk_tokens), weight.shape[0], weight.device.type)
    return [weight.new_empty(size, dtype=wide(weight.dtype)) for _ in range(count)]


def vocabulary_slices(tokens: Tokens, weight: Tensor, rows: int) -> list[slice]:
    """The vocabulary in slices whose logits, for ``rows`` tokens, the cache holds."""
    return _slices(weight.shape[0], _tile_words(tokens.rows_of_tile(rows), weight.device.type))


def logits_chunk_bytes(num_tokens: int, vocab_size: int, chunk_tokens: int, *, calculate_entropy: bool) -> int:
    """Bytes of the logits that exist at one time on a GPU, for parameters of 32 bits or less.

    See :func:`~rl_backend.primitive.log_prob.next_token_log_probs`.

    Args:
        vocab_size: rows of the weight on one rank.
    """
    elements = _tile_elements(min(chunk_tokens, num_tokens), vocab_size, "cuda")
    return elements * torch.float32.itemsize * (2 if calculate_entropy else 1)


def _tile_elements(rows: int, vocab_size: int, device_type: str) -> int:
    return rows * min(vocab_size, _tile_words(rows, device_type))


def _tile_words(rows: int, device_type: str) -> int:
    elements = _TILE_ELEMENTS.get(device_type, _TILE_ELEMENTS["cuda"])
    return max(elements // max(rows, 1), 256)


def _slices(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums over the vocabulary are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class NextTokenGradient(NamedTuple):
    """What the backward pass knows of each active token; all (N, 1)."""

    log_prob: Tensor
    entropy: Tensor | None
    entropy_value: Tensor
    log_normalizer: Tensor

    def of_logits(self, chunk: slice, tile: Tile, buffers: list[Tensor]) -> Tensor:
        """Gradient of the loss with respect to a tile's logits before the division by the temperature.

        d log p_y / d x_v = [v = y] - p_v and d H / d x_v = -p_v (log p_v + H).
        """
        log_p = tile.logits(buffers[0]).sub_(self.log_normalizer[chunk])
        grad = self.log_prob[chunk]
        at_label = grad.masked_fill(~tile.inside[:, None], 0.0)
        if self.entropy is None:
            result = log_p.exp_().mul_(-grad)
        else:
            grad_entropy = self.entropy[chunk]
            result = torch.exp(log_p, out=buffers[1][: log_p.numel()].view_as(log_p))
            # A probability of 0 has no entropy gradient, though its logarithm may be -inf.
            log_p.masked_fill_(result == 0, 0.0)
            result.mul_(log_p.mul_(-grad_entropy).sub_(grad + grad_entropy * self.entropy_value[chunk]))
        result.scatter_add_(1, tile.column, at_label)
        return result if tile.temperature is None else result.div_(tile.temperature)


class HeadGradients(NamedTuple):
    """Gradients of what logits are made of; None for those that nobody asked for."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    narrow: Tensor | None  # of what an adapter adds


def gradients_of(
    tokens: Tokens, weight: Tensor, gradient: NextTokenGradient, chunk_tokens: int, wanted: Collection[str]
) -> HeadGradients:
    """The gradients of ``wanted`` (``hidden``, ``weight``, ``bias``), and of an adapter if there is one."""
    dtype = wide(weight.dtype)
    grad_hidden = torch.zeros_like(tokens.hidden, dtype=dtype) if "hidden" in wanted else None
    grad_weight = torch.empty_like(weight) if "weight" in wanted else None
    bias = tokens.bias if "bias" in wanted else None
    grad_bias = None if bias is None else torch.zeros_like(bias, dtype=wide(bias.dtype))
    grad_narrow = None if tokens.added is None else torch.zeros_like(tokens.added.narrow, dtype=dtype)
    chunks = tokens.chunks(chunk_tokens)
    if not chunks and grad_weight is not None:
        grad_weight.zero_()
    buffers = buffers_for(tokens, weight, chunk_tokens, count=1 if gradient.entropy is None else 2)
    for words in vocabulary_slices(tokens, weight, chunk_tokens) if chunks else ():
        own = None if grad_weight is None else grad_weight[words]
        # Sums over chunks are computed in the wide dtype and rounded once.
        target = own if own is None or own.dtype == dtype else torch.empty_like(own, dtype=dtype)
        for chunk in chunks:
            tile = Tile.of(tokens, chunk, weight, words)
            exact = gradient.of_logits(chunk, tile, buffers)
            if grad_bias is not None:
                grad_bias[words] += exact.sum(0)
            grad_logits = exact.to(weight.dtype)
            if grad_hidden is not None:
                add_matmul(grad_hidden[chunk], grad_logits, tile.weight, beta=1)
            if target is not None:
                add_matmul(target, grad_logits.t(), tile.hidden, beta=0 if chunk.start == 0 else 1)
            if tile.added is not None and grad_narrow is not None:
                add_matmul(grad_narrow[chunk], grad_logits, tile.added.wide, beta=1)
                add_matmul(tile.added.grad_wide, grad_logits.t(), tile.added.narrow, beta=1)
        if own is not None and target is not None and target is not own:
            own.copy_(target)
    rounded = None if bias is None or grad_bias is None else grad_bias.to(bias.dtype)
    return HeadGradients(grad_hidden, grad_weight, rounded, grad_narrow)
