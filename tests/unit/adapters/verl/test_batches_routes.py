"""Which rows of a rollout's routes are replayed."""

from __future__ import annotations

import pytest
import torch

from adapters.verl.batches import BatchRoutes

LENGTHS, RESPONSES = (5, 4, 6), (2, 0, 3)


def batch(extra_row: bool) -> dict[str, torch.Tensor]:
    def jagged(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(parts, layout=torch.jagged)

    rows = [length if extra_row else length - 1 for length in LENGTHS]
    routes = [torch.arange(2).expand(count, 3, 2).contiguous() for count in rows]
    return {
        "input_ids": jagged([torch.zeros(length, dtype=torch.int64) for length in LENGTHS]),
        "routed_experts": jagged(routes),
        "response_mask": torch.tensor([[index < count for index in range(3)] for count in RESPONSES]).long(),
    }


@pytest.mark.parametrize("extra_row", [False, True])
def test_the_last_token_of_a_rollout_and_sequences_without_response_are_not_replayed(extra_row: bool) -> None:
    fields, layers = BatchRoutes("R3", num_layers=3).of(batch(extra_row))  # type: ignore[arg-type]
    expected = [
        [True] * (length - 1) + [False] if response else [False] * length
        for length, response in zip(LENGTHS, RESPONSES, strict=True)
    ]
    assert fields["routed_experts_mask"].tolist() == [value for row in expected for value in row]
    assert layers == "all"


def test_every_token_of_the_policys_own_routes_is_replayed() -> None:
    fields, _ = BatchRoutes("R2", num_layers=3).of(batch(True))  # type: ignore[arg-type]
    assert bool(fields["routed_experts_mask"].all())
