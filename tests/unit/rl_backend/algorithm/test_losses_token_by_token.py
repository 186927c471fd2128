"""Losses under every combination of their options are what the formulas of the papers give, written out token by token."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_backend.algorithm import (
    LOSS_AGG_MODES,
    cispo_policy_loss,
    clipped_policy_loss,
    gspo_policy_loss,
    policy_loss,
    sft_loss,
    value_loss,
)
from rl_backend.contracts import EPISODE_SHARE, PackedBatch
from tests.support.rl_batches import batch_meta, pack, random_sequences

EPISODES = (0, 0, 1, 2, 3, 3)
"""Of each of the six sequences."""
DP_SIZE = 3

type Token = Mapping[str, Tensor]


def tokens_of(fields: Mapping[str, Tensor], batch: PackedBatch) -> list[list[Token]]:
    """The selected tokens of each sequence, with a 0-d value of each field."""
    parts = {name: batch.split(values) for name, values in fields.items()}
    rows = range(batch.num_sequences)
    return [
        [
            {name: values[row][place] for name, values in parts.items()}
            for place in range(len(parts["loss_mask"][row]))
            if parts["loss_mask"][row][place] != 0
        ]
        for row in rows
    ]


def mean(losses: Sequence[Sequence[Tensor]], mode: str, scale: float | None, meta: Mapping[str, Any], whole: bool) -> Tensor:
    """Of the losses of each sequence's tokens.

    Args:
        whole: the sequences of an episode count as one.
    """
    if whole:
        losses = [
            [each for row, own in zip(EPISODES, losses, strict=True) if row == episode for each in own]
            for episode in range(4)
        ]
    if mode in ("token-mean", "sum"):
        total = sum((each for own in losses for each in own), torch.zeros((), dtype=torch.float64))
        return total if mode == "sum" else total / meta["batch_num_tokens"]
    total = torch.zeros((), dtype=torch.float64)
    for own in losses:
        of_sequence = sum(own, torch.zeros((), dtype=torch.float64))
        if mode == "seq-mean-token-mean" and own:
            of_sequence = of_sequence / len(own)
        if mode == "seq-mean-token-sum-norm":
            of_sequence = of_sequence / scale  # type: ignore[operator]
        total = total + of_sequence
    return total / meta["global_batch_size"]


def clip(value: Tensor, low: float, high: float) -> Tensor:
    return torch.minimum(torch.maximum(value, value.new_tensor(low)), value.new_tensor(high))


def surrogate_of(token: Token, own: Sequence[Token], options: Mapping[str, Any]) -> Tensor:
    kind, low, high = options["surrogate"], 1 - options["clip_ratio_low"], 1 + options["clip_ratio_high"]
    advantage, log_prob = token["advantages"], token["log_probs"]
    ratio = (log_prob - token["old_log_probs"]).exp()
    if kind == "cispo":
        return -clip(ratio, low, high).detach() * advantage * log_prob
    if kind == "gspo":
        # The geometric mean, whose gradient at a token is as if the ratio were that token's own.
        of_sequence = math.exp(sum(float((each["log_probs"] - each["old_log_probs"]).detach()) for each in own) / len(own))
        ratio = of_sequence * (log_prob - log_prob.detach()).exp()
    loss = torch.maximum(-advantage * ratio, -advantage * clip(ratio, low, high))
    if options.get("clip_ratio_c") is not None and advantage < 0:
        loss = torch.minimum(loss, -advantage * options["clip_ratio_c"])
    return loss


def weight_of(token: Token, own: Sequence[Token], options: Mapping[str, Any]) -> float:
    """Importance weight of the trainer's policy over the engine's."""

    def ratio(each: Token) -> float:
        return math.exp(float(each["old_log_probs"] - each["rollout_log_probs"]))

    veto = options.get("importance_veto")
    if veto is not None and min(map(ratio, own)) < veto:
        return 0.0
    found = math.prod(map(ratio, own)) if options.get("importance_level") == "sequence" else ratio(token)
    if options.get("tis_cap") is not None:
        return min(found, options["tis_cap"])
    if options.get("mis_bounds") is not None:
        return found if options["mis_bounds"][0] <= found <= options["mis_bounds"][1] else 0.0
    return 1.0


def kl_of(token: Token, kind: str) -> Tensor:
    difference = token["log_probs"] - token["ref_log_probs"]
    kinds: Mapping[str, Callable[[], Tensor]] = {
        "k1": lambda: difference,
        "k2": lambda: difference**2 / 2,
        "k3": lambda: torch.minimum((-difference).exp() - 1 + difference, difference.new_tensor(10.0)),
        "abs": lambda: difference.abs(),
    }
    if not kind.endswith("+"):
        return kinds[kind]()
    through = difference**2 / 2
    return kinds[kind[:-1]]().detach() + through - through.detach()


SURROGATES = {"ppo": clipped_policy_loss, "gspo": gspo_policy_loss, "cispo": cispo_policy_loss}


def drawn_options(number: int) -> tuple[dict[str, Any], bool, bool]:
    """Options away from their defaults, whether episodes count whole, and whether advantages are one of each sequence."""
    draw = random.Random(number)
    surrogate = [*SURROGATES][number % 3]
    mode = [each for each in LOSS_AGG_MODES if each != "sum"][number % 4]  # whose metric is a mean
    options: dict[str, Any] = {
        "surrogate": surrogate,
        "clip_ratio_low": draw.choice([0.1, 0.35, 0.6]),
        "clip_ratio_high": draw.choice([0.15, 0.5]),
        "loss_agg_mode": mode,
        "loss_scale_factor": 7.0 if mode == "seq-mean-token-sum-norm" else None,
        "kl_coef": draw.choice([0.0, 0.2, 1.5]),
        "kl_type": draw.choice(["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+"]),
        "entropy_coef": draw.choice([0.0, 0.3, -0.2]),
        "clip_ratio_c": draw.choice([None, 1.3, 2.0]) if surrogate == "ppo" else None,
        "importance_veto": draw.choice([None, 0.55]),
    }
    weights = draw.choice([{}, {"tis_cap": 1.2}, {"mis_bounds": (0.7, 1.4)}])
    level = {"importance_level": draw.choice(["token", "sequence"])} if weights else {}
    return {**options, **weights, **level}, draw.random() < 0.5, draw.random() < 0.5


@pytest.mark.shows("algorithms: the policy loss is that of the papers token by token, under all of its options together")
@pytest.mark.parametrize("number", range(36))
def test_the_policy_loss_under_drawn_options(number: int) -> None:
    options, whole, by_sequence = drawn_options(number)
    sequences = random_sequences(50 + number)
    meta = batch_meta(sequences, DP_SIZE) | {"global_batch_size": 4 if whole else len(sequences)}
    output, batch = pack(sequences, meta)
    fields, of_sequences = dict(batch.token_fields), dict[str, Tensor]()
    if by_sequence:
        del fields["advantages"]
        of_sequences["advantages"] = torch.tensor([0.7, -1.2, 1.9, 0.4, -0.3, 2.0], dtype=torch.float64)
        given = of_sequences["advantages"].repeat_interleave(batch.seq_lens)
    else:
        given = fields["advantages"]
    if whole:
        counts = [int((each.token_fields["loss_mask"] != 0).sum()) for each in sequences]
        totals = [sum(count for count, own in zip(counts, EPISODES, strict=True) if own == episode) for episode in EPISODES]
        shares = [count / total if total else 1.0 for count, total in zip(counts, totals, strict=True)]
        of_sequences[EPISODE_SHARE] = torch.tensor(shares, dtype=torch.float64)
    data = PackedBatch(batch.input_ids, batch.seq_lens, fields, of_sequences, meta)
    loss, metrics = policy_loss(output, data, **{**options, "surrogate": SURROGATES[options["surrogate"]]})

    assert output.log_probs is not None and output.entropy is not None
    named = {**fields, "advantages": given, "log_probs": output.log_probs, "entropy": output.entropy}
    of_tokens = tokens_of(named, batch)
    terms = [[surrogate_of(token, own, options) * weight_of(token, own, options) for token in own] for own in of_tokens]
    rest = [
        [options["kl_coef"] * kl_of(token, options["kl_type"]) - options["entropy_coef"] * token["entropy"] for token in own]
        for own in of_tokens
    ]
    both = [[a + b for a, b in zip(*own, strict=True)] for own in zip(terms, rest, strict=True)]
    scale = options["loss_scale_factor"]
    expected = DP_SIZE * mean(both, options["loss_agg_mode"], scale, meta, whole)
    leaves = output.log_probs, output.entropy
    ours, theirs = (
        torch.autograd.grad(each, leaves, allow_unused=True, materialize_grads=True) for each in (loss, expected)
    )
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-10, atol=1e-12)
    for found, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-12)
    total, weight = metrics["policy_loss"]
    optimised = mean(terms, options["loss_agg_mode"], scale, meta, whole)
    assert (total / weight).item() == pytest.approx(optimised.item(), rel=1e-9)
    weights = [weight_of(token, own, options) for own in of_tokens for token in own]
    if options.keys() & {"tis_cap", "mis_bounds"} or options["importance_veto"] is not None:
        for name, values in (("importance_weight", weights), ("importance_dropped", [each == 0 for each in weights])):
            total, weight = metrics[name]
            assert (total / weight).item() == pytest.approx(sum(values) / len(values), rel=1e-9)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("cliprange", [None, 0.3])
def test_losses_of_values_and_of_examples_in_every_aggregation(mode: str, cliprange: float | None) -> None:
    sequences = random_sequences(90)
    meta = batch_meta(sequences, DP_SIZE)
    output, batch = pack(sequences, meta)
    assert output.values is not None and output.log_probs is not None
    scale = {"loss_scale_factor": 5.0} if mode == "seq-mean-token-sum-norm" else {}
    named = {**batch.token_fields, "values": output.values, "log_probs": output.log_probs}

    def of_value(token: Token) -> Tensor:
        value, old, wanted = (token[name] for name in ("values", "old_values", "returns"))
        if cliprange is None:
            return (value - wanted) ** 2 / 2
        clipped = torch.minimum(torch.maximum(value, old - cliprange), old + cliprange)
        return torch.maximum((value - wanted) ** 2, (clipped - wanted) ** 2) / 2

    for found, leaf, of_token in (
        (value_loss(output, batch, cliprange_value=cliprange, loss_agg_mode=mode, **scale)[0], output.values, of_value),
        (sft_loss(output, batch, loss_agg_mode=mode, **scale)[0], output.log_probs, lambda token: -token["log_probs"]),
    ):
        losses = [[of_token(token) for token in own] for own in tokens_of(named, batch)]
        expected = DP_SIZE * mean(losses, mode, scale.get("loss_scale_factor"), meta, False)
        torch.testing.assert_close(found.detach(), expected.detach(), rtol=1e-10, atol=0)
        ours, theirs = (torch.autograd.grad(each, leaf)[0] for each in (found, expected))
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
