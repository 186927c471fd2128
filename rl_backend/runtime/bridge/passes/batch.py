"""Micro-batches as Megatron's model takes them, and outputs as a loss takes them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor, nn

from rl_backend.contracts import Head, ModelOutput, PackedBatch
from rl_backend.parallel.collectives import all_gather
from rl_backend.parallel.tensor import vocabulary_shard
from rl_backend.primitive.adapter_runs import AdapterRun
from rl_backend.primitive.attention import Segments
from rl_backend.primitive.log_prob import next_token_log_probs
from rl_backend.primitive.value_head import ValueHead, labels_without_values, values_of_tenants
from rl_backend.runtime.bridge.megatron.groups import BridgeGroups


@dataclass(frozen=True)
class LaidOut:
    """One micro-batch as (rows, columns) of tokens.

    Attributes:
        batch: the packed tokens, on the training device.
        inputs: keyword arguments of ``GPTModel.forward``.
        shape: (rows, columns); a padded batch has a row per sequence, a packed one a single row.
        places: (T,) where each packed token is in the columns-by-rows order of Megatron's hidden states.
        heads: the outputs of the pass, as in ``ModelInput``.
        adapters: which work on which of the T tokens.
        segments: the sequences among the T tokens; None without adapters.
    """

    batch: PackedBatch
    inputs: Mapping[str, Any]
    shape: tuple[int, int]
    places: Tensor
    heads: Sequence[Head] = ()
    adapters: tuple[AdapterRun, ...] = ()
    segments: Segments | None = None

    def pack(self, hidden: Tensor) -> Tensor:
        """(columns, rows, H) -> (T, H)."""
        return hidden.flatten(0, 1).index_select(0, self.places)

    def unpack(self, packed: Tensor) -> Tensor:
        """(T, H) -> (columns, rows, H), zeros for padding."""
        rows, columns = self.shape
        hidden = packed.new_zeros(columns * rows, packed.shape[1]).index_copy(0, self.places, packed)
        return hidden.view(columns, rows, -1)


def lay_out_padded(batch: PackedBatch, multiple: int, *, mark_padding: bool) -> LaidOut:
    """A row per sequence, padded on the right.

    Padding comes after the sequence, so the causal mask keeps it out of every real token; Megatron makes that mask itself.

    Args:
        multiple: the columns are rounded up to one of it: sequence parallelism splits them evenly.
        mark_padding: tell the router which tokens are padding (True); they count in no balancing loss.
    """
    rows, columns = batch.num_sequences, _round_up(int(batch.seq_lens.max()), multiple)
    device = batch.device
    row, column = batch.sequence_ids, batch.position_ids
    input_ids = torch.zeros(rows, columns, dtype=torch.int64, device=device)
    input_ids[row, column] = batch.input_ids
    inputs: dict[str, Any] = {
        "input_ids": input_ids,
        "position_ids": torch.arange(columns, device=device).expand(rows, columns),
        "attention_mask": None,
    }
    if mark_padding:
        is_padding = torch.ones(rows, columns, dtype=torch.bool, device=device)
        is_padding[row, column] = False
        inputs["padding_mask"] = is_padding
    return LaidOut(batch, inputs, (rows, columns), column * rows + row)


def lay_out_packed(batch: PackedBatch, multiple: int, *, mark_padding: bool) -> LaidOut:
    """All sequences in one row ("thd"), for attention that takes their boundaries.

    Args:
        multiple: a sequence of padding at the end rounds the row up to one of it.
        mark_padding: as in :func:`lay_out_padded`.
    """
    tokens, device = batch.num_tokens, batch.device
    total = _round_up(tokens, multiple)
    padding = torch.arange(total - tokens, device=device)
    boundaries = batch.cu_seqlens
    if total > tokens:
        boundaries = torch.cat([boundaries, boundaries.new_tensor([total])])
    longest = max(int(batch.seq_lens.max()), total - tokens)
    inputs: dict[str, Any] = {
        "input_ids": torch.cat([batch.input_ids, torch.zeros_like(padding)])[None],
        "position_ids": torch.cat([batch.position_ids, padding])[None],
        "attention_mask": None,
        "packed_seq_params": PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=boundaries, cu_seqlens_kv=boundaries, max_seqlen_q=longest, max_seqlen_kv=longest
        ),
    }
    if mark_padding:
        inputs["padding_mask"] = torch.arange(total, device=device)[None] >= tokens
    return LaidOut(batch, inputs, (1, total), torch.arange(tokens, device=device))


def _round_up(number: int, multiple: int) -> int:
    return math.ceil(number / multiple) * multiple


@dataclass(frozen=True)
class OutputProcessor:
    """Megatron's ``output_processor``: it takes the place of the logits, which would be full (tokens, vocabulary) tensors.

    Attributes:
        vocab_size: tokens of the model; Megatron may have padded its weight with more rows.
        chunk_tokens: tokens whose logits exist at one time.
    """

    groups: BridgeGroups
    vocab_size: int
    chunk_tokens: int

    def __call__(
        self, *, hidden_states: Tensor, output_layer: nn.Module, output_weight: Tensor | None, context: LaidOut, **_: Any
    ) -> Tensor:
        """Megatron calls this on the last stage.

        Args:
            hidden_states: (columns, rows, H), or this rank's part of the columns.

        Returns:
            (2, T) log-probs and entropy, or (1, T) values, or all three; float32. One tensor, as the pipeline schedules
            want.
        """
        found = list[Tensor]()
        if "log_probs" in context.heads:
            found += self._log_probs(hidden_states, output_layer, output_weight, context)
        if "values" in context.heads:
            whole = context.pack(self._gather(hidden_states, every_rank_the_same=True))
            if isinstance(output_layer, CriticOutputLayer):
                values = output_layer.value_head(whole)
            else:
                values = whole.new_zeros(whole.shape[0], dtype=torch.float32)
            found.append(values_of_tenants(whole, values, context.adapters, counts=self.groups.pg.tp.rank() == 0))
        return torch.stack(found)

    def _log_probs(
        self, hidden_states: Tensor, output_layer: nn.Module, output_weight: Tensor | None, context: LaidOut
    ) -> tuple[Tensor, Tensor]:
        # Megatron waits for the gather of a parameter in a hook of its module, which is not called here.
        for wait in output_layer._forward_pre_hooks.values():
            wait(output_layer, ())
        batch = context.batch
        calculate_entropy = bool(batch.meta.get("calculate_entropy", False))
        weight = output_layer.weight if output_weight is None else output_weight
        assert isinstance(weight, Tensor)
        group = self.groups.pg.tp
        first_row = int(group.rank()) * weight.shape[0]
        rows = max(0, min(weight.shape[0], self.vocab_size - first_row))
        result = next_token_log_probs(
            context.pack(self._gather(hidden_states, every_rank_the_same=False)),
            # Without the rows by which Megatron pads the vocabulary.
            weight if rows == weight.shape[0] else weight[:rows],
            labels_without_values(batch.labels, context.adapters) if context.adapters else batch.labels,
            temperature=batch.temperature,
            chunk_tokens=self.chunk_tokens,
            calculate_entropy=calculate_entropy,
            adapters=context.adapters,
            shard=None if group.size() == 1 else vocabulary_shard(group, first_row, self.vocab_size),
        )
        entropy = result.entropy if result.entropy is not None else torch.zeros_like(result.log_probs)
        return result.log_probs, entropy

    def _gather(self, hidden: Tensor, *, every_rank_the_same: bool) -> Tensor:
        """All columns, on every tensor-parallel rank.

        Args:
            every_rank_the_same: every rank computes the same from them, and so already has the whole gradient. When False,
                each has a part of it, and the parts are added up.
        """
        group = self.groups.pg.tp
        if group.size() == 1:
            return hidden
        return all_gather(hidden, group, sum_gradients=not every_rank_the_same)


class CriticOutputLayer(nn.Module):
    """A critic's head, which replaces the language-model head.

    Its parameters are the same on every tensor-parallel rank, and so are their gradients.

    Attributes:
        value_head: its parameters, in ``param_dtype``; values are computed in float32.
    """

    def __init__(self, hidden_size: int, config: Any) -> None:
        super().__init__()
        self.config = config
        self.value_head = ValueHead(hidden_size)


def as_model_output(outputs: Tensor, laid_out: LaidOut) -> ModelOutput:
    """The rows of :class:`OutputProcessor` by name."""
    values = outputs[-1] if "values" in laid_out.heads else None
    if "log_probs" not in laid_out.heads:
        return ModelOutput(values=values)
    calculate_entropy = bool(laid_out.batch.meta.get("calculate_entropy", False))
    return ModelOutput(outputs[0], outputs[1] if calculate_entropy else None, values)
