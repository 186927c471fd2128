"""The KL to a reference in examples/grpo.py: where it goes, and that it is trained on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar, Self

import pytest
import torch

from actors import Loss
from actors.rollout.messages import Sample, VersionSpan
from actors.train.model import Update
from examples import grpo
from examples.grpo import GRPOConfig
from rl_backend.contracts import Metric, ModelOutput, TokenSequence
from rl_backend.data.micro_batches import pack
from tests.support.sft_batches import random_token_sequences


def config(**changes: Any) -> GRPOConfig:
    paths = {"model": "m", "dataset": "d", "reward": "r", "run_dir": "x"}
    return GRPOConfig(**{**paths, "steps": 1, "max_prompt_tokens": 4, "max_response_tokens": 4, **changes})


def gradient(made: GRPOConfig) -> torch.Tensor:
    """Of the configuration's loss, for a policy that has left its reference and has no advantage."""
    (sequence,) = random_token_sequences((6,), 128, 0)
    log_probs = torch.full((6,), -2.0)
    fields = {"old_log_probs": log_probs, "ref_log_probs": log_probs - 1.0, "advantages": torch.zeros(6)}
    meta = {"batch_num_tokens": 5.0, "global_batch_size": 1, "dp_size": 1}
    policy = log_probs.clone().requires_grad_()
    loss, _ = made.loss_function()(ModelOutput(log_probs=policy), pack([sequence.with_fields(fields)], meta), None)
    loss.backward()
    assert policy.grad is not None
    return policy.grad


def test_a_kl_in_the_loss_pulls_the_policy_to_its_reference() -> None:
    weak, strong = (gradient(config(kl_coef=coefficient)) for coefficient in (0.1, 0.2))
    assert bool((weak[:-1] > 0).all())
    torch.testing.assert_close(strong, 2 * weak)
    assert config(kl_coef=0.1).kl_in_reward == 0.0


def test_without_a_coefficient_or_with_the_kl_in_the_reward_the_loss_has_none() -> None:
    assert float(gradient(config()).abs().max()) == 0.0
    of_reward = config(kl_coef=0.1, kl_place="reward", advantage="reinforce_plus_plus")
    assert float(gradient(of_reward).abs().max()) == 0.0
    assert of_reward.kl_in_reward == pytest.approx(0.1)


class Model:
    """Returns the same log-prob for every token, and what its losses measure."""

    def __init__(self, log_prob: float) -> None:
        self.log_prob = log_prob

    def outputs(self, heads: Mapping[str, str], sequences: Sequence[TokenSequence], *_: Any, **__: Any) -> Any:
        return {name: [torch.full((len(each),), self.log_prob) for each in sequences] for name in heads}

    def update(self, sequences: Sequence[TokenSequence], loss: Loss, meta: Any) -> Update:
        log_probs = torch.full((sum(map(len, sequences)),), self.log_prob)
        needed = {"batch_num_tokens": 1.0, "global_batch_size": 1, "dp_size": 1}
        _, metrics = loss(ModelOutput(log_probs=log_probs), pack(sequences, needed), None)
        means = {name: Metric(*map(float, each)) for name, each in metrics.items() if isinstance(each, tuple)}
        return Update(means, True, 1.0, 1e-6)


class OneStep:
    """A run of one step on two samples, without engines and ranks."""

    logged: ClassVar[dict[str, float]]

    def __init__(self, config: GRPOConfig, *_: Any) -> None:
        self.models = {"policy": Model(-1.0), "reference": Model(-1.5)}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def build_model(self, name: str, **_: Any) -> Model:
        return self.models[name]

    def steps(self) -> list[int]:
        return [1]

    def collect(self) -> SimpleNamespace:
        samples = [Sample(0, index, [1, 2], [3, 4], [-1.0, -1.0], "stop", (VersionSpan(0, 2),), 0) for index in (0, 1)]
        return SimpleNamespace(samples=samples, rewards=[0.0, 1.0], metrics={"reward": 0.5})

    def end_step(self, metrics: dict[str, float]) -> None:
        OneStep.logged = metrics

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


@pytest.mark.parametrize("place", ["loss", "reward"])
def test_the_kl_is_logged_wherever_it_is(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpo, "RLRun", OneStep)
    options: dict[str, Any] = {"advantage": "reinforce_plus_plus", "samples_per_prompt": 2}
    grpo.train(config(kl_coef=0.1, kl_place=place, prompts_per_step=1, **options))
    assert OneStep.logged["kl"] == pytest.approx(math.exp(-0.5) - 1 + 0.5)
    grpo.train(config(prompts_per_step=1, **options))
    assert "kl" not in OneStep.logged
