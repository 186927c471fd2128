"""Detects shapes that amplify rounding: distance of float32 sides from transformers in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from rl_backend.algorithm import sft_loss
from rl_backend.checkpoint.hf_reader import own_name, read_hf_config
from rl_backend.contracts import ModelOutput
from rl_backend.data import pack_plan
from rl_backend.lab.parity.compare import SideRecord
from rl_backend.lab.parity.config import ParityConfig, make_sequences, plan_batch


class Steps(NamedTuple):
    """Losses and gradient norms of each step, and the gradients of the first, under the names of files."""

    losses: Sequence[float]
    grad_norms: Sequence[float]
    gradients: Mapping[str, Tensor]


def float64_steps(config: ParityConfig) -> Steps:
    """Trains on the batch of ``config`` as its sides do, everything in float64. In this process, on the CPU.

    The frequencies of rotary embeddings alone are rounded to float32, as they are on every side.
    """
    sequences = make_sequences(config, read_hf_config(config.model))
    (batches,) = pack_plan(sequences, plan_batch(config, 1))
    model = AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.float64, experts_implementation="eager").train()
    optimizer = _adamw(model, config)
    losses, norms = [], []
    gradients: Mapping[str, Tensor] = {}
    for _ in range(config.steps):
        optimizer.zero_grad()
        loss = 0.0
        for batch in batches:
            with Widened():
                log_probs = [_log_probs(model, sequence) for sequence in batch.split(batch.input_ids)]
                part, _ = sft_loss(ModelOutput(log_probs=torch.cat(log_probs)), batch)
                part.backward()
            loss += part.item()
        losses.append(loss)
        gradients = gradients or _gradients(model, config)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_grad)))
        optimizer.step()
    return Steps(losses, norms, gradients)


def distance(exact: Steps, found: SideRecord) -> dict[str, float]:
    """Relative differences: the largest of a step, and that of the whole gradient of the first step, in the 2-norm."""
    squares = sum(float((found.gradients[name] - right).square().sum()) for name, right in exact.gradients.items())
    return {
        "gradient_rel_diff": math.sqrt(squares) / exact.grad_norms[0],
        "max_loss_rel_diff": _largest(exact.losses, found.losses),
        "max_grad_norm_rel_diff": _largest(exact.grad_norms, found.grad_norms),
    }


class Widened(TorchFunctionMode):
    """Models compute norms and recurrences in float32 whatever their dtype is; here these are float64 too."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        return func(*map(_wider, args), **{name: _wider(value) for name, value in (kwargs or {}).items()})


def _wider(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def _log_probs(model: PreTrainedModel, sequence: Tensor) -> Tensor:
    logits = model(sequence[None], use_cache=False).logits[0]
    chosen = logits[:-1].log_softmax(-1).gather(1, sequence[1:, None]).squeeze(1)
    return torch.cat([chosen, chosen.new_zeros(1)])


def _gradients(model: PreTrainedModel, config: ParityConfig) -> dict[str, Tensor]:
    model_type = read_hf_config(config.model).get("model_type")
    held = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {own_name(model_type, name): gradient for name, gradient in revert_weight_conversion(model, held).items()}


def _adamw(model: PreTrainedModel, config: ParityConfig) -> torch.optim.AdamW:
    """With the decay groups of the sides: no biases, nothing of one dimension."""
    exempt: list[Tensor] = []
    decayed: list[Tensor] = []
    for name, parameter in model.named_parameters():
        (exempt if name.endswith(".bias") or parameter.dim() == 1 else decayed).append(parameter)
    settings = config.optimizer
    groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": exempt, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps)


def _largest(exact: Sequence[float], found: Sequence[float]) -> float:
    differences = [abs(mine - right) / abs(right) for right, mine in zip(exact, found, strict=True)]
    return max(differences) if all(map(math.isfinite, differences)) else math.inf
