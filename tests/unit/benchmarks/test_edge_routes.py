"""Margins of a token's choice of experts, and sides that part there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import edge_routes, parity_random
from benchmarks.edge_routes import Parting, choose, first_parting
from benchmarks.random_models import RandomModel
from rl_backend.lab.parity.config import TRANSFORMERS, ParityConfig, ParitySide
from tests.support.deepseek import write_latent


def test_a_margin_is_that_of_experts_or_of_groups() -> None:
    scores = torch.tensor(
        [
            [0.9, 0.1, 0.5, 0.2],  # Two groups of two, one of them open: 1.0 against 0.7; within the first, 0.9 against 0.1.
            [0.9, 0.1, 0.4, 0.5],  # 1.0 against 0.9.
            [0.3, 0.2, 0.9, 0.8],
        ]
    )
    choice = choose(scores, groups=2, chosen_groups=1, top_k=1)
    torch.testing.assert_close(choice.margins, torch.tensor([0.3, 0.1, 0.1]))
    assert choice.experts.nonzero().tolist() == [[0, 0], [1, 0], [2, 2]]
    assert bool((choose(scores, 1, 1, 4).margins == torch.inf).all()), "all experts leave nothing to choose"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ParityConfig:
    model = write_latent("deepseek_v3", tmp_path_factory.mktemp("latent") / "model")
    reference, candidate = ParitySide(runtime=TRANSFORMERS), ParitySide(runtime="native")
    steps: dict[str, Any] = {"lr": 1e-4, "steps": 2, "device": "cpu", "max_length": 20}
    return ParityConfig(model=str(model), reference=reference, candidate=candidate, **steps)


def test_a_side_that_routes_as_float64_does_never_parts(config: ParityConfig) -> None:
    assert first_parting(config) is None


def test_other_routes_are_found_with_the_margin_that_they_had(config: ParityConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    routes_of = edge_routes.routes_of_candidate

    def with_others(config: ParityConfig):  # type: ignore[no-untyped-def]
        for step, layers in enumerate(routes_of(config)):
            # Another group altogether for the first token of the first layer, from the second step on.
            yield [(routes + (step and place == 0)) % 8 if place == 0 else routes for place, routes in enumerate(layers)]

    monkeypatch.setattr(edge_routes, "routes_of_candidate", with_others)
    parting = first_parting(config)
    assert parting is not None
    assert parting.step == 1
    assert parting.tokens >= 1
    assert parting.largest_margin > 1e-4


@pytest.mark.parametrize(
    ("parting", "loss", "outcome"),
    [
        (Parting(4, 1, 7e-8), 4e-6, "edge"),
        (Parting(4, 2, 2e-5), 4e-6, "failed"),
        (None, 4e-6, "failed"),
        (Parting(4, 1, 7e-8), 2e-4, "failed"),
    ],
)
def test_only_a_margin_of_rounding_is_an_excuse(
    config: ParityConfig, monkeypatch: pytest.MonkeyPatch, parting: Parting | None, loss: float, outcome: str
) -> None:
    monkeypatch.setattr(parity_random, "first_parting", lambda _: parting)
    exact = {"gradient_rel_diff": 1e-6, "max_loss_rel_diff": loss, "max_grad_norm_rel_diff": 5e-4}
    failed = {"outcome": "failed", "error": "apart", "to_float64": {"runtime": exact, TRANSFORMERS: exact}}
    model = RandomModel("deepseek_v3", {"num_experts_per_tok": 2})
    assert parity_random._at_an_edge(failed, config, model)["outcome"] == outcome
