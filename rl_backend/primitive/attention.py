"""Causal attention over packed sequences that never see each other."""

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, groupby
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_backend.primitive.cpu_attention import cpu_attention
from rl_backend.primitive.prefix_tree import PrefixTree, take_rows

_WINDOWED_BLOCK = 512

type Attend = Callable[[Tensor, Tensor, Tensor, Segments, int | None, Tensor | None], Tensor]
"""(query, key, value, segments, window, sinks) -> (N, heads, value_dim), from the keys of this rank's own tokens."""


class Segments(NamedTuple):
    """The runs of queries in a packed micro-batch, and the keys that belong to each: queries are the last tokens of its
    keys.

    A whole sequence is one. With context parallelism a rank has the queries of some chunks of a sequence, and the keys up
    to the end of each chunk. Lengths are numbers, so that no kernel launch waits for the device.
    """

    query_lens: tuple[int, ...]  # S lengths
    key_lens: tuple[int, ...]  # S lengths, none below those of the queries
    cu_queries: Tensor  # (S + 1,) int32 on the model's device, where each segment starts
    cu_keys: Tensor  # the same of the keys
    key_index: Tensor | None = None  # int64, the segments' rows among the keys of all ranks; None for rows of queries
    tree: PrefixTree | None = None  # whose runs the segments are; key_index is then of this rank's own rows

    @classmethod
    def of_sequences(cls, cu_seqlens: Tensor, seq_lens: Sequence[int]) -> Self:
        """Of B whole sequences with the ``seq_lens`` that ``cu_seqlens``, (B + 1,) int32, adds up."""
        lengths = tuple(seq_lens)
        return cls(lengths, lengths, cu_seqlens, cu_seqlens)

    @classmethod
    def of_tree(cls, tree: PrefixTree, device: torch.device | None = None) -> Self:
        """Each run of ``tree`` with the keys of its whole path."""
        lens = tree.lengths, tree.key_lens
        on_host = [torch.tensor((0, *accumulate(each)), dtype=torch.int32) for each in lens]
        queries, keys, rows = (each.to(device, non_blocking=True) for each in (*on_host, tree.key_rows))
        return cls(*lens, queries, keys, rows, tree)

    def hidden(self) -> Self:
        """For compiled code, of which every other number that it reads makes another: of the lengths it has the longest, and
        only where a kernel is launched with it; of a tree it has that there is one.
        """
        longest = [(max(lens),) if self.cu_queries.is_cuda else () for lens in (self.query_lens, self.key_lens)]
        tree = None if self.tree is None else PrefixTree((), (), ())
        return self._replace(query_lens=longest[0], key_lens=longest[1], tree=tree)

    def some(self, indices: Sequence[int]) -> Self:
        """Of the segments with these numbers, each with its own keys."""
        # Made on the device, so that nothing waits for it.
        starts: list[Tensor] = []
        for boundaries in (self.cu_queries, self.cu_keys):
            lengths = boundaries.diff()
            chosen = torch.cat([lengths[index : index + 1] for index in indices])
            starts.append(F.pad(chosen.cumsum(0, dtype=boundaries.dtype), (1, 0)))
        query_lens, key_lens = (tuple(each[index] for index in indices) for each in (self.query_lens, self.key_lens))
        queries, keys = starts
        return type(self)(query_lens, key_lens, queries, keys)


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, window: int | None = None, sinks: Tensor | None = None
) -> Tensor:
    """Softmax attention, causal inside each segment, scaled by ``head_dim ** -0.5``; no sequence is ever padded.

    A query sees the keys of its segment up to its own: the causal mask is aligned to the last query and the last key.
    bfloat16 and float16 on CUDA take the variable-length flash kernel, a CPU takes its own; everything else takes SDPA for
    each run of neighbouring segments of equal length, with sinks block by block with a mask.

    Args:
        query: (N, heads, head_dim), where N is the sum of ``segments.query_lens``.
        key, value: (M, kv_heads, head_dim) and (M, kv_heads, value_dim), where M is the sum of ``segments.key_lens``;
            ``heads`` is a multiple of ``kv_heads`` (grouped-query attention).
            With ``segments.tree`` both are (N, ...), of the rows that the queries are of, and gathered here where the form
            needs it: that of a CPU does not.
        window: tokens that a token sees, itself included; None for all before it (sliding windows as in Mistral 7B, arXiv
            2310.06825).
        sinks: (heads,), one more score for each query of a head, of a key whose value is 0 (as in gpt-oss, arXiv
            2508.10925). They have gradients.

    Returns:
        (N, heads, value_dim)
    """
    if query.is_cpu and (window is None or window >= max(segments.key_lens)):
        has_tree = segments.tree is not None
        return cpu_attention(query, key, value, segments.cu_queries, segments.cu_keys, sinks, tree=has_tree)
    key, value, segments = _with_own_keys(key, value, segments)
    if query.is_meta:
        longest, seen = min(max(segments.query_lens), _WINDOWED_BLOCK), max(segments.key_lens)
        seen = seen if window is None else min(seen, window + _WINDOWED_BLOCK)
        lengths = zip(segments.query_lens, segments.key_lens, strict=True)
        pairs = query.shape[1] * sum(_pairs(keys, window) - _pairs(keys - own, window) for own, keys in lengths)
        on_meta: Tensor = _MetaAttention.apply(query, key, value, sinks, longest * (seen + 1), pairs)
        return on_meta
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and sinks is None:
        return varlen_attention(query, key, value, segments, window)
    if window is None:
        lens = segments.query_lens, segments.key_lens
        if sinks is None:
            return _by_runs(query, key, value, *lens)
        return windowed_attention(query, key, value, *lens, max(segments.key_lens), sinks)

    def attend(fits: bool, part: Segments, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if fits:
            return packed_attention(q, k, v, part, None, sinks)
        return windowed_attention(q, k, v, part.query_lens, part.key_lens, window, sinks)

    # Only segments with more keys than the window pay for it.
    return attend_apart(attend, [keys <= window for keys in segments.key_lens], segments, query, key, value)


def has_operator(device: torch.device, dtype: torch.dtype, window: int | None, *, sinks: bool) -> bool:
    """Whether compiled code can hold :func:`packed_attention` of :meth:`hidden <Segments.hidden>` segments: where it is one
    kernel, whatever their lengths.
    """
    if device.type == "cuda":
        return dtype in (torch.bfloat16, torch.float16) and not sinks
    return window is None


def _with_own_keys(key: Tensor, value: Tensor, segments: Segments) -> tuple[Tensor, Tensor, Segments]:
    """Of a tree, the keys of every path end to end."""
    if segments.tree is None:
        return key, value, segments
    assert segments.key_index is not None, "Segments.of_tree makes one"
    key, value = (take_rows(x, segments.key_index) for x in (key, value))
    return key, value, segments._replace(key_index=None, tree=None)


def attend_apart(
    attend: Callable[..., Tensor],
    marks: Sequence[bool],
    segments: Segments,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *of_queries: Tensor,
) -> Tensor:
    """What ``attend(mark, segments, query, key, value, *of_queries)`` gives for all segments of a mark together, (N, heads,
    value_dim) in the order of all.

    Args:
        marks: of each segment; where a mark depends on its segment alone, so do the bits of what that attends to.
        of_queries: (N, ...).
    """
    if len(set(marks)) == 1:
        return attend(marks[0], segments, query, key, value, *of_queries)
    key, value, segments = _with_own_keys(key, value, segments)
    query_lens, key_lens = list(segments.query_lens), list(segments.key_lens)
    rows = [query.split(query_lens), key.split(key_lens), value.split(key_lens), *(x.split(query_lens) for x in of_queries)]
    attended: list[Tensor] = [query] * len(marks)
    for mark in (True, False):
        indices = [index for index, each in enumerate(marks) if each is mark]
        part = segments.some(indices)
        found = attend(mark, part, *(torch.cat([each[index] for index in indices]) for each in rows))
        for index, row in zip(indices, found.split(part.query_lens), strict=True):
            attended[index] = row
    return torch.cat(attended)


@cache
def _varlen_kernel() -> tuple[Callable[..., Tensor | tuple[Tensor, Tensor]], bool]:
    """The kernel, and whether it takes fewer heads of keys than of queries."""
    # With it comes torch.compile, which would be a second of the start of every command and process.
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, "enable_gqa" in inspect.signature(varlen_attn).parameters


def varlen_attention(query: Tensor, key: Tensor, value: Tensor, segments: Segments, window: int | None) -> Tensor:
    """:func:`packed_attention` by the kernel of a GPU, in bfloat16 or float16. Of the lengths only the longest are read."""
    # The kernel aligns the causal mask and the window to the last query and the last key of each segment.
    options: dict[str, Any] = {"window_size": (-1 if window is None else window - 1, 0)}
    varlen_attn, has_groups = _varlen_kernel()
    if key.shape[1] != query.shape[1]:
        if has_groups:
            options["enable_gqa"] = True
        else:
            key, value = _repeat_heads(key, query.shape[1]), _repeat_heads(value, query.shape[1])
    longest_query, longest_key = max(segments.query_lens), max(segments.key_lens)
    # It also takes keys and values of one width only: zeros change neither scores nor the features that are kept.
    key_dim, value_dim = query.shape[-1], value.shape[-1]
    if key_dim != value_dim:
        options["scale"] = key_dim**-0.5
        query, key, value = (F.pad(x, (0, max(key_dim, value_dim) - x.shape[-1])) for x in (query, key, value))
    attended = varlen_attn(query, key, value, segments.cu_queries, segments.cu_keys, longest_query, longest_key, **options)
    assert isinstance(attended, Tensor), "the log-sum-exp was not asked for"
    return attended if key_dim == value_dim else attended[..., :value_dim]


def _by_runs(query: Tensor, key: Tensor, value: Tensor, query_lens: Sequence[int], key_lens: Sequence[int]) -> Tensor:
    runs = [(lengths, sum(1 for _ in group)) for lengths, group in groupby(zip(query_lens, key_lens, strict=True))]
    query_sizes = [queries * count for (queries, _), count in runs]
    key_sizes = [keys * count for (_, keys), count in runs]
    outputs = []
    for ((queries, keys), count), q, k, v in zip(
        runs, query.split(query_sizes), key.split(key_sizes), value.split(key_sizes), strict=True
    ):
        if queries != keys:  # SDPA's own causal mask is aligned to the first query and the first key.
            outputs.append(windowed_attention(q, k, v, [queries] * count, [keys] * count, window=keys))
            continue
        if q.is_cuda:
            # The memory-efficient kernel, the only one for float32 beside the quadratic form, takes no groups.
            k, v = _repeat_heads(k, q.shape[1]), _repeat_heads(v, q.shape[1])
        q, k, v = (_batched(x, queries) for x in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] != q.shape[1])
        outputs.append(attended.transpose(1, 2).flatten(0, 1))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def windowed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_lens: Sequence[int],
    key_lens: Sequence[int],
    window: int,
    sinks: Tensor | None = None,
) -> Tensor:
    """Packed attention of each token to the last ``window`` tokens of its segment, itself included; see
    :func:`packed_attention`.

    Each block of queries is multiplied with the keys that some of its queries see: work and memory grow with the window.
    """
    heads = query.shape[1]
    if query.is_cuda and key.shape[1] != heads:
        # The memory-efficient kernel takes no groups.
        key, value = _repeat_heads(key, heads), _repeat_heads(value, heads)
    outputs = []
    query_origin = key_origin = 0
    for queries, keys in zip(query_lens, key_lens, strict=True):
        for start in range(keys - queries, keys, _WINDOWED_BLOCK):
            stop, first = min(start + _WINDOWED_BLOCK, keys), max(0, start - window + 1)
            q = _batched(query[query_origin : query_origin + stop - start], stop - start)
            k, v = (_batched(x[key_origin + first : key_origin + stop], stop - first) for x in (key, value))
            if sinks is None:
                mask = _visible(start, stop, first, window, query.device)
                attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=key.shape[1] != heads)
            else:
                attended = _SinkAttention.apply(q, k, v, sinks, range(start, stop), range(first, stop), window)
            outputs.append(attended)
            query_origin += stop - start
        key_origin += keys
    return torch.cat([rows.squeeze(0).transpose(0, 1) for rows in outputs])


def _batched(x: Tensor, length: int) -> Tensor:
    rows: Tensor = x.unflatten(0, (-1, length))
    return rows.transpose(1, 2)


def _visible(start: int, stop: int, first: int, window: int, device: torch.device) -> Tensor:
    distance = torch.arange(start, stop, device=device)[:, None] - torch.arange(first, stop, device=device)
    return (distance >= 0) & (distance < window)


def _block_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, queries: range, keys: range, window: int
) -> Tensor:
    """One key more, of zeros, whose score is the sink of each head."""
    visible = _visible(queries.start, queries.stop, keys.start, window, query.device)
    heads, dtype = query.shape[1], query.dtype
    hidden = torch.zeros(visible.shape, dtype=dtype, device=query.device).masked_fill_(~visible, -torch.inf)
    of_sinks = sinks.to(dtype)[:, None, None].expand(-1, len(queries), 1)
    added = torch.cat((hidden.expand(heads, -1, -1), of_sinks), dim=-1)
    k, v = (F.pad(x, (0, 0, 0, 1)) for x in (key, value))
    return F.scaled_dot_product_attention(query, k, v, attn_mask=added[None], enable_gqa=key.shape[1] != heads)


class _SinkAttention(torch.autograd.Function):
    """(1, heads, queries, value_dim) of one block. Scores are computed again: SDPA would keep those that have a gradient."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, queries: range, keys: range, window: int
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, sinks)
        ctx.block = queries, keys, window
        return _block_with_sinks(query, key, value, sinks, *ctx.block)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            attended = _block_with_sinks(*inputs, *ctx.block)
        return (*torch.autograd.grad(attended, inputs, grad), None, None, None)


def _pairs(keys: int, window: int | None) -> int:
    """How many scores a sequence of so many tokens has."""
    whole = keys if window is None else min(keys, window)
    return whole * (whole + 1) // 2 + whole * (keys - whole)


def _count(like: Tensor, products: int) -> None:
    """For what counts operations on the meta device: as many multiplications, which take no memory there."""
    one = like.new_empty(1, 1)
    torch.mm(one.expand(1, products), one.expand(products, 1))


_OPERATORS = torch.library.Library("rl_backend", "FRAGMENT")
_OPERATORS.define("attend_on_meta(Tensor query, Tensor value, int products) -> (Tensor, Tensor)")


def _attend_on_meta(query: Tensor, value: Tensor, products: int) -> tuple[Tensor, Tensor]:
    return query.new_empty(*query.shape[:2], value.shape[-1]), query.new_empty(query.shape[:2], dtype=torch.float32)


_OPERATORS.impl("attend_on_meta", _attend_on_meta, "Meta")


ATTENDS = (
    "rl_backend.cpu_attention.default",
    "rl_backend.attend_on_meta.default",
    "torch_attn._varlen_attn.default",
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
)
"""The names of the operations that :func:`packed_attention` is made of."""


class _MetaAttention(torch.autograd.Function):
    """Keeps what flash attention (Dao et al., arXiv 2205.14135) keeps; with sinks it needs a block's scores meanwhile."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, block: int, pairs: int) -> Tensor:
        ctx.block = 0 if sinks is None else query.shape[1] * block
        ctx.pairs = pairs
        query.new_empty(ctx.block)
        out, log_sums = torch.ops.rl_backend.attend_on_meta(query, value, pairs * (key.shape[-1] + value.shape[-1]))
        ctx.save_for_backward(query, key, value, sinks, out, log_sums)
        return out  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, *_ = ctx.saved_tensors
        query.new_empty(2 * ctx.block)
        # Scores once more, and the gradients of scores, queries, keys and values.
        _count(query, ctx.pairs * (3 * key.shape[-1] + 2 * value.shape[-1]))
        of_sinks = None if sinks is None else torch.empty_like(sinks)
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), of_sinks, None, None
