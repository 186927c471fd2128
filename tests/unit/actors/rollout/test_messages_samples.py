"""Routes of samples between vLLM's arrays and the token fields of training sequences."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from actors.rollout.messages import Routes, Sample, VersionSpan, routes_of
from rl_backend.contracts import BatchError, RolloutError, TokenSequence, WeightVersionError

MOE_LAYERS = (0, 2)


def completion(tokens: int) -> Any:
    """What vLLM returns for ``tokens`` of prompt and response: rows of three layers, of which the second has no experts."""
    rows = np.arange(tokens - 1, dtype=np.uint8)[:, None, None]
    return SimpleNamespace(routed_experts=rows + np.array([[[0, 1], [0, 0], [2, 3]]], dtype=np.uint8))


def sample(routes: Routes | None, *versions: int) -> Sample:
    spans = tuple(VersionSpan(version, 1) for version in versions)
    return Sample(0, 0, [5, 6], [7] * len(spans), [], "length", spans, 0, routes)


def test_routes_of_a_response_are_those_of_the_layers_with_experts() -> None:
    routes = routes_of(completion(4), 4, MOE_LAYERS, "engine 0")
    assert routes.dtype == np.uint8 and routes.flags.c_contiguous
    assert routes.tolist() == [[[0, 1], [2, 3]], [[1, 2], [3, 4]], [[2, 3], [4, 5]]]


@pytest.mark.parametrize(
    ("answer", "found"), [(SimpleNamespace(routed_experts=None), "no routes"), (completion(3), "routes of 2")]
)
def test_an_engine_that_returns_fewer_routes_than_tokens_is_refused(answer: Any, found: str) -> None:
    with pytest.raises(RolloutError, match=f"engine 0: vLLM returned {found}.*expected 3"):
        routes_of(answer, 4, MOE_LAYERS, "engine 0")


def test_a_sequence_takes_its_samples_routes_and_their_version_with_none_for_the_last_token() -> None:
    routes = Routes(routes_of(completion(4), 4, MOE_LAYERS, ""), weight_version=3)
    routes.experts.flags.writeable = False
    sequence = sample(routes, 3, 3).with_routes(TokenSequence(torch.tensor([5, 6, 7, 7]), {"loss_mask": torch.ones(4)}))
    assert sequence.token_fields["routed_experts"].dtype == torch.uint8
    assert sequence.token_fields["routed_experts"][:3].tolist() == routes.experts.tolist()
    assert sequence.token_fields["routed_experts_mask"].tolist() == [True, True, True, False]
    assert "loss_mask" in sequence.token_fields
    assert {name: int(value) for name, value in sequence.sequence_fields.items()} == {
        "routed_experts_version": 3,
        "weight_version": 3,
    }


def test_routes_that_do_not_belong_to_a_sequence_are_refused() -> None:
    routes = Routes(routes_of(completion(4), 4, MOE_LAYERS, ""), weight_version=3)
    four = TokenSequence(torch.tensor([5, 6, 7, 7]))
    with pytest.raises(BatchError, match=r"return_routed_experts=True"):
        sample(None, 3, 3).with_routes(four)
    with pytest.raises(BatchError, match="a sequence of 3 tokens, and a sample with routes for 4"):
        sample(routes, 3).with_routes(TokenSequence(torch.tensor([5, 6, 7])))
    with pytest.raises(WeightVersionError, match=r"versions \[2, 3\], its routes with 3"):
        sample(routes, 2, 3).with_routes(four)
