"""Routes that were recorded: their type, padded for a sequence, and refused where they are not ones of the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rl_backend.contracts import BatchError, PackedBatch, RoutedLayers, check_routes, route_dtype, route_fields

ROUTERS = RoutedLayers(num_experts=6, top_k=2, sparse=(False, True, False, True, True))


def routes(layers: int = 3) -> Tensor:
    """Of five tokens: other experts in every layer."""
    first = (torch.arange(5)[:, None] + torch.arange(layers)) % 6
    return torch.stack([first, (first + 2) % 6], dim=-1).to(torch.uint8)


def batch(found: Tensor | None = None, *, layers: Any = "moe", mask: Tensor | None = None, **fields: Any) -> PackedBatch:
    token_fields = {"routed_experts": routes() if found is None else found}
    if mask is not None:
        token_fields["routed_experts_mask"] = mask
    sequence_fields = {name: torch.as_tensor(value) for name, value in fields.items()}
    return PackedBatch(
        torch.arange(5), torch.tensor([3, 2]), token_fields, sequence_fields, {"routed_experts_layers": layers}
    )


@pytest.mark.parametrize(
    ("experts", "dtype"),
    [
        (1, torch.uint8),
        (256, torch.uint8),
        (257, torch.int16),
        (2**15, torch.int16),
        (2**15 + 1, torch.int32),
    ],
)
def test_the_type_of_routes_is_the_smallest_that_holds_the_last_expert(experts: int, dtype: torch.dtype) -> None:
    assert route_dtype(experts) == RoutedLayers(experts, 1, (True,)).dtype == dtype


def test_routes_of_the_first_tokens_are_padded_and_masked() -> None:
    found = route_fields(routes()[:3], 5)
    assert set(found) == {"routed_experts", "routed_experts_mask"}
    assert torch.equal(found["routed_experts"][:3], routes()[:3]) and not found["routed_experts"][3:].any()
    assert found["routed_experts"].dtype == torch.uint8 and found["routed_experts"].shape == (5, 3, 2)
    assert found["routed_experts_mask"].tolist() == [True, True, True, False, False]
    assert route_fields(routes(), 5)["routed_experts_mask"].all()
    wide = torch.tensor([[[300, 7]]], dtype=torch.int32).to(torch.uint16)
    assert route_fields(wide, 1)["routed_experts"].dtype == torch.int16
    assert route_fields(wide, 1)["routed_experts"].tolist() == [[[300, 7]]]


def test_routes_of_more_tokens_than_the_sequence_has_do_not_fit() -> None:
    with pytest.raises(RuntimeError, match=r"expanded size of the tensor \(5\)"):
        route_fields(torch.zeros(6, 3, 2, dtype=torch.uint8), 5)


def test_routes_of_all_layers_are_those_of_layers_with_experts() -> None:
    assert ROUTERS.layers == (1, 3, 4)
    every, mask = routes(5), torch.tensor([True, True, False, True, False])
    data = batch(every, layers="all", mask=mask)
    check_routes(data, ROUTERS)
    chosen, found_mask = ROUTERS.routes_of(data)
    assert torch.equal(chosen, every[:, [1, 3, 4]]) and found_mask is mask
    chosen, found_mask = ROUTERS.routes_of(batch())
    assert torch.equal(chosen, routes()) and found_mask is None
    dense = RoutedLayers(6, 2, (True, True, True))
    assert torch.equal(dense.routes_of(batch(layers="all"))[0], routes())


def with_expert(token: int, layer: int, experts: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
    found = routes().to(dtype)
    found[token, layer] = torch.tensor(experts, dtype=dtype)
    return found


@pytest.mark.parametrize(
    ("found", "options", "message"),
    [
        (None, {"layers": None}, r"meta\['routed_experts_layers'\]=None: say which layers"),
        (None, {"layers": "every"}, r"='every': say which layers .*'moe'.*'all'"),
        (None, {"layers": "all"}, r"shape \(5, 3, 2\); expected .* = \(5, 5, 2\): with routed_experts_layers='all' this"),
        (routes(2), {}, r"shape \(5, 2, 2\); expected .* = \(5, 3, 2\): .* 3 layers, with 2 of 6 experts for a token"),
        (routes()[..., :1], {}, r"shape \(5, 3, 1\); expected"),
        (routes().float(), {}, "dtype torch.float32; expected integers"),
        (
            None,
            {"mask": torch.ones(5)},
            r"routed_experts_mask has shape \(5,\) and dtype torch.float32; expected \(T,\) bool",
        ),
        (None, {"mask": torch.ones(5, 1, dtype=torch.bool)}, r"routed_experts_mask has shape \(5, 1\)"),
        (with_expert(4, 2, [6, 0]), {}, "has expert 6; the model has 6 experts, 0 to 5"),
        (with_expert(0, 1, [-1, 0]), {}, "has expert -1; the model has 6 experts"),
        (with_expert(3, 2, [4, 4]), {}, "has expert 4 twice for one token in layer 2 of those with experts; .* top_k=2"),
        (
            None,
            {"routed_experts_version": [1, 1]},
            r"must both have shape \(2,\), one number per sequence; give both or none",
        ),
        (
            None,
            {"routed_experts_version": [7, 3], "weight_version": [7, 4]},
            "of sequence 1 was computed with weights of version 3, the sequence sampled from version 4",
        ),
        (
            None,
            {"routed_experts_version": [[7], [3]], "weight_version": [7, 3]},
            r"must both have shape \(2,\), one number per sequence; give both or none",
        ),
        (
            None,
            {"routed_experts_version": [7, 3], "weight_version": [[7], [3]]},
            r"must both have shape \(2,\), one number per sequence; give both or none",
        ),
    ],
)
def test_routes_that_are_not_ones_of_the_model_are_refused(
    found: Tensor | None, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(BatchError, match=message):
        check_routes(batch(found, **options), ROUTERS)


def test_what_is_masked_is_not_looked_at_and_equal_versions_pass() -> None:
    wrong = with_expert(2, 0, [99, 99])
    mask = torch.arange(5) != 2
    check_routes(batch(wrong, mask=mask), ROUTERS)
    check_routes(batch(wrong, mask=torch.zeros(5, dtype=torch.bool)), ROUTERS)
    with pytest.raises(BatchError, match="has expert 99"):
        check_routes(batch(wrong), ROUTERS)
    check_routes(batch(with_expert(1, 1, [5, 0])), ROUTERS)
    check_routes(batch(routed_experts_version=[7, 3], weight_version=[7, 3]), ROUTERS)
    check_routes(batch(weight_version=[7, 3]), ROUTERS)
    alone = RoutedLayers(6, 1, (True, True, True))
    check_routes(batch(routes()[..., :1]), alone)


def test_an_expert_that_stands_twice_with_others_between_is_found() -> None:
    three = RoutedLayers(6, 3, (True,))
    found = torch.tensor([[[1, 2, 3]], [[4, 0, 4]], [[0, 1, 2]], [[0, 1, 2]], [[5, 1, 2]]])
    with pytest.raises(BatchError, match="has expert 4 twice for one token in layer 0"):
        check_routes(batch(found), three)
