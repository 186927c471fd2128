"""Distillation from a teacher's top-k: the KL of K tokens and one bucket, and its gradient by finite differences."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rl_backend.algorithm.policy import distillation_loss, top_k_kl
from rl_backend.contracts import TARGET_IDS, BatchError, ConfigError, ModelOutput, TokenSequence
from rl_backend.data import pack

T, K, V = 6, 4, 9


def distributions(seed: int) -> Tensor:
    return torch.randn(T, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


TEACHER = distributions(1).log_softmax(-1)
TOP = TEACHER.topk(K)


def plain_kl(logits: Tensor, direction: str) -> Tensor:
    """Of distributions over K + 1 events, by their probabilities."""
    chosen = torch.zeros(T, V, dtype=torch.bool).scatter(1, TOP.indices, True)
    events = []
    for probabilities in (TEACHER.exp(), logits.softmax(-1)):
        events.append(torch.cat([probabilities.gather(1, TOP.indices), (probabilities * ~chosen).sum(1, keepdim=True)], 1))
    first, second = events if direction == "forward" else events[::-1]
    return (first * (first / second).log()).sum(1)


@pytest.mark.shows("algorithms: forward and reverse KL to a teacher's top-k and the rest, checked by finite differences")
@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_the_kl_is_that_of_k_tokens_and_the_rest_and_its_gradient_that_of_finite_differences(direction: str) -> None:
    logits, everything = distributions(2).requires_grad_(), torch.ones(T, K, dtype=torch.bool)

    def kl(logits: Tensor) -> Tensor:
        return top_k_kl(logits.log_softmax(-1).gather(1, TOP.indices), TOP.values, everything, direction)

    torch.testing.assert_close(kl(logits), plain_kl(logits, direction))
    assert torch.autograd.gradcheck(kl, (logits,))
    (gradient,) = torch.autograd.grad(kl(logits).sum(), [logits])
    assert gradient.abs().sum() > 0.1


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_a_student_like_its_teacher_has_neither_loss_nor_gradient(direction: str) -> None:
    logits = TEACHER.clone().requires_grad_()
    for k in (1, K, V):
        values, indices = TEACHER.topk(k)
        kl = top_k_kl(
            logits.log_softmax(-1).gather(1, indices).float(), values, torch.ones(T, k, dtype=torch.bool), direction
        )
        (gradient,) = torch.autograd.grad(kl.sum(), [logits])
        torch.testing.assert_close(kl, torch.zeros_like(kl), rtol=0, atol=1e-6)
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-6)


def test_fewer_than_k_tokens_are_marked_and_the_others_not_read() -> None:
    log_probs = distributions(2).log_softmax(-1).gather(1, TOP.indices)
    chosen = torch.ones(T, K, dtype=torch.bool)
    chosen[:, 2:] = False
    expected = top_k_kl(log_probs[:, :2], TOP.values[:, :2], chosen[:, :2])
    spoilt = TOP.values.clone()
    spoilt[:, 2:] = torch.nan
    leaf = log_probs.clone()
    leaf[:, 2:] = torch.nan
    leaf.requires_grad_()
    found = top_k_kl(leaf, spoilt, chosen)
    torch.testing.assert_close(found, expected)
    (gradient,) = torch.autograd.grad(found.sum(), [leaf])
    assert torch.isfinite(gradient).all() and not gradient[:, 2:].any()


def row(mask: Tensor) -> TokenSequence:
    fields = {TARGET_IDS: TOP.indices, "teacher_log_probs": TOP.values.float(), "loss_mask": mask}
    return TokenSequence(torch.arange(T), fields)


def test_the_loss_is_the_mean_over_selected_tokens_or_their_sum() -> None:
    mask = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0, 1.0])
    logits = distributions(2)
    output = ModelOutput(log_probs=logits.log_softmax(-1).gather(1, TOP.indices).float().requires_grad_())
    data = pack([row(mask)], {"dp_size": 1, "batch_num_tokens": 4.0})
    total = (plain_kl(logits, "reverse") * mask).sum().float()
    loss, metrics = distillation_loss(output, data, direction="reverse")
    torch.testing.assert_close(loss, total / 4)
    value = metrics["distillation_kl"]
    assert isinstance(value, tuple) and [float(each) for each in value] == pytest.approx([float(total), 4.0], rel=1e-5)
    torch.testing.assert_close(distillation_loss(output, data, direction="reverse", loss_agg_mode="sum")[0], total)


def test_what_cannot_work_is_refused_by_name() -> None:
    data = pack([row(torch.ones(T))], {"dp_size": 1, "batch_num_tokens": 6.0})
    with pytest.raises(BatchError, match=r"teacher_log_probs has shape \(6, 4\) and log_probs \(6,\)"):
        distillation_loss(ModelOutput(log_probs=torch.zeros(T)), data)
    with pytest.raises(ConfigError, match="direction='both': must be one of forward, reverse"):
        distillation_loss(ModelOutput(log_probs=torch.zeros(T, K)), data, direction="both")
