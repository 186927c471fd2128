"""Output heads: log-probs and values in place of Megatron's logits, as a loss takes them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rl_backend.contracts import ModelOutput
from rl_backend.parallel.collectives import all_gather
from rl_backend.parallel.tensor import vocabulary_shard
from rl_backend.primitive.log_prob import next_token_log_probs
from rl_backend.primitive.value_head import ValueHead, labels_without_values, values_of_tenants
from rl_backend.runtime.bridge.megatron.groups import BridgeGroups
from rl_backend.runtime.bridge.passes.batch import LaidOut


@dataclass(frozen=True)
class OutputProcessor:
    """Megatron's ``output_processor``, in place of the logits; ``chunk_tokens`` is how many tokens' exist at one time."""

    groups: BridgeGroups
    vocab_size: int
    chunk_tokens: int

    def __call__(
        self, *, hidden_states: Tensor, output_layer: nn.Module, output_weight: Tensor | None, context: LaidOut, **_: Any
    ) -> Tensor:
        """Megatron calls this on the last stage for (columns, rows, H), or this rank's part of them. Returns float32 rows:
        (K + 1 + 2 N, T) log-probs of K targets, entropy, and ids and log-probs of the N likeliest tokens, before these with
        cuts what was cut; or (1, T) values; or all of them.
        """
        # One tensor, as the pipeline schedules want.
        found = list[Tensor]()
        if "log_probs" in context.heads:
            found += self._log_probs(hidden_states, output_layer, output_weight, context)
        if "values" in context.heads:
            whole = context.pack(all_gather(hidden_states, self.groups.pg.tp, sum_gradients=False))
            if isinstance(output_layer, CriticOutputLayer):
                values = output_layer.value_head(whole)
            else:
                values = whole.new_zeros(whole.shape[0], dtype=torch.float32)
            found.append(values_of_tenants(whole, values, context.adapters, counts=self.groups.pg.tp.rank() == 0))
        return torch.stack(found)

    def _log_probs(
        self, hidden_states: Tensor, output_layer: nn.Module, output_weight: Tensor | None, context: LaidOut
    ) -> list[Tensor]:
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
            context.pack(all_gather(hidden_states, group, sum_gradients=True)),
            # Without the rows by which Megatron pads the vocabulary.
            weight if rows == weight.shape[0] else weight[:rows],
            labels_without_values(batch.labels, context.adapters) if context.adapters else batch.labels,
            temperature=batch.temperature,
            chunk_tokens=self.chunk_tokens,
            calculate_entropy=calculate_entropy,
            adapters=context.adapters,
            top=batch.num_top,
            cuts=batch.cuts,
            shard=None if group.size() == 1 else vocabulary_shard(group, first_row, self.vocab_size),
        )
        log_probs = [result.log_probs] if batch.labels.dim() == 1 else list(result.log_probs.unbind(1))
        entropy = torch.zeros_like(log_probs[0]) if result.entropy is None else result.entropy
        disagreement = [] if result.mask_disagreement is None else [result.mask_disagreement]
        # As numbers of the same kind: ids of vocabularies up to 2 ** 24 are exact.
        top = [] if result.top is None else [row for values in result.top for row in values.to(entropy.dtype).unbind(1)]
        return [*log_probs, entropy, *disagreement, *top]


class CriticOutputLayer(nn.Module):
    """A critic's head in place of the language-model head: the same, with its gradients, on every tensor-parallel rank."""

    def __init__(self, hidden_size: int, config: Any) -> None:
        super().__init__()
        self.config = config
        self.value_head = ValueHead(hidden_size)


def as_model_output(outputs: Tensor, laid_out: LaidOut) -> ModelOutput:
    values = outputs[-1] if "values" in laid_out.heads else None
    if "log_probs" not in laid_out.heads:
        return ModelOutput(values=values)
    labels, calculate_entropy = laid_out.batch.labels, bool(laid_out.batch.meta.get("calculate_entropy", False))
    log_probs, count = (outputs[0], 1) if labels.dim() == 1 else (outputs[: labels.shape[1]].t(), labels.shape[1])
    entropy, num_top = outputs[count] if calculate_entropy else None, laid_out.batch.num_top
    has_cuts = laid_out.batch.cuts is not None
    found = ModelOutput(log_probs, entropy, values, mask_disagreement=outputs[count + 1] if has_cuts else None)
    if not num_top:
        return found
    first = count + 1 + has_cuts
    top_ids, top_log_probs = outputs[first : first + 2 * num_top].view(2, num_top, -1).mT
    return found._replace(top_ids=top_ids.to(torch.int64), top_log_probs=top_log_probs)
