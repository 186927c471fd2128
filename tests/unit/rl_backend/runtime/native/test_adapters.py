"""Adapters beside the layers of a native model, on the rows that a rank has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rl_backend.contracts import ModelOptions
from rl_backend.model.options import DecoderOptions
from rl_backend.primitive.adapters import AdapterRun, Factors, adapters_at_work
from rl_backend.runtime.adaptable import COUPLES, TRAINS_BASE, Adaptable
from rl_backend.runtime.native.adapters import _forward, _refused_by, adaptable_modules

NAME, ROWS, INPUTS, OUTPUTS = "model.layers.0.mlp.shared_expert_gate", 24, 6, 4


def factors(seed: int) -> Factors:
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randn(3, INPUTS, generator=generator), torch.randn(OUTPUTS, 3, generator=generator)
    return Factors(a, b, torch.zeros_like(a), torch.zeros_like(b), 0.5 + seed, 0.0, seed)


@pytest.mark.parametrize("ranks", [None, 1, 2, 3])
def test_a_rank_that_has_a_share_of_the_tokens_adapts_each_with_its_own_tenants_factors(ranks: int | None) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(INPUTS, OUTPUTS), torch.randn(ROWS, INPUTS)
    owners = {(0, 5): factors(1), (5, 15): factors(2), (18, 24): factors(3)}
    runs = [AdapterRun(*rows, {NAME: each}) for rows, each in owners.items()]
    expected = layer(x).detach()
    for (start, stop), each in owners.items():
        expected[start:stop] += each.scale * x[start:stop] @ each.a.t() @ each.b.t()
    found: list[Tensor] = []
    for rank in range(ranks or 1):
        if ranks is not None:
            setattr(layer, "token_share", (rank, ranks))  # noqa: B010 - nn.Linear has no such attribute
        with adapters_at_work(runs):
            found.append(_forward(layer, NAME, x.chunk(ranks or 1)[rank].requires_grad_()))
    torch.testing.assert_close(torch.cat(found), expected)
    torch.cat(found).sum().backward()
    for (start, stop), each in owners.items():
        # Of the sum: b is moved by what a makes of the inputs, the same for all outputs.
        of_b = (each.scale * x[start:stop] @ each.a.t()).sum(0).expand(OUTPUTS, 3)
        torch.testing.assert_close(each.grad_b, of_b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("ep", "etp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_gradients_of_experts_are_added_up_over_the_ranks_that_share_an_expert(
    monkeypatch: pytest.MonkeyPatch, ep: int, etp: int
) -> None:
    found: dict[str, Any] = {}
    monkeypatch.setattr(Adaptable, "of_ranks", lambda held, weights, gathered_over, **groups: found.update(groups))

    def named(name: str, size: int = 1) -> Any:
        return SimpleNamespace(name=name, size=lambda: size)

    dimensions = (named("ranks of other experts", ep), named("ranks with parts of an expert", etp))
    groups: Any = SimpleNamespace(
        parallel=SimpleNamespace(etp=etp),
        ep_mesh=SimpleNamespace(get_group=dimensions.__getitem__),
        fsdp_mesh=SimpleNamespace(get_group=lambda: named("all other tokens")),
        edp_mesh=SimpleNamespace(get_group=lambda: named("other tokens of the experts")),
        token_group=named("tokens", 4),
        expert_group=named("experts", ep * etp),
        **{name: named(name) for name in ("tp_group", "pp_group", "replica_group", "world_group")},
    )
    adaptable_modules({}, {}, groups, None, hidden_size=8)
    tensor, data = found["expert_groups"]
    assert (None if tensor is None else tensor.name) == ("ranks with parts of an expert" if etp > 1 else None)
    assert data.name == "other tokens of the experts"
    assert found["tensor_group"].name == "tp_group" and found["data_group"].name == "all other tokens"
    # Experts of one replica are on its own ranks, if these are as many.
    assert found["whole_group"].name == "replica_group"


@pytest.mark.parametrize(
    ("tokens", "experts", "whole"),
    [(4, 2, "replica_group"), (4, 8, "world_group"), (2, 4, "world_group"), (6, 4, "world_group")],
)
def test_experts_of_several_replicas_are_together_on_all_ranks_alone(
    monkeypatch: pytest.MonkeyPatch, tokens: int, experts: int, whole: str
) -> None:
    found: dict[str, Any] = {}
    monkeypatch.setattr(Adaptable, "of_ranks", lambda held, weights, over, **groups: found.update(groups, over=over))

    def named(name: str, size: int = 1) -> Any:
        return SimpleNamespace(name=name, size=lambda: size)

    mesh = SimpleNamespace(get_group=lambda *_: named("mesh"))
    groups: Any = SimpleNamespace(
        parallel=SimpleNamespace(etp=1),
        **dict.fromkeys(("ep_mesh", "fsdp_mesh", "edp_mesh"), mesh),
        token_group=named("tokens", tokens),
        expert_group=named("experts", experts),
        **{name: named(name) for name in ("tp_group", "pp_group", "replica_group", "world_group")},
    )
    adaptable_modules({}, {}, groups, None, hidden_size=8)
    assert found["whole_group"].name == whole
    assert [each.name for each in found["over"]] == ["experts", "pp_group"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("router_aux_loss_coef", 0.1),
        ("router_z_loss_coef", 0.1),
        ("router_sequence_loss_coef", 0.1),
        ("mtp", "detached"),
        ("mtp", "joint"),
        ("indexer", "warm_up"),
        ("indexer", "sparse"),
        ("expert_bias_rate", 0.1),
    ],
)
def test_each_option_that_couples_tenants_or_trains_their_base_is_refused(field: str, value: Any) -> None:
    harmless: dict[str, Any] = {
        "freeze_router": True,
        "mtp_loss_weight": 0.5,
        "indexer_loss_weight": 0.5,
        "delta_kernel": "fla",
    }
    assert _refused_by(None) == _refused_by(DecoderOptions()) == _refused_by(DecoderOptions(**harmless)) == ""
    assert _refused_by(ModelOptions()) == "", "of a family outside"
    refused = _refused_by(DecoderOptions(**{**harmless, field: value}))
    why = TRAINS_BASE if field in ("indexer", "expert_bias_rate") else COUPLES
    assert refused == f"NativeConfig.model_cfg.{field}={value!r}: {why}"
