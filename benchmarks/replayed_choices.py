"""Training on the keys and experts that transformers chose, step by step.

Two tokens may be equal to an indexer, or two experts to a router, but for rounding. Sides that choose differently there
train other models from then on, and say nothing about each other any more. With the choices of one recorded and replayed in
the other they must agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaIndexer, GlmMoeDsaMoE

from rl_backend.algorithm import sft_loss
from rl_backend.checkpoint.hf_reader import read_hf_config
from rl_backend.contracts import PackedBatch
from rl_backend.contracts.indexed_keys import KEYS, key_fields
from rl_backend.contracts.routed_experts import ROUTES, ROUTES_LAYERS
from rl_backend.data import pack_plan
from rl_backend.lab.parity.compare import Tolerances
from rl_backend.lab.parity.config import ParityConfig, make_sequences, plan_batch
from rl_backend.lab.parity.record import SideRecord
from rl_backend.runtime import create_runtime


@dataclass(frozen=True)
class Choices:
    """What transformers' GLM-5 chose, in the order of the calls.

    Attributes:
        keys: of every indexer, (tokens, keys) places in the sequence, those behind a token included where it sees fewer.
        experts: of every router, (tokens, top_k).
    """

    keys: list[Tensor] = field(default_factory=list)
    experts: list[Tensor] = field(default_factory=list)


@contextmanager
def kept_choices() -> Iterator[Choices]:
    """What is chosen meanwhile."""
    kept = Choices()

    def keeping(original: Callable[..., Any], keep: Callable[[Any], None]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            chosen = original(*args, **kwargs)
            keep(chosen)
            return chosen

        return wrapped

    originals = GlmMoeDsaIndexer.forward, GlmMoeDsaMoE.route_tokens_to_experts
    GlmMoeDsaIndexer.forward = keeping(originals[0], lambda chosen: kept.keys.append(chosen[0]))
    GlmMoeDsaMoE.route_tokens_to_experts = keeping(originals[1], lambda chosen: kept.experts.append(chosen[0]))
    try:
        yield kept
    finally:
        GlmMoeDsaIndexer.forward, GlmMoeDsaMoE.route_tokens_to_experts = originals


def compare_on_choices(config: ParityConfig, reference: SideRecord, chosen: Choices) -> dict[str, Any]:
    """Largest relative differences from ``reference`` in all steps, with its choices.

    Args:
        config: with the native runtime on one rank as candidate.
        chosen: as sequences pass through one by one, once before the first step and in each step.

    Returns:
        ``max_loss_rel_diff``, ``max_grad_norm_rel_diff``, and the first ``step`` over the tolerances, or None.
    """
    steps = list(_train_on(config, chosen))
    tolerances = Tolerances.of(config.dtype)
    differences = [
        (abs(loss - right) / abs(right), abs(norm - right_norm) / right_norm)
        for (loss, norm), right, right_norm in zip(steps, reference.losses, reference.grad_norms, strict=True)
    ]
    over = [
        step
        for step, found in enumerate(differences)
        if not all(amount <= most for amount, most in zip(found, tolerances.at_step(step), strict=True))
    ]
    return {
        "max_loss_rel_diff": max(loss for loss, _ in differences),
        "max_grad_norm_rel_diff": max(norm for _, norm in differences),
        "step": over[0] + 1 if over else None,
    }


def _train_on(config: ParityConfig, chosen: Choices) -> Iterator[tuple[float, float]]:
    """Loss and gradient norm of each step, in this process."""
    torch.set_num_threads(config.threads)
    fields = read_hf_config(config.model)
    runtime = create_runtime(config.runtime_config(config.candidate))
    try:
        handle = runtime.build_model()
        (batches,) = pack_plan(make_sequences(config, fields), plan_batch(config, 1))
        # In each step, and before the first one for the activations.
        passes = (config.steps + 1) * sum(batch.num_sequences for batch in batches)
        keys, experts = (_by_sequence(calls, passes, config.steps) for calls in (chosen.keys, chosen.experts))
        for _ in range(config.steps):
            replayed = [_with_choices(batch, keys, experts, int(fields["index_topk"])) for batch in batches]
            with runtime.train_mode(handle):
                runtime.zero_grad(handle)
                loss = runtime.forward_backward(handle, replayed, sft_loss, router_replay="replay").loss
            yield loss, runtime.optimizer_step(handle).grad_norm
            runtime.lr_scheduler_step(handle)
    finally:
        runtime.close()


def _by_sequence(calls: list[Tensor], passes: int, steps: int) -> Iterator[list[Tensor]]:
    """What the layers that choose chose for each sequence of each step, sequence after sequence."""
    layers, rest = divmod(len(calls), passes)
    assert layers > rest == 0, "every layer that chooses does so in every pass"
    for first in range(len(calls) // (steps + 1), len(calls), layers):
        yield calls[first : first + layers]


def _with_choices(
    batch: PackedBatch, keys: Iterator[list[Tensor]], experts: Iterator[list[Tensor]], top_k: int
) -> PackedBatch:
    """The batch with the next choices."""
    chosen = [torch.stack([_keys(layer, top_k) for layer in next(keys)], 1) for _ in range(batch.num_sequences)]
    whole = torch.cat([key_fields(each, len(each))[KEYS] for each in chosen])
    routes = torch.cat([torch.stack(next(experts), 1) for _ in range(batch.num_sequences)])
    recorded = {**batch.token_fields, KEYS: whole, ROUTES: routes}
    return replace(batch, token_fields=recorded, meta={**batch.meta, ROUTES_LAYERS: "moe"})


def _keys(chosen: Tensor, top_k: int) -> Tensor:
    """(tokens, keys) places -> (tokens, top_k), those that a token sees first, and -1 behind."""
    seen = chosen.where(chosen <= torch.arange(len(chosen))[:, None], -1).sort(-1, descending=True).values
    return torch.nn.functional.pad(seen, (0, top_k - seen.shape[1]), value=-1)
