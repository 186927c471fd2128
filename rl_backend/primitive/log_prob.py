"""Log-probabilities and entropy of the next token, without ever keeping full-vocabulary logits for the backward pass."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_backend.contracts import BatchError
from rl_backend.primitive.adapted_layers import HEAD, Narrowed, parts_of_head
from rl_backend.primitive.adapter_runs import AdapterRun, Factors
from rl_backend.primitive.tiles import (
    LowRank,
    NextTokenGradient,
    Tile,
    Tokens,
    buffers_for,
    gradients_of,
    vocabulary_slices,
    wide,
)

IGNORE_LABEL = -100
"""Label of a position that predicts nothing."""


class NextToken(NamedTuple):
    """Attributes:
    log_probs: (T,) float32 (float64 for float64 inputs); 0 where the label is -100.
    entropy: the same shape and dtype, in nats, or None when it was not asked for.
    """

    log_probs: Tensor
    entropy: Tensor | None


class VocabularyShard(NamedTuple):
    """One rank's part of a vocabulary that is split over ranks, in their order.

    Attributes:
        start: first token of this rank's part.
        vocab_size: tokens of the whole vocabulary.
        largest_over_ranks, sum_over_ranks: reduce a tensor over all ranks of the split, in place.
    """

    start: int
    vocab_size: int
    largest_over_ranks: Callable[[Tensor], object]
    sum_over_ranks: Callable[[Tensor], object]


def next_token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: Tensor | float = 1.0,
    chunk_tokens: int = 1024,
    calculate_entropy: bool = False,
    shard: VocabularyShard | None = None,
    adapters: Sequence[AdapterRun] = (),
) -> NextToken:
    """``log_softmax((hidden @ weight.T + bias) / temperature)`` at the labels, and the entropy of that softmax.

    Logits exist for at most ``chunk_tokens`` tokens, and a slice of the vocabulary that fits the cache, at one time; the
    backward pass computes them again, for the tokens whose gradient is not zero. The softmax is computed in float32 or
    better. Positions with label -100 give 0, take no gradient and are not computed.

    With ``shard`` the vocabulary is split over ranks: every rank gets the same results, from one reduction of four numbers
    per token. The gradient of ``hidden`` is then this rank's part; the sum over the ranks is the caller's.

    Args:
        hidden: (T, hidden_size); the same on every rank of a shard's group.
        weight: (vocab_size, hidden_size), or this rank's rows of it; of the dtype of ``hidden``.
        labels: (T,) int64, in the whole vocabulary.
        bias: (vocab_size,), or this rank's part of it.
        temperature: positive number or (T,) tensor; not differentiated.
        adapters: at work on rows of their own. What each gives does not depend on the others: on a CPU to the last bit. One
            that has :data:`~rl_backend.primitive.adapted_layers.HEAD` adds its product to the logits of its rows.

    Raises:
        BatchError: a temperature that is not positive, or a label outside the vocabulary (checked on a CPU only, where it
            does not wait for a device).
    """
    if not isinstance(temperature, Tensor) and not temperature > 0.0:
        raise BatchError(f"temperature={temperature!r}: must be positive", temperature=temperature)
    if labels.device.type == "cpu":
        _check_on_host(labels, weight.shape[0] if shard is None else shard.vocab_size, temperature)
    found = []
    for rows, run in parts_of_head(adapters, hidden.shape[0]):
        factors = None if run is None else run.modules[HEAD]
        found.append(
            _NextTokenLogProbs.apply(
                hidden[rows],
                weight,
                labels[rows],
                temperature[rows] if isinstance(temperature, Tensor) else temperature,
                chunk_tokens,
                calculate_entropy,
                shard,
                None if run is None or factors is None else Narrowed.apply(hidden[rows], run.draw, factors),
                factors,
                bool(adapters) and factors is None,
                bias,
            )
        )
    log_probs, entropy = found[0] if len(found) == 1 else (torch.cat(values) for values in zip(*found, strict=True))
    return NextToken(log_probs, entropy if calculate_entropy else None)


def _check_on_host(labels: Tensor, vocab_size: int, temperature: Tensor | float) -> None:
    largest = int(labels.max())
    smallest = int(labels.masked_fill(labels == IGNORE_LABEL, 0).min())
    if largest >= vocab_size or smallest < 0:
        raise BatchError(f"labels reach from {smallest} to {largest}; the vocabulary has {vocab_size} tokens")
    if isinstance(temperature, Tensor) and not bool((temperature > 0).all()):
        raise BatchError(f"temperature has a value of {float(temperature.min())}: each must be positive")


class _NextTokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperature: Tensor | float,
        chunk_tokens: int,
        calculate_entropy: bool,
        shard: VocabularyShard | None,
        narrow: Tensor | None,
        factors: Factors | None,
        several: bool,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        start = 0 if shard is None else shard.start
        added, active = _added(narrow, factors), labels != IGNORE_LABEL
        tokens, positions = Tokens.select(hidden, labels, temperature, active, start, added, several=several)
        tokens = tokens._replace(bias=bias)
        dtype = wide(hidden.dtype)
        buffers = buffers_for(tokens, weight, chunk_tokens, count=2 if calculate_entropy else 1)
        sums = [
            _sum_over_vocabulary(tokens, chunk, weight, chunk_tokens, buffers, calculate_entropy)
            for chunk in tokens.chunks(chunk_tokens)
        ]
        partial = torch.cat(sums) if sums else hidden.new_empty((0, 4), dtype=dtype)
        log_normalizers, label_logits, entropies = _finish_sums(partial, shard, calculate_entropy)

        def spread(values: Tensor) -> Tensor:
            return hidden.new_zeros(hidden.shape[0], dtype=dtype).index_copy_(0, positions, values)

        entropy = spread(entropies)
        ctx.save_for_backward(hidden, weight, labels, spread(log_normalizers), entropy, narrow, bias)
        ctx.temperature, ctx.chunk_tokens, ctx.calculate_entropy = temperature, chunk_tokens, calculate_entropy
        ctx.shard, ctx.factors, ctx.several = shard, factors, several
        if not calculate_entropy:
            ctx.mark_non_differentiable(entropy)
        return spread(label_logits - log_normalizers), entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, log_normalizers, entropy, narrow, bias = ctx.saved_tensors
        active = grad_log_probs != 0
        if ctx.calculate_entropy:
            active |= grad_entropy != 0
        active &= labels != IGNORE_LABEL
        start = 0 if ctx.shard is None else ctx.shard.start
        added = _added(narrow, ctx.factors)
        tokens, positions = Tokens.select(hidden, labels, ctx.temperature, active, start, added, several=ctx.several)
        tokens = tokens._replace(bias=bias)
        gradient = NextTokenGradient(
            grad_log_probs[positions][:, None],
            grad_entropy[positions][:, None] if ctx.calculate_entropy else None,
            entropy[positions][:, None],
            log_normalizers[positions][:, None],
        )
        places = {"hidden": 0, "weight": 1, "bias": -1}
        wanted = [name for name, place in places.items() if ctx.needs_input_grad[place]]
        found = gradients_of(tokens, weight, gradient, ctx.chunk_tokens, wanted)

        def spread(values: Tensor | None, like: Tensor) -> Tensor | None:
            return None if values is None else torch.zeros_like(like).index_copy_(0, positions, values.to(like.dtype))

        return (
            spread(found.hidden, hidden),
            found.weight,
            *(None,) * 5,
            spread(found.narrow, narrow),
            None,
            None,
            found.bias,
        )


def _added(narrow: Tensor | None, factors: Factors | None) -> LowRank | None:
    return None if narrow is None or factors is None else LowRank(narrow, factors.b.to(narrow.dtype), factors.grad_b)


def _sum_over_vocabulary(
    tokens: Tokens, chunk: slice, weight: Tensor, chunk_tokens: int, buffers: list[Tensor], calculate_entropy: bool
) -> Tensor:
    """(tokens, 4): m, s, u and the logit of the label of one chunk, in one pass over this rank's vocabulary.

    m is the largest logit so far, s = sum exp(x - m) and u = sum exp(x - m) (x - m).
    """
    largest = tokens.hidden.new_full((chunk.stop - chunk.start, 1), -torch.inf, dtype=wide(tokens.hidden.dtype))
    total, weighted, label_logits = (torch.zeros_like(largest) for _ in range(3))
    for words in vocabulary_slices(tokens, weight, chunk_tokens):
        tile = Tile.of(tokens, chunk, weight, words)
        logits = tile.logits(buffers[0])
        label_logits += logits.gather(1, tile.column).masked_fill_(~tile.inside[:, None], 0.0)
        # What has been added up for a smaller maximum is scaled down to the new one, so that no exponential overflows.
        previous, largest = largest, torch.maximum(largest, logits.amax(1, keepdim=True))
        shift = previous - largest
        scale = shift.exp()
        logits.sub_(largest)
        if calculate_entropy:
            weights = torch.exp(logits, out=buffers[1][: logits.numel()].view_as(logits))
            weighted = (_shifted(weighted, total, shift) * scale).addcmul_(
                logits.mul_(weights).sum(1, keepdim=True), torch.ones_like(scale)
            )
        else:
            weights = logits.exp_()
        total = (total * scale).add_(weights.sum(1, keepdim=True))
    return torch.cat([largest, total, weighted, label_logits], dim=1)


def _finish_sums(partial: Tensor, shard: VocabularyShard | None, calculate_entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Log-normaliser, logit of the label and entropy: log Z = m + log s, the entropy is log s - u / s."""
    largest, total, weighted, label_logits = partial.unbind(1)
    if shard is not None:
        # Each rank's sums refer to its own maximum; scaled to the one of all ranks they can be added up.
        here, largest = largest, largest.clone()
        shard.largest_over_ranks(largest)
        shift = here - largest
        scale = shift.exp()
        sums = torch.stack([total * scale, _shifted(weighted, total, shift) * scale, label_logits])
        shard.sum_over_ranks(sums)
        total, weighted, label_logits = sums
    log_total = total.log()
    entropy = log_total - weighted / total if calculate_entropy else torch.zeros_like(total)
    return largest + log_total, label_logits, entropy


def _shifted(weighted: Tensor, total: Tensor, shift: Tensor) -> Tensor:
    """u for a maximum that is larger by ``-shift``, before the common factor; 0 where nothing has been added up yet."""
    return torch.where(total > 0, weighted + total * shift, 0.0)
