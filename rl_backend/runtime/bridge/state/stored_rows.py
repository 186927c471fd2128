"""Row order of Megatron's parameters, in terms of Hugging Face's tensors."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from megatron.bridge.models.conversion.param_mapping import (
    AutoMapping,
    ColumnParallelMapping,
    DirectMapping,
    GatedMLPMapping,
    GDNConv1dMapping,
    GDNLinearMapping,
    GDNLinearMappingSeparate,
    QKVMapping,
    ReplicatedMapping,
    RowParallelMapping,
)

_AS_THEY_ARE = (AutoMapping, ColumnParallelMapping, DirectMapping, ReplicatedMapping, RowParallelMapping)
_DELTANET = (GDNConv1dMapping, GDNLinearMapping, GDNLinearMappingSeparate)
_IN_ANOTHER_ORDER = (GatedMLPMapping, QKVMapping, *_DELTANET)


class StoredRows(NamedTuple):
    """Rows that lie together in both.

    Attributes:
        start, stop: in Megatron's tensor, which counts the rows of all tensor-parallel ranks.
        name, shape: the Hugging Face tensor.
        at: its first of these rows.
    """

    start: int
    stop: int
    name: str
    shape: tuple[int, ...]
    at: int


class _Run(NamedTuple):
    """Attributes:
    part: Megatron-Bridge's name of the Hugging Face tensor among those of a parameter; empty where it is the only one.
    """

    part: str
    at: int
    size: int


def keeps_rows(mapping: Any) -> bool:
    """Whether a mapping of Megatron-Bridge only puts rows in another order, one that is known here."""
    if type(mapping) in _AS_THEY_ARE:
        return not getattr(mapping, "permute_dims", None)
    return type(mapping) in _IN_ANOTHER_ORDER


def stored_rows(
    mapping: Any, block: str, names: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], config: Any
) -> tuple[StoredRows, ...]:
    """The rows of one block of a parameter.

    Args:
        block: Megatron's name of the block in its checkpoints.
        names, shapes: part -> the Hugging Face tensor.
        config: Megatron's ``TransformerConfig``.
    """
    found, start = [], 0
    for part, at, size in _runs(mapping, block.rpartition(".")[2], shapes, config):
        found.append(StoredRows(start, start + size, names[part], shapes[part], at))
        start += size
    return tuple(found)


def _runs(mapping: Any, block: str, shapes: Mapping[str, tuple[int, ...]], config: Any) -> Iterator[_Run]:
    if isinstance(mapping, QKVMapping):
        yield from _attention_runs(shapes, config)
    elif isinstance(mapping, _DELTANET):
        yield from _deltanet_runs(mapping, block, config)
    else:
        for part in ("gate", "up") if isinstance(mapping, GatedMLPMapping) else ("",):
            yield _Run(part, 0, shapes[part][0])


def _attention_runs(shapes: Mapping[str, tuple[int, ...]], config: Any) -> Iterator[_Run]:
    """Megatron keeps the queries of a group next to its key and value: tensor parallelism cuts between groups.

    Where attention has a gate, Hugging Face has it behind the queries of each head, Megatron behind those of each group.
    """
    heads = config.num_attention_heads
    groups = config.num_query_groups or heads
    per_group = heads // groups
    for group in range(groups):
        parts: tuple[str, ...] = ("q", "k", "v")
        if config.attention_output_gate:
            parts, dim = ("k", "v"), shapes["q"][0] // (2 * heads)
            for gate in (0, 1):
                for head in range(group * per_group, (group + 1) * per_group):
                    yield _Run("q", (2 * head + gate) * dim, dim)
        for part in parts:
            size = shapes[part][0] // groups
            yield _Run(part, group * size, size)


def _deltanet_runs(mapping: Any, block: str, config: Any) -> Iterator[_Run]:
    """Megatron saves the projection in six blocks and the convolution in three, each with the rows of all heads."""
    heads = config.linear_num_key_heads
    per_key = config.linear_num_value_heads // heads
    key, value = config.linear_key_head_dim, per_key * config.linear_value_head_dim
    if isinstance(mapping, GDNLinearMapping):
        # Key head by key head: its query, key, values and gates; the strengths and decays of its values.
        part, at, size, width = {
            "query": ("qkvz", 0, key, 2 * key + 2 * value),
            "key": ("qkvz", key, key, 2 * key + 2 * value),
            "value": ("qkvz", 2 * key, value, 2 * key + 2 * value),
            "z": ("qkvz", 2 * key + value, value, 2 * key + 2 * value),
            "beta": ("ba", 0, per_key, 2 * per_key),
            "alpha": ("ba", per_key, per_key, 2 * per_key),
        }[block]
        for head in range(heads):
            yield _Run(part, head * width + at, size)
        return
    qkv = "" if isinstance(mapping, GDNConv1dMapping) else "qkv"
    yield {
        "query": _Run(qkv, 0, heads * key),
        "key": _Run(qkv, heads * key, heads * key),
        "value": _Run(qkv, 2 * heads * key, heads * value),
        "z": _Run("z", 0, heads * value),
        "beta": _Run("b", 0, heads * per_key),
        "alpha": _Run("a", 0, heads * per_key),
    }[block]
