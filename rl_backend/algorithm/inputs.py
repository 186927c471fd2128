"""What losses read from a model's output and a batch, with errors that say how to provide it."""

from __future__ import annotations

from torch import Tensor

from rl_backend.algorithm.sequences import broadcast_to_tokens
from rl_backend.contracts import BatchError, ModelOutput, PackedBatch


def required_log_probs(model_output: ModelOutput) -> Tensor:
    """``model_output.log_probs``; raises :class:`BatchError` when the model did not give them."""
    if model_output.log_probs is None:
        raise BatchError("the model output has no log_probs; this loss needs a model with a language-model head")
    return model_output.log_probs


def required_values(model_output: ModelOutput) -> Tensor:
    """``model_output.values``; raises :class:`BatchError` when the model did not give them."""
    if model_output.values is None:
        raise BatchError("the model output has no values; this loss needs a critic: build_model(head='values')")
    return model_output.values


def differentiable_entropy(model_output: ModelOutput) -> Tensor:
    """``model_output.entropy``, with a gradient wherever ``log_probs`` has one; raises :class:`BatchError` otherwise."""
    entropy = model_output.entropy
    if entropy is None:
        raise BatchError("entropy_coef needs the entropy; set meta['calculate_entropy'] to True in every micro-batch")
    if required_log_probs(model_output).requires_grad and not entropy.requires_grad:
        raise BatchError("entropy_coef needs an entropy with a gradient; this model gives it without one")
    return entropy


def token_advantages(data: PackedBatch) -> Tensor:
    """(T,): the token field ``advantages``, or else the sequence field of that name, (B,), at all tokens.

    Raises:
        BatchError: neither is there, or the shape is not (T,) or (B,).
    """
    if "advantages" not in data.token_fields and "advantages" in data.sequence_fields:
        return broadcast_to_tokens(data.sequence_fields["advantages"], data.seq_lens)
    return token_vector(data, "advantages")


def token_vector(data: PackedBatch, name: str) -> Tensor:
    """A token field that must be (T,); raises :class:`BatchError` when it is missing or has more dimensions."""
    value = data.token_field(name)
    if value.dim() != 1:
        raise BatchError(f"token field {name!r} has shape {tuple(value.shape)}; expected (T,)", name=name)
    return value
