"""Log-probabilities and entropy of the next token; logits of the vocabulary stay for the backward pass within a budget."""

import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_backend.contracts import BatchError, ModelOutput, SamplingCuts
from rl_backend.primitive.adapters import ENOUGH_ROWS, HEAD, AdapterRun, Factors, Narrowed, parts_of_head
from rl_backend.primitive.float32 import wide_dtype
from rl_backend.primitive.prefix_tree import take_rows

_TILE_ELEMENTS = {"cpu": 2**21, "cuda": 2**26}
"""Logits of a tile: on a CPU what its cache holds."""
KEPT_BYTES = 2**30
"""Logits of a pass stay for its gradients where they take no more: to compute them again is a quarter of the head's work."""


class LowRank(NamedTuple):
    """What an adapter adds to logits: ``narrow @ wide.T``."""

    narrow: Tensor  # (N, rank)
    wide: Tensor  # (vocabulary, rank), or words of it
    grad_wide: Tensor  # of that shape; what the gradient is added to


class Cut(NamedTuple):
    """The words that a distribution is cut to: those less than ``limit`` below the largest logit."""

    largest: Tensor  # (N, 1), of the whole vocabulary
    limit: Tensor  # (N, 1)

    def at(self, rows: slice | Tensor) -> "Cut":
        return Cut(self.largest[rows], self.limit[rows])

    def leaves_out(self, logits: Tensor, first: int) -> Tensor:
        """Which words of a tile are not among them, bool; word ``first`` of the vocabulary is the tile's first."""
        return self.largest - logits >= self.limit


class Listed(NamedTuple):
    """The words that a distribution is cut to, one by one."""

    ids: Tensor  # (N, K) integers, in the whole vocabulary; -1 is none

    def at(self, rows: slice | Tensor) -> "Listed":
        return Listed(self.ids[rows])

    def leaves_out(self, logits: Tensor, first: int) -> Tensor:
        """As of :class:`Cut`."""
        column, words = self.ids.long() - first, logits.shape[1]
        # What lies in other tiles goes to a column more.
        column = column.where((column >= 0) & (column < words), words)
        return logits.new_ones(len(logits), words + 1, dtype=torch.bool).scatter_(1, column, False)[:, :words]


_CUT = -1e30
"""A logit without a probability. Finite: its product with that is 0."""


class Tokens(NamedTuple):
    """The tokens that take part."""

    hidden: Tensor  # (N, hidden_size)
    labels: Tensor  # (N, K)
    temperature: Tensor | None  # (N, 1); None stands for 1
    start: int  # token of the first row of the weight
    added: LowRank | None = None
    several: bool = False
    bias: Tensor | None = None  # (vocabulary,)
    cut: Cut | Listed | None = None

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
        """The tokens where ``active`` and their positions; ``start`` is the token of the first row of the weight."""
        # On the meta device, which knows no labels, all tokens count.
        positions = torch.arange(len(active), device="meta") if active.is_meta else active.nonzero().squeeze(1)
        if several and 0 < len(positions) < ENOUGH_ROWS:
            # The first again and again: products of fewer rows take another path.
            positions = torch.cat([positions, positions[:1].expand(ENOUGH_ROWS - len(positions))])
        if not isinstance(temperature, Tensor):
            chosen = None if temperature == 1.0 else hidden.new_full((1, 1), temperature, dtype=wide_dtype(hidden.dtype))
            temperatures = None if chosen is None else chosen.expand(positions.shape[0], 1)
        else:
            temperatures = temperature.to(hidden.device, wide_dtype(hidden.dtype))[positions][:, None]
        added = None if added is None else added._replace(narrow=added.narrow[positions])
        return cls(hidden[positions], labels[positions], temperatures, start, added, several), positions

    def chunks(self, size: int) -> list[slice]:
        total = self.hidden.shape[0]
        # Of several adapters' tokens no chunk is short: what is computed of one must not depend on how many others there
        # are.
        return _slices(total, -(-total // -(-total // size)) if self.several and total else size)

    def rows_of_tile(self, size: int) -> int:
        """For which the vocabulary is cut."""
        return size if self.several else min(size, self.hidden.shape[0])


class Tile(NamedTuple):
    """Some tokens by some of the vocabulary: what exists at one time."""

    hidden: Tensor  # (tokens, hidden_size)
    weight: Tensor  # (words, hidden_size)
    column: Tensor  # (tokens, K) int64: the column of each label, 0 where it lies in another tile
    inside: Tensor  # (tokens, K) bool: whether the label lies in this tile
    temperature: Tensor | None  # (tokens, 1)
    added: LowRank | None
    bias: Tensor | None  # (words,)
    cut: Cut | Listed | None
    first: int  # which word of the vocabulary the first of these is

    @classmethod
    def of(cls, tokens: Tokens, chunk: slice, weight: Tensor, words: slice) -> Self:
        first = tokens.start + words.start
        column = tokens.labels[chunk] - first
        inside = (column >= 0) & (column < words.stop - words.start)
        temperature = tokens.temperature[chunk] if tokens.temperature is not None else None
        added = tokens.added
        added = added and LowRank(added.narrow[chunk], added.wide[words], added.grad_wide[words])
        bias = None if tokens.bias is None else tokens.bias[words]
        cut = None if tokens.cut is None else tokens.cut.at(chunk)
        column = column.where(inside, 0)
        return cls(tokens.hidden[chunk], weight[words], column, inside, temperature, added, bias, cut, first)

    def logits(self, buffer: Tensor) -> Tensor:
        out = buffer[: self.hidden.shape[0] * self.weight.shape[0]].view(self.hidden.shape[0], self.weight.shape[0])
        _matmul(self.hidden, self.weight.t(), out)
        if self.added is not None:
            add_matmul(out, self.added.narrow, self.added.wide.t(), beta=1)
        if self.bias is not None:
            out.add_(self.bias)
        out = out if self.temperature is None else out.div_(self.temperature)
        if self.cut is not None:
            is_cut = self.cut.leaves_out(out, self.first)
            # All but the label.
            is_cut.scatter_(1, self.column, is_cut.gather(1, self.column) & ~self.inside)
            out.masked_fill_(is_cut, _CUT)
        return out


def _matmul(a: Tensor, b: Tensor, out: Tensor) -> None:
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
        torch.addmm(out, a, b, beta=beta, out_dtype=out.dtype, out=out)
    else:
        out.addmm_(a.to(out.dtype), b.to(out.dtype), beta=beta)


def buffers_for(tokens: Tokens, weight: Tensor, chunk_tokens: int, count: int) -> list[Tensor]:
    """Memory for the logits of a tile, ``count`` times; every tile uses it again."""
    size = _tile_elements(tokens.rows_of_tile(chunk_tokens), weight.shape[0], weight.device.type)
    return [weight.new_empty(size, dtype=wide_dtype(weight.dtype)) for _ in range(count)]


def vocabulary_slices(tokens: Tokens, weight: Tensor, rows: int) -> list[slice]:
    return _slices(weight.shape[0], _tile_words(tokens.rows_of_tile(rows), weight.device.type))


def logits_chunk_bytes(num_tokens: int, vocab_size: int, chunk_tokens: int, *, calculate_entropy: bool) -> int:
    """Bytes of the logits of :func:`next_token_log_probs` that exist at one time on a GPU, for parameters of 32 bits or
    less; ``vocab_size`` is that of one rank.
    """
    elements = _tile_elements(min(chunk_tokens, num_tokens), vocab_size, "cuda")
    return elements * torch.float32.itemsize * (2 if calculate_entropy else 1)


def kept_logits_bytes(num_tokens: int, num_labels: int, vocab_size: int) -> int:
    """Bytes of logits that stay for the backward pass of :func:`next_token_log_probs`, for parameters of at most 32 bits;
    ``num_labels`` of its tokens have a label.
    """
    of_token = vocab_size * torch.float32.itemsize
    return num_labels * of_token if num_tokens <= _kept_tokens(of_token) else 0


def _kept_tokens(token_bytes: int) -> int:
    """The most tokens of a pass for which logits stay, of so many bytes each."""
    # A rank may have no part of a small vocabulary.
    return KEPT_BYTES // max(token_bytes, 1)


def _tile_elements(rows: int, vocab_size: int, device_type: str) -> int:
    return rows * min(vocab_size, _tile_words(rows, device_type))


def _tile_words(rows: int, device_type: str) -> int:
    elements = _TILE_ELEMENTS.get(device_type, _TILE_ELEMENTS["cuda"])
    return max(elements // max(rows, 1), 256)


def _slices(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


class Kept(NamedTuple):
    """Logits of the forward pass."""

    logits: Tensor  # (tokens of the forward pass, vocabulary)
    rows: Tensor  # (N,): the tokens of the backward pass among them

    def tile(self, chunk: slice, words: slice, buffer: Tensor) -> Tensor:
        rows = self.rows[chunk]
        out = buffer[: len(rows) * (words.stop - words.start)].view(len(rows), -1)
        return torch.index_select(self.logits[:, words], 0, rows, out=out)


class NextTokenGradient(NamedTuple):
    """What the backward pass knows of each active token; all (N, 1), gradients of log-probs (N, K)."""

    log_prob: Tensor
    entropy: Tensor | None
    entropy_value: Tensor
    log_normalizer: Tensor

    def of_logits(self, chunk: slice, tile: Tile, logits: Tensor, buffers: list[Tensor]) -> Tensor:
        """Gradient of the loss with respect to a tile's logits before the division by the temperature; ``logits`` are lost.

        d log p_y / d x_v = [v = y] - p_v and d H / d x_v = -p_v (log p_v + H).
        """
        log_p = logits.sub_(self.log_normalizer[chunk])
        at_label = self.log_prob[chunk].masked_fill(~tile.inside, 0.0)
        grad = self.log_prob[chunk].sum(1, keepdim=True)
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
    tokens: Tokens,
    weight: Tensor,
    gradient: NextTokenGradient,
    chunk_tokens: int,
    wanted: Collection[str],
    kept: Kept | None = None,
) -> HeadGradients:
    dtype = wide_dtype(weight.dtype)
    grad_hidden = torch.zeros_like(tokens.hidden, dtype=dtype) if "hidden" in wanted else None
    grad_weight = torch.empty_like(weight) if "weight" in wanted else None
    bias = tokens.bias if "bias" in wanted else None
    grad_bias = None if bias is None else torch.zeros_like(bias, dtype=wide_dtype(bias.dtype))
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
            logits = tile.logits(buffers[0]) if kept is None else kept.tile(chunk, words, buffers[0])
            exact = gradient.of_logits(chunk, tile, logits, buffers)
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


IGNORE_LABEL = -100
"""Label of a position that predicts nothing."""


class TopTokens(NamedTuple):
    ids: Tensor  # (T, K) int64, the likeliest first
    log_probs: Tensor  # (T, K), without a gradient


class NextToken(NamedTuple):
    log_probs: Tensor  # as the labels, float32 (float64 for float64 inputs); 0 where the label is -100
    entropy: Tensor | None  # (T,) of the same dtype, in nats, or None when it was not asked for; 0 without a label
    top: TopTokens | None = None
    mask_disagreement: Tensor | None = None  # (T,), as of ModelOutput; None without cuts

    def as_output(self, values: Tensor | None = None) -> ModelOutput:
        """With ``values``, of a head of theirs."""
        ids, log_probs = (None, None) if self.top is None else self.top
        return ModelOutput(self.log_probs, self.entropy, values, ids, log_probs, self.mask_disagreement)


class VocabularyShard(NamedTuple):
    """One rank's part of a vocabulary that is split over ranks, in their order."""

    start: int  # first token of this rank's part
    vocab_size: int  # tokens of the whole vocabulary
    largest_over_ranks: Callable[[Tensor], object]  # in place, as the next
    sum_over_ranks: Callable[[Tensor], object]
    gather_over_ranks: Callable[[Tensor], Tensor]  # (N, ...) of each rank -> (ranks * N, ...)


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
    top: int = 0,
    cuts: SamplingCuts | None = None,
    of_rows: Tensor | None = None,
) -> NextToken:
    """``log_softmax((hidden @ weight.T + bias) / temperature)`` at the labels, and the entropy of that softmax.

    A token may have K labels, whose log-probs are taken from the same logits.

    Logits exist for at most ``chunk_tokens`` tokens, and a slice of the vocabulary that fits the cache, at one time. They
    stay for the backward pass where all of them fit :data:`KEPT_BYTES`; else it computes them again, for the tokens
    whose gradient is not zero. Computed in float32 or better. A label of -100 gives 0 and takes no
    gradient; a token without another is not computed.

    With ``shard`` the vocabulary is split over ranks: every rank gets the same results, from one reduction of a
    few numbers per token. The gradient of ``hidden`` is then this rank's part; the sum over the ranks is the caller's.

    Args:
        hidden: (T, hidden_size); the same on every rank of a shard's group.
        weight: (vocab_size, hidden_size), or this rank's rows of it; of the dtype of ``hidden``.
        labels: (T,) or (T, K) int64, in the whole vocabulary.
        bias: (vocab_size,), or this rank's part of it.
        temperature: positive number or (T,) tensor; not differentiated.
        adapters: at work on labels of their own, on a CPU with the bits that each has alone, beside a frozen head. One that
            has :data:`~rl_backend.primitive.adapters.HEAD` adds its product to their logits.
        top: how many of the likeliest tokens are wanted of every row, with a label or not, from a pass of their own; over
            all words.
        cuts: log-probs and entropy are of the distribution over the words that are kept, the label always among them. Up to
            six passes of the head say which these are. With ``mask``, (T, K), they are over its words, and one more pass
            compares them. For one label of each token.
        of_rows: (T,) int64, the row of ``hidden`` that each label is of, perhaps one of several; None for its own.

    Returns:
        log-probs in the shape of ``labels``, entropy (T,), the likeliest tokens (T, top).

    Raises:
        BatchError: a temperature that is not positive, or a label outside the vocabulary (on a CPU, where nothing waits).
    """
    if not isinstance(temperature, Tensor) and not temperature > 0.0:
        raise BatchError(f"temperature={temperature!r}: must be positive", temperature=temperature)
    if labels.device.type == "cpu":
        _check_on_host(labels, weight.shape[0] if shard is None else shard.vocab_size, temperature)
    if of_rows is not None:
        hidden = take_rows(hidden, of_rows)
    found, tops, disagreements = [], list[TopTokens](), list[Tensor]()
    columns = labels if labels.dim() == 2 else labels[:, None]
    kept_tokens = _kept_tokens(weight.shape[0] * wide_dtype(hidden.dtype).itemsize) if torch.is_grad_enabled() else 0
    for rows, run in parts_of_head(adapters, hidden.shape[0]):
        factors = None if run is None else run.modules[HEAD]
        mine, several = hidden[rows], bool(adapters) and factors is None
        narrow = None if run is None or factors is None else Narrowed.apply(mine, run.draw, factors)
        divisor = temperature[rows] if isinstance(temperature, Tensor) else temperature
        asked, start = columns[rows, 0] != IGNORE_LABEL, 0 if shard is None else shard.start
        added = _added(narrow, factors) if top or cuts is not None else None
        select = functools.partial(
            Tokens.select, mine, columns[rows, :1], divisor, start=start, added=added, several=several
        )
        cut: Cut | Listed | None = None
        if top:
            tokens, _ = select(torch.ones_like(asked))
            likeliest = _top_tokens(tokens._replace(bias=bias), weight, chunk_tokens, top, shard)
            # Behind them may be copies of the first.
            tops.append(TopTokens(*(values[: len(asked)] for values in likeliest)))
        if cuts is not None:
            tokens, positions = select(asked)
            tokens = tokens._replace(bias=bias)
            own, differs = cut_of(tokens, weight, chunk_tokens, cuts, shard)
            nothing = differs.new_zeros(len(asked), 1)
            if cuts.mask is None:
                cut = Cut(*(nothing.index_copy(0, positions, values) for values in own))
            else:
                cut = Listed(cuts.mask[rows])
                differs = _disagreement(tokens, weight, chunk_tokens, (own, cut.at(positions)), shard)
            disagreements.append(nothing[:, 0].index_copy(0, positions, differs))
        # By an adapter's own tokens: what is kept must not depend on how many others there are.
        work = _Work(chunk_tokens, calculate_entropy, several, len(mine) <= kept_tokens, cut)
        found.append(_NextTokenLogProbs.apply(mine, weight, columns[rows], divisor, work, shard, narrow, factors, bias))
    log_probs, entropy = found[0] if len(found) == 1 else (torch.cat(values) for values in zip(*found, strict=True))
    joined = TopTokens(*map(torch.cat, zip(*tops, strict=True))) if tops else None
    disagreement = torch.cat(disagreements) if disagreements else None
    return NextToken(log_probs.view_as(labels), entropy if calculate_entropy else None, joined, disagreement)


_COARSE, _STEPS = 2**7, 2**12
"""Below the largest logit words are sorted into steps of 1 / 128, and those of one of them into 4096 finer ones. As many are
told apart as that: what is more than 32 nats below the likeliest word is kept, or cut, together."""


@torch.no_grad()
def cut_of(
    tokens: Tokens, weight: Tensor, chunk_tokens: int, cuts: SamplingCuts, shard: VocabularyShard | None
) -> tuple[Cut, Tensor]:
    """The words that an engine samples from, as vLLM cuts them: ``min_p``, of what is left ``top_k``, of that ``top_p``.

    Exact to steps of 2e-6 nats: words that near each other are kept, or cut, together.

    Returns:
        them, and (N,) float, 1 where the label is not one of them.
    """
    chunks, buffers = tokens.chunks(chunk_tokens), buffers_for(tokens, weight, chunk_tokens, count=1)
    work = _Work(chunk_tokens, calculate_entropy=False, several=tokens.several, keep=False)

    def sums(tokens: Tokens) -> Tensor:
        found = [_sum_over_vocabulary(tokens, chunk, weight, work, buffers, None) for chunk in chunks]
        return torch.cat(found) if found else tokens.hidden.new_empty(0, 4, dtype=wide_dtype(weight.dtype))

    partial = sums(tokens)
    largest = partial[:, :1].clone()
    if shard is not None:
        shard.largest_over_ranks(largest)
    _, label_logits, _ = _finish_sums(partial, shard, False)
    cut = Cut(largest, torch.full_like(largest, torch.inf))
    if cuts.min_p > 0:
        cut = cut._replace(limit=torch.full_like(largest, -math.log(cuts.min_p)))
    # No label is spared yet.
    unlabelled = tokens._replace(labels=torch.full_like(tokens.labels, IGNORE_LABEL))
    if cuts.top_k > 0:
        wanted = torch.full_like(largest, cuts.top_k)
        cut = _cut_at(unlabelled, weight, chunk_tokens, cut, wanted, shard, torch.ones_like)
    if cuts.top_p < 1:
        log_total, _, _ = _finish_sums(sums(unlabelled._replace(cut=cut)), shard, False)
        wanted = (log_total[:, None] - largest).exp_() * cuts.top_p
        cut = _cut_at(unlabelled, weight, chunk_tokens, cut, wanted, shard, _probability)
    return cut, (cut.largest - label_logits >= cut.limit).to(largest.dtype)[:, 0]


def _probability(below: Tensor) -> Tensor:
    return below.neg().exp_()


def _cut_at(
    tokens: Tokens,
    weight: Tensor,
    chunk_tokens: int,
    cut: Cut,
    wanted: Tensor,
    shard: VocabularyShard | None,
    weigh: Callable[[Tensor], Tensor],
) -> Cut:
    """The fewest of the likeliest words, of those in ``cut``, that together weigh ``wanted``; all where none suffice."""
    buffer = buffers_for(tokens, weight, chunk_tokens, count=1)[0]
    slices = vocabulary_slices(tokens, weight, chunk_tokens)

    def limits(chunk: slice) -> Tensor:
        own, least = cut.at(chunk), wanted[chunk]

        def sums(scale: int, step: Tensor | None) -> Tensor:
            """(tokens, _STEPS + 1): what the words weigh that are in each step and above, of one coarse step or of all."""
            weights = least.new_zeros(len(least), _STEPS + 1)
            for words in slices:
                below = own.largest - Tile.of(tokens, chunk, weight, words).logits(buffer)
                counts, place = below < own.limit, (below * scale).floor()
                if step is not None:
                    counts &= (below * _COARSE).floor_() == step
                    place -= step * (scale // _COARSE)
                # Another's NaN must not end the pass.
                place = place.nan_to_num_(_STEPS).clamp_(0, _STEPS)
                weights.scatter_add_(1, place.long(), weigh(below).mul_(counts))
            if shard is not None:
                shard.sum_over_ranks(weights)
            return weights.cumsum_(1)

        coarse = sums(_COARSE, None)
        step = (coarse < least).sum(1, keepdim=True).clamp_(max=_STEPS)
        above = F.pad(coarse, (1, 0)).gather(1, step)
        fine = above + sums(_COARSE * _STEPS, step.to(least.dtype))
        last = step * _STEPS + (fine < least).sum(1, keepdim=True)
        return ((last + 1) / (_COARSE * _STEPS)).to(least.dtype).masked_fill(step == _STEPS, torch.inf)

    found = [limits(chunk) for chunk in tokens.chunks(chunk_tokens)]
    return cut._replace(limit=torch.minimum(cut.limit, torch.cat(found))) if found else cut


@torch.no_grad()
def _disagreement(
    tokens: Tokens, weight: Tensor, chunk_tokens: int, cuts: tuple[Cut, Listed], shard: VocabularyShard | None
) -> Tensor:
    """(N,): of the words that either keeps, the share that only one keeps."""
    buffer = buffers_for(tokens, weight, chunk_tokens, count=1)[0]
    counts = cuts[0].largest.new_zeros(len(tokens.hidden), 2)
    for chunk in tokens.chunks(chunk_tokens):
        both = [cut.at(chunk) for cut in cuts]
        for words in vocabulary_slices(tokens, weight, chunk_tokens):
            tile = Tile.of(tokens, chunk, weight, words)
            logits = tile.logits(buffer)
            kept = ~torch.stack([cut.leaves_out(logits, tile.first) for cut in both])
            counts[chunk] += torch.stack([kept.all(0).sum(1), kept.any(0).sum(1)], dim=1)
    if shard is not None:
        shard.sum_over_ranks(counts)
    return 1 - counts[:, 0] / counts[:, 1]


@torch.no_grad()
def _top_tokens(tokens: Tokens, weight: Tensor, chunk_tokens: int, count: int, shard: VocabularyShard | None) -> TopTokens:
    """The ``count`` likeliest of the whole vocabulary for each of ``tokens``."""
    buffer = buffers_for(tokens, weight, chunk_tokens, count=1)[0]
    found = [_top_of_chunk(tokens, chunk, weight, chunk_tokens, buffer, count) for chunk in tokens.chunks(chunk_tokens)]
    if not found:
        return TopTokens(tokens.labels.new_zeros(0, count), buffer.new_zeros(0, count))
    ids, logits, normalizers = (torch.cat(values) for values in zip(*found, strict=True))
    if shard is not None:
        every_rank = shard.gather_over_ranks
        ids, logits, normalizers = (
            every_rank(values).unflatten(0, (-1, len(values))).transpose(0, 1).flatten(1)
            for values in (ids, logits, normalizers)
        )
        ids, logits = _largest(ids, logits, count)
        normalizers = normalizers.logsumexp(1, keepdim=True)
    return TopTokens(ids, logits - normalizers)


def _top_of_chunk(
    tokens: Tokens, chunk: slice, weight: Tensor, chunk_tokens: int, buffer: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens, count) ids and logits of this rank's words, -inf behind the last, and (tokens, 1) their log-normaliser."""
    shape = chunk.stop - chunk.start, count
    ids, best = tokens.labels.new_zeros(shape), buffer.new_full(shape, -torch.inf)
    normalizer = best[:, :1]
    for words in vocabulary_slices(tokens, weight, chunk_tokens):
        logits = Tile.of(tokens, chunk, weight, words).logits(buffer)
        normalizer = torch.logaddexp(normalizer, logits.logsumexp(1, keepdim=True))
        values, columns = logits.topk(min(count, logits.shape[1]))
        columns += tokens.start + words.start
        ids, best = _largest(torch.cat([ids, columns], 1), torch.cat([best, values], 1), count)
    return ids, best, normalizer


def _largest(ids: Tensor, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    values, places = logits.topk(count)
    return ids.gather(1, places), values


def _check_on_host(labels: Tensor, vocab_size: int, temperature: Tensor | float) -> None:
    largest = int(labels.max())
    smallest = int(labels.masked_fill(labels == IGNORE_LABEL, 0).min())
    if largest >= vocab_size or smallest < 0:
        raise BatchError(f"labels reach from {smallest} to {largest}; the vocabulary has {vocab_size} tokens")
    if isinstance(temperature, Tensor) and not bool((temperature > 0).all()):
        raise BatchError(f"temperature has a value of {float(temperature.min())}: each must be positive")


class _Work(NamedTuple):
    chunk_tokens: int
    calculate_entropy: bool
    several: bool  # tokens of several adapters, whose bits no other decides
    keep: bool  # the logits for the backward pass
    cut: Cut | Listed | None = None


class _NextTokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperature: Tensor | float,
        work: _Work,
        shard: VocabularyShard | None,
        narrow: Tensor | None,
        factors: Factors | None,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        start = 0 if shard is None else shard.start
        added, active = _added(narrow, factors), (labels != IGNORE_LABEL).any(1)
        tokens, positions = Tokens.select(hidden, labels, temperature, active, start, added, several=work.several)
        tokens = tokens._replace(bias=bias, cut=work.cut and work.cut.at(positions))
        dtype, rows, kept = wide_dtype(hidden.dtype), None, None
        if work.keep and any(ctx.needs_input_grad):
            kept = hidden.new_empty((len(positions), weight.shape[0]), dtype=dtype)
            rows = positions.new_zeros(hidden.shape[0])
            rows[positions] = torch.arange(len(positions), device=positions.device)
        buffers = buffers_for(tokens, weight, work.chunk_tokens, count=2 if work.calculate_entropy else 1)
        sums = [
            _sum_over_vocabulary(tokens, chunk, weight, work, buffers, kept) for chunk in tokens.chunks(work.chunk_tokens)
        ]
        partial = torch.cat(sums) if sums else hidden.new_empty((0, 3 + labels.shape[1]), dtype=dtype)
        log_normalizers, label_logits, entropies = _finish_sums(partial, shard, work.calculate_entropy)

        def spread(values: Tensor) -> Tensor:
            return hidden.new_zeros((hidden.shape[0], *values.shape[1:]), dtype=dtype).index_copy_(0, positions, values)

        entropy = spread(entropies)
        ctx.save_for_backward(hidden, weight, labels, spread(log_normalizers), entropy, narrow, bias, kept, rows)
        ctx.temperature, ctx.work, ctx.shard, ctx.factors = temperature, work, shard, factors
        if not work.calculate_entropy:
            ctx.mark_non_differentiable(entropy)
        # An entropy that is a metric alone has no gradient, and costs nothing in the backward pass.
        ctx.set_materialize_grads(False)
        log_probs = label_logits - log_normalizers[:, None]
        return spread(log_probs.masked_fill_(labels[positions] == IGNORE_LABEL, 0.0)), entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, log_normalizers, entropy, narrow, bias, logits, rows = ctx.saved_tensors
        ignored = labels == IGNORE_LABEL
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(labels, dtype=log_normalizers.dtype)
        grad_log_probs = grad_log_probs.masked_fill(ignored, 0.0)
        active = (grad_log_probs != 0).any(1)
        if grad_entropy is not None:
            active |= (grad_entropy != 0) & ~ignored.all(1)
        start = 0 if ctx.shard is None else ctx.shard.start
        added = _added(narrow, ctx.factors)
        tokens, positions = Tokens.select(hidden, labels, ctx.temperature, active, start, added, several=ctx.work.several)
        tokens = tokens._replace(bias=bias, cut=ctx.work.cut and ctx.work.cut.at(positions))
        gradient = NextTokenGradient(
            grad_log_probs[positions],
            None if grad_entropy is None else grad_entropy[positions][:, None],
            entropy[positions][:, None],
            log_normalizers[positions][:, None],
        )
        places = {"hidden": 0, "weight": 1, "bias": -1}
        wanted = [name for name, place in places.items() if ctx.needs_input_grad[place]]
        kept = None if logits is None else Kept(logits, rows[positions])
        found = gradients_of(tokens, weight, gradient, ctx.work.chunk_tokens, wanted, kept)

        def spread(values: Tensor | None, like: Tensor) -> Tensor | None:
            return None if values is None else torch.zeros_like(like).index_copy_(0, positions, values.to(like.dtype))

        return (
            spread(found.hidden, hidden),
            found.weight,
            *(None,) * 4,
            spread(found.narrow, narrow),
            None,
            found.bias,
        )


def _added(narrow: Tensor | None, factors: Factors | None) -> LowRank | None:
    return None if narrow is None or factors is None else LowRank(narrow, factors.b.to(narrow.dtype), factors.grad_b)


def _sum_over_vocabulary(
    tokens: Tokens, chunk: slice, weight: Tensor, work: _Work, buffers: list[Tensor], kept: Tensor | None
) -> Tensor:
    """(tokens, 3 + K): m, s, u and the logits of the labels, where m is the largest logit, s = sum exp(x - m) and u = sum
    exp(x - m) (x - m). ``kept`` gets the logits.
    """
    largest = tokens.hidden.new_full((chunk.stop - chunk.start, 1), -torch.inf, dtype=wide_dtype(tokens.hidden.dtype))
    total, weighted = torch.zeros_like(largest), torch.zeros_like(largest)
    label_logits = largest.new_zeros(chunk.stop - chunk.start, tokens.labels.shape[1])
    for words in vocabulary_slices(tokens, weight, work.chunk_tokens):
        tile = Tile.of(tokens, chunk, weight, words)
        logits = tile.logits(buffers[0])
        if kept is not None:
            kept[chunk, words] = logits
        label_logits += logits.gather(1, tile.column).masked_fill_(~tile.inside, 0.0)
        # What has been added up for a smaller maximum is scaled down to the new one, so that no exponential overflows.
        previous, largest = largest, torch.maximum(largest, logits.amax(1, keepdim=True))
        shift = previous - largest
        scale = shift.exp()
        logits.sub_(largest)
        if work.calculate_entropy:
            weights = torch.exp(logits, out=buffers[1][: logits.numel()].view_as(logits))
            weighted = (_shifted(weighted, total, shift) * scale).addcmul_(
                logits.mul_(weights).sum(1, keepdim=True), torch.ones_like(scale)
            )
        else:
            weights = logits.exp_()
        total = (total * scale).add_(weights.sum(1, keepdim=True))
    return torch.cat([largest, total, weighted, label_logits], dim=1)


def _finish_sums(partial: Tensor, shard: VocabularyShard | None, calculate_entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Log-normaliser, logits of the labels (N, K) and entropy: log Z = m + log s, the entropy is log s - u / s."""
    largest, total, weighted, *label_logits = partial.unbind(1)
    if shard is not None:
        # Each rank's sums refer to its own maximum; scaled to the one of all ranks they can be added up.
        here, largest = largest, largest.clone()
        shard.largest_over_ranks(largest)
        shift = here - largest
        scale = shift.exp()
        sums = torch.stack([total * scale, _shifted(weighted, total, shift) * scale, *label_logits])
        shard.sum_over_ranks(sums)
        total, weighted, *label_logits = sums
    log_total = total.log()
    entropy = log_total - weighted / total if calculate_entropy else torch.zeros_like(total)
    return largest + log_total, torch.stack(label_logits, dim=1), entropy


def _shifted(weighted: Tensor, total: Tensor, shift: Tensor) -> Tensor:
    """u for a maximum that is larger by ``-shift``, before the common factor; 0 where nothing has been added up yet."""
    return torch.where(total > 0, weighted + total * shift, 0.0)
