"""LoRA adapters in a Megatron model: beside its linear layers, on its experts, at embedding and head."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.bridge.models.conversion.param_mapping import GatedMLPMapping, QKVMapping
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import all_to_all, gather_from_sequence_parallel_region
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import permute, sort_chunks_by_idxs
from torch import Tensor, nn

from rl_backend.contracts import ConfigError
from rl_backend.contracts.lora import LoRAKind
from rl_backend.lora.modules import AdaptedModule, Part, value_head
from rl_backend.parallel.collectives import all_gather, all_gather_into, reduce_scatter
from rl_backend.primitive.adapters import (
    ENOUGH_ROWS,
    HEAD,
    AdapterRun,
    Columns,
    adapted_embedding,
    adapted_linear,
    adapters_at_work,
)
from rl_backend.primitive.attention import packed_attention
from rl_backend.primitive.experts import RowOwners, TokenShare, row_owners
from rl_backend.runtime.adaptable import COUPLES, TRAINS_BASE, Adaptable, SumGroups
from rl_backend.runtime.bridge.megatron.groups import BridgeGroups
from rl_backend.runtime.bridge.megatron.local_layers import LatentCoreAttention
from rl_backend.runtime.bridge.model.conversion import Conversion, is_stacked
from rl_backend.runtime.bridge.model.output_heads import CriticOutputLayer
from rl_backend.runtime.bridge.passes.batch import LaidOut


class ChunkAdapters:
    """The adapters of one chunk of a model, and the micro-batch that it works on, if any adapter works on that."""

    def __init__(self) -> None:
        self.laid_out: LaidOut | None = None

    @contextmanager
    def forward(self, laid_out: LaidOut) -> Generator[None]:
        """Around the forward pass of the chunk."""
        self.laid_out = laid_out if laid_out.adapters else None
        try:
            yield
        finally:
            self.laid_out = None

    def before_backward(self, laid_out: LaidOut, output: Tensor) -> None:
        # Layers may be computed again, and other micro-batches come through the chunk before that.
        if laid_out.adapters and output.requires_grad:
            output.register_hook(lambda _: setattr(self, "laid_out", laid_out))


# Part of Megatron's name of a weight -> what it is.
_KINDS: Mapping[str, LoRAKind] = {
    "embedding.word_embeddings.": "embedding",
    ".self_attention.linear_": "attention",
    ".mlp.linear_fc": "feed_forward",
    ".mlp.shared_experts.linear_fc": "feed_forward",
    ".mlp.experts.local_experts.": "experts",
    "output_layer.weight": "head",
}


def attach_adapters(
    models: Sequence[nn.Module], conversions: Sequence[Conversion], config: Any, groups: BridgeGroups, bias_rate: float
) -> tuple[list[ChunkAdapters], Adaptable]:
    """Lets adapters work beside linear layers, experts, embedding and head. Replaces their ``forward``.

    A collective over the ranks that have parts of the model. Raises :class:`ConfigError` for settings that tenants cannot
    have.

    Args:
        models: this rank's chunks without their wrappers.
        conversions: of the whole model.
        config: Megatron's ``TransformerConfig``.
    """
    tp = groups.pg.tp
    needed = {"sequence_parallel": tp.size() > 1, "softmax_type": "vanilla", "attention_dropout": 0.0}
    ConfigError.refuse_all(
        (f"BridgeConfig.override_transformer_config[{name!r}]", found, f"LoRA tenants need {each!r} here; leave it out")
        for name, each in needed.items()
        if (found := getattr(config, name)) != each
    )
    chunks, held = [ChunkAdapters() for _ in models], dict[str, AdaptedModule]()
    for conversion in conversions:
        for task in conversion.tasks:
            layer, modules = task.megatron_module, _modules_of(task, conversion, config, groups)
            if modules:
                held |= {module.name: module for module in modules}
                columns = {module.name: columns for module, columns in modules.items()}
                is_expert = any(module.is_expert for module in modules)
                forward = _expert_linear if is_expert else _look_up if "embedding" in task.global_param_name else _linear
                _replace(layer, partial(forward, layer, columns, chunks[task.vp_stage or 0], tp))
        if "word_embeddings" in conversion.tasks[0].global_param_name and config.share_embeddings_and_output_weights:
            heads = [_tied_head(model, conversion, tp) for model in models]
            held |= {head.name: head for head in heads if head is not None}
    for model, chunk in zip(models, chunks, strict=True):
        for module in model.modules():
            if isinstance(module, DotProductAttention):
                scale = module.softmax_scale * (module.scale_mask_softmax.scale or 1.0)
                # Megatron counts the tokens before a token; a layer that it gives no window sees all of them.
                windowed = module.scale_mask_softmax.window_size
                window = None if windowed is None else windowed[0] + 1
                _replace(module, partial(_attend, module, chunk, scale, window))
            elif isinstance(module, LatentCoreAttention):
                _replace(module, partial(_attend, module, chunk, module.softmax_scale, None))
            elif isinstance(module, LanguageModelEmbedding):
                _replace(module, partial(_embed, module, chunk))
            elif isinstance(module, MoELayer):
                attach_to_experts(module, chunk, tp)
    weights = [name for conversion in conversions for name in conversion.shapes]
    etp = groups.pg.expt_tp
    return chunks, Adaptable.of_ranks(
        held,
        weights,
        (groups.pg.ep, groups.pg.pp),
        tensor_group=tp,
        data_group=groups.dp_group,
        expert_groups=SumGroups(etp if etp.size() > 1 else None, groups.pg.expt_dp),
        whole_group=groups.replica_group if groups.pg.ep.size() == 1 else groups.world_group,
        refused_by=_refused_by(config, bias_rate),
        value_head=value_head(config.hidden_size),
        holds_head=any(model.post_process for model in models),
    )


def _refused_by(config: Any, bias_rate: float) -> str:
    if bias_rate:
        return f"BridgeConfig.expert_bias_rate={bias_rate}: {TRAINS_BASE}"
    if config.num_moe_experts is None:
        return ""
    coefficients = config.moe_aux_loss_coeff
    couples = {
        "moe_aux_loss_coeff": any(coefficients if isinstance(coefficients, Sequence) else [coefficients]),
        "moe_z_loss_coeff": bool(config.moe_z_loss_coeff),
        "moe_expert_capacity_factor": config.moe_expert_capacity_factor is not None,
        "moe_router_load_balancing_type": config.moe_router_load_balancing_type == "sinkhorn",
    }
    found = next((name for name, does in couples.items() if does), None)
    return f"BridgeConfig.override_transformer_config {found}={getattr(config, found)!r}: {COUPLES}" if found else ""


def _replace(module: nn.Module, forward: Any) -> None:
    setattr(module, "forward", forward)  # noqa: B010 - a method


def _modules_of(
    task: Any, conversion: Conversion, config: Any, groups: BridgeGroups
) -> Mapping[AdaptedModule, Columns | None]:
    """The Hugging Face modules that the layer of a task is made of, and their columns among this rank's outputs; empty where
    it has no adapters, or is another rank's.
    """
    kinds = [kind for part, kind in _KINDS.items() if part in task.global_param_name]
    layer, stored = task.megatron_module, task.mapping.hf_param
    if task.param_weight is None or not task.param_name.endswith(".weight") or not kinds or is_stacked(task):
        return {}
    (kind,), is_expert = kinds, task.mapping.is_expert
    tp = groups.pg.expt_tp if is_expert else groups.pg.tp
    if kind in ("embedding", "head"):
        vocabulary, hidden = conversion.shapes[stored]
        words, features = _words(task.param_weight.shape[0], vocabulary, tp), (0, hidden)
        sizes = (vocabulary, hidden, words, features) if kind == "embedding" else (hidden, vocabulary, features, words)
        return {AdaptedModule(_module(stored), kind, *sizes): None}
    if isinstance(layer, RowParallelLinear):
        out_features, in_features = conversion.shapes[stored]
        parts = _part(in_features, tp), (0, out_features)
        module = AdaptedModule(_module(stored), kind, in_features, out_features, *parts, is_expert=is_expert)
        return {module: None}
    if not isinstance(layer, ColumnParallelLinear):
        return {}
    names, fused_groups = [stored], 1
    if isinstance(task.mapping, QKVMapping):
        # Group by group, queries before key and value; ranks have whole groups.
        names, fused_groups = [stored[each] for each in "qkv"], config.num_query_groups // tp.size()
    elif isinstance(task.mapping, GatedMLPMapping):
        names = [stored["gate"], stored["up"]]
    modules, start = dict[AdaptedModule, Columns | None](), 0
    for name in names:
        out_features, in_features = conversion.shapes[name]
        part = _part(out_features, tp)
        width = (part[1] - part[0]) // fused_groups
        module = AdaptedModule(_module(name), kind, in_features, out_features, (0, in_features), part, is_expert=is_expert)
        modules[module] = None if len(names) == 1 else Columns(fused_groups, start, start + width)
        start += width
    return modules


def _tied_head(model: Any, conversion: Conversion, tp: dist.ProcessGroup) -> AdaptedModule | None:
    """Of a chunk whose logits are made with the embeddings of ``conversion``; None where it makes none, or is a critic's."""
    if not model.post_process or isinstance(model.output_layer, CriticOutputLayer):
        return None
    ((vocabulary, hidden),) = conversion.shapes.values()
    words = _words(model.shared_embedding_or_output_weight().shape[0], vocabulary, tp)
    return AdaptedModule(HEAD, "head", hidden, vocabulary, (0, hidden), words)


def _words(rows: int, vocabulary: int, tp: Any) -> Part:
    first = tp.rank() * rows
    # Megatron may have padded the vocabulary.
    return first, min(first + rows, vocabulary)


def _module(weight: str) -> str:
    return weight.removesuffix(".weight")


def _part(features: int, group: Any) -> Part:
    mine = features // group.size()
    return group.rank() * mine, (group.rank() + 1) * mine


def _linear(
    linear: Any,
    modules: Mapping[str, Columns | None],
    chunk: ChunkAdapters,
    tp: dist.ProcessGroup,
    x: Tensor,
    *arguments: Any,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """As Megatron's own, (columns, rows, H) with this rank's part of the columns between blocks; real tokens only."""
    laid_out = chunk.laid_out
    if laid_out is None:
        return type(linear).forward(linear, x, *arguments, **options)  # type: ignore[no-any-return]
    splits_outputs = isinstance(linear, ColumnParallelLinear)
    added = None if linear.skip_bias_add else linear.bias
    whole = all_gather(x, tp, sum_gradients=True) if splits_outputs else x
    with adapters_at_work(laid_out.adapters):
        packed = adapted_linear(laid_out.pack(whole), linear.weight, added if splits_outputs else None, modules)
    y = laid_out.unpack(packed)
    if not splits_outputs:
        y = reduce_scatter(y, tp)
        y = y if added is None else y + added
    return y, linear.bias if linear.skip_bias_add else None


def _expert_linear(
    linear: Any,
    modules: Mapping[str, Columns | None],
    chunk: ChunkAdapters,
    tp: dist.ProcessGroup,
    x: Tensor,
    *arguments: Any,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """As Megatron's own, on the rows of one expert. Its dispatcher sums what expert-tensor-parallel ranks have parts of."""
    if chunk.laid_out is None:
        return type(linear).forward(linear, x, *arguments, **options)  # type: ignore[no-any-return]
    y = adapted_linear(x, linear.weight, None if linear.skip_bias_add else linear.bias, modules)
    return y, linear.bias if linear.skip_bias_add else None


def _look_up(
    embedding: Any, modules: Mapping[str, Columns | None], chunk: ChunkAdapters, tp: dist.ProcessGroup, tokens: Tensor
) -> Tensor:
    """As Megatron's own: (rows, columns) tokens, with tensor parallelism this rank's part of the columns first."""
    laid_out = chunk.laid_out
    if laid_out is None:
        return type(embedding).forward(embedding, tokens)  # type: ignore[no-any-return]
    (name,) = modules
    rows = laid_out.batch.input_ids - embedding.vocab_start_index
    elsewhere = (rows < 0) | (rows >= embedding.weight.shape[0])
    with adapters_at_work(laid_out.adapters):
        found = adapted_embedding(rows.masked_fill(elsewhere, 0), embedding.weight, name)
    hidden = laid_out.unpack(found.masked_fill(elsewhere[:, None], 0.0))
    return reduce_scatter(hidden, tp) if embedding.reduce_scatter_embeddings else hidden.transpose(0, 1)


def _attend(
    attention: Any,
    chunk: ChunkAdapters,
    scale: float,
    window: int | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *arguments: Any,
    **options: Any,
) -> Tensor:
    """As Megatron's own, (columns, rows, heads, head_dim) -> (columns, rows, heads * value_dim), but on packed tokens."""
    # What a sequence attends to is then the same to the last bit whichever others are beside it; padded to the longest it is
    # not.
    laid_out = chunk.laid_out
    if laid_out is None:
        return type(attention).forward(attention, query, key, value, *arguments, **options)  # type: ignore[no-any-return]
    assert laid_out.segments is not None, "comes with adapters"
    q, k, v = (laid_out.pack(each) for each in (query, key, value))
    # The primitive scales by head_dim ** -0.5, which not every model does.
    factor = scale * query.shape[-1] ** 0.5
    return laid_out.unpack(packed_attention(q * factor, k, v, laid_out.segments, window).flatten(1))


def _embed(embedding: nn.Module, chunk: ChunkAdapters, *arguments: Any, **options: Any) -> Tensor:
    # Above a frozen embedding something has to ask for the gradients of adapters.
    hidden: Tensor = type(embedding).forward(embedding, *arguments, **options)
    needs_gradients = chunk.laid_out is not None and torch.is_grad_enabled() and not hidden.requires_grad
    return hidden.requires_grad_() if needs_gradients else hidden


def attach_to_experts(layer: Any, chunk: ChunkAdapters, tp: dist.ProcessGroup) -> None:
    """Lets each expert of a ``MoELayer`` know whose its rows are. Replaces ``forward`` of its experts and ``gating``."""
    expert_ranks = layer.token_dispatcher.tp_size * layer.token_dispatcher.ep_size
    share = TokenShare(0, tp.rank() // expert_ranks, -(-tp.size() // expert_ranks))
    layer.experts.forward = partial(_forward, layer.experts, layer.token_dispatcher, chunk, tp, share)
    layer.router.gating = partial(_gate, layer.router, chunk)


def _gate(router: Any, chunk: ChunkAdapters, hidden: Tensor) -> Tensor:
    """As Megatron's own, (columns, rows, H) -> (columns, rows, experts)."""
    # Of enough rows for scores that do not depend on how many there are.
    columns, rows, _ = hidden.shape
    missing = ENOUGH_ROWS - columns * rows
    if chunk.laid_out is None or missing <= 0:
        return type(router).gating(router, hidden)  # type: ignore[no-any-return]
    padded = F.pad(hidden.flatten(0, 1), (0, 0, 0, missing))[:, None]
    scores: Tensor = type(router).gating(router, padded)
    return scores[: columns * rows].view(columns, rows, -1)


def _forward(
    experts: Any,
    dispatcher: Any,
    chunk: ChunkAdapters,
    tp: dist.ProcessGroup,
    share: TokenShare,
    rows: Tensor,
    counts: Tensor,
    probs: Tensor,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """As Megatron's ``SequentialMLP``: (N, hidden_size) and their weights, those of this rank's first expert first."""
    laid_out = chunk.laid_out
    if laid_out is None:
        return type(experts).forward(experts, rows, counts, probs, **options)  # type: ignore[no-any-return]
    with adapters_at_work(laid_out.adapters):
        owners = row_owners(laid_out.batch.num_tokens, share, rows.device)
    sizes = counts.tolist()
    runs: Sequence[Sequence[AdapterRun]] = [()] * len(sizes)
    order: Tensor | None = None
    if owners is not None:
        order, runs = _sorted(owners, laid_out, dispatcher, tp, counts)
        rows, probs = rows.index_select(0, order), probs.index_select(0, order)
    found = []
    for expert, own, weights, work in zip(experts.local_experts, rows.split(sizes), probs.split(sizes), runs, strict=True):
        with adapters_at_work(work):
            found.append(expert(own, weights)[0])
    output = torch.cat(found)
    return output if order is None else output.index_select(0, order.argsort()), None


@torch.no_grad()
def _sorted(
    owners: RowOwners, laid_out: LaidOut, dispatcher: Any, tp: dist.ProcessGroup, counts: Tensor
) -> tuple[Tensor, list[list[AdapterRun]]]:
    """(N,) the order of rows by expert, owner and sender, and the runs of each expert, from its first row on."""
    senders = dispatcher.tp_size * dispatcher.ep_size
    rows, columns = laid_out.shape
    all_owners = owners.of_rows.new_full((rows * columns,), len(owners.keys))
    all_owners[laid_out.places] = owners.of_rows
    mine = all_owners.chunk(tp.size())[tp.rank()]
    drawn = torch.tensor(owners.draws, device=mine.device)
    draws = drawn.new_empty(senders * len(drawn))
    all_gather_into(draws, drawn, group=dispatcher.tp_ep_group)
    arrived = _dispatched(dispatcher, mine * senders + dispatcher.tp_ep_group.rank())
    expert = torch.arange(len(counts), device=arrived.device).repeat_interleave(counts.to(arrived.device))
    order = torch.argsort(expert * (owners.kinds * senders) + arrived, stable=True)
    owner, sender = arrived // senders, arrived % senders
    places = (sender * len(counts) + expert) * owners.kinds + owner
    sent = places.bincount(minlength=senders * len(counts) * owners.kinds).view(senders, -1).tolist()
    first = [0, *counts.cumsum(0).tolist()]
    runs: list[list[AdapterRun]] = [[] for _ in range(len(counts))]
    for number, run in owners.runs(sent, draws.view(senders, -1).tolist()):
        runs[number].append(replace(run, start=run.start - first[number], stop=run.stop - first[number]))
    return order, runs


def _dispatched(dispatcher: Any, numbers: Tensor) -> Tensor:
    """(rows of this rank,) numbers, brought to where the dispatcher has just brought the rows: (N,)."""
    found = permute(numbers[:, None], dispatcher.routing_map, num_out_tokens=dispatcher.num_out_tokens)[0]
    found = all_to_all(dispatcher.ep_group, found, dispatcher.output_splits, dispatcher.input_splits)
    if dispatcher.tp_size > 1:
        splits = None if dispatcher.output_splits_tp is None else dispatcher.output_splits_tp.tolist()
        found = gather_from_sequence_parallel_region(found, group=dispatcher.tp_group, output_split_sizes=splits)
    if dispatcher.num_local_experts > 1:
        sizes = dispatcher.num_global_tokens_per_local_expert.ravel()
        found, _ = sort_chunks_by_idxs(found, sizes, dispatcher.sort_input_by_local_experts)
    arrived: Tensor = found.flatten()
    return arrived
