"""Detects sides that differ from transformers only because two experts, or two groups, tie up to rounding.

Scores of transformers in float64 say by how much a token's last expert is ahead of the next one: its margin. A side in
float32 may choose differently where that is small, and from there on it trains another model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from benchmarks.parity_float64 import float64_steps
from rl_backend.algorithm import sft_loss
from rl_backend.checkpoint.hf_reader import read_hf_config
from rl_backend.data import pack_plan
from rl_backend.lab.parity.config import ParityConfig, make_sequences, plan_batch
from rl_backend.runtime import create_runtime

MARGIN = 1e-5
"""Below it a choice is one of rounding."""

GROUPED_ROUTERS = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")
"""Families whose routers choose groups by their two best scores, and experts within."""


class Choice(NamedTuple):
    """What a router chooses for T tokens.

    Attributes:
        experts: (T, num_experts) bool.
        margins: (T,) by how much the worst chosen expert or group is ahead of the best that is not chosen.
    """

    experts: Tensor
    margins: Tensor


class Parting(NamedTuple):
    """The first step in which a side routes a token differently.

    Attributes:
        tokens: so many, in all layers.
        largest_margin: of these.
    """

    step: int
    tokens: int
    largest_margin: float


def first_parting(config: ParityConfig) -> Parting | None:
    """Where the candidate of ``config``, on one rank in this process, routes differently from transformers in float64.

    None where it never does.
    """
    observed: list[Choice] = []
    float64_steps(config, lambda model: keep_choices(model, observed))
    found = list(routes_of_candidate(config))
    per_step = len(observed) // len(found)
    for step, routes in enumerate(found):
        choices = observed[step * per_step : (step + 1) * per_step]
        margins = torch.cat([_margins_of_others(*pair) for pair in zip(choices, routes, strict=True)])
        if len(margins):
            return Parting(step, len(margins), float(margins.max()))
    return None


def keep_choices(model: PreTrainedModel, kept: list[Choice]) -> None:
    """Adds what each router chooses, layer after layer, for every sequence that passes through."""

    def keep(gate: nn.Module, _: object, logits: Tensor) -> None:
        settings = model.config
        bias = gate.get_buffer("e_score_correction_bias")
        scores = logits.detach().sigmoid() + bias
        kept.append(choose(scores, settings.n_group, settings.topk_group, settings.num_experts_per_tok))

    for name, module in model.named_modules():
        if name.endswith(".mlp.gate"):
            module.register_forward_hook(keep)


def choose(scores: Tensor, groups: int, chosen_groups: int, top_k: int) -> Choice:
    """(T, num_experts) scores, bias included -> the choice within groups (DeepSeek-V3, arXiv 2412.19437)."""
    grouped = scores.unflatten(-1, (groups, -1))
    of_groups = grouped.topk(2, dim=-1).values.sum(-1)
    open_groups, group_margins = _best(of_groups, chosen_groups)
    allowed = open_groups.repeat_interleave(grouped.shape[-1], dim=-1)
    experts, margins = _best(scores.masked_fill(~allowed, -torch.inf), top_k)
    return Choice(experts, torch.minimum(group_margins, margins))


def _best(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(T, N) -> which are the ``count`` highest, and by how much they are ahead; infinite where there are no others."""
    ordered = scores.sort(-1, descending=True)
    taken = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, ordered.indices[:, :count], True)
    if count == scores.shape[-1]:
        return taken, scores.new_full(scores.shape[:1], torch.inf)
    return taken, ordered.values[:, count - 1] - ordered.values[:, count]


def routes_of_candidate(config: ParityConfig) -> Iterator[Sequence[Tensor]]:
    """Of each step, (L, top_k) experts of each layer with experts of each sequence, as sequences pass through one by one."""
    torch.set_num_threads(config.threads)
    runtime = create_runtime(config.runtime_config(config.candidate))
    try:
        handle = runtime.build_model()
        sequences = make_sequences(config, read_hf_config(config.model))
        (batches,) = pack_plan(sequences, plan_batch(config, 1))
        for _ in range(config.steps):
            with runtime.train_mode(handle):
                runtime.zero_grad(handle)
                result = runtime.forward_backward(handle, batches, sft_loss, router_replay="record")
            runtime.optimizer_step(handle)
            runtime.lr_scheduler_step(handle)
            yield [layer for routes in result.output("routed_experts") for layer in routes.unbind(1)]
    finally:
        runtime.close()


def _margins_of_others(choice: Choice, routes: Tensor) -> Tensor:
    """Margins of the tokens whose experts are not those of ``choice``."""
    taken = torch.zeros_like(choice.experts).scatter_(1, routes.long(), True)
    return choice.margins[(taken != choice.experts).any(-1)]
