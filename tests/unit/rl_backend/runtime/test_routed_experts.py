"""Routes in a batch, and models that take them, in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_backend.contracts import (
    BatchError,
    PackedBatch,
    RLBackendError,
    RoutedLayers,
    UnsupportedError,
    check_routes,
    route_dtype,
    route_fields,
)
from rl_backend.contracts.lora import LoRAConfig
from rl_backend.model.blocks import RouterInput
from rl_backend.model.feedforward.moe import MoE
from rl_backend.primitive.experts import SwiGLUExperts
from rl_backend.primitive.router import RouterLossCoefficients, RouterSettings
from tests.support.bridge_runs import open_bridge
from tests.support.moe import write_moe
from tests.support.native import deal, micro_batches, open_runtime, token_loss
from tests.support.routes import SPLIT, with_routes

OPENED: dict[str, Callable[..., Any]] = {"native": open_runtime, "bridge": open_bridge}
LAYERS = RoutedLayers(num_experts=6, top_k=2, sparse=(False, True, True))


def batch(routes: Tensor, layers: str = "moe", **fields: Tensor) -> PackedBatch:
    """Five tokens in two sequences."""
    versions = {name: value for name, value in fields.items() if name.endswith("version")}
    others = {name: value for name, value in fields.items() if name not in versions}
    lengths, facts = torch.tensor([3, 2]), {"routed_experts_layers": layers}
    return PackedBatch(torch.arange(5), lengths, {"routed_experts": routes, **others}, versions, facts)


def routes(num_layers: int = 2, dtype: torch.dtype = torch.uint8) -> Tensor:
    return torch.tensor([[4, 1]], dtype=dtype).repeat(5, num_layers, 1)


def changed(value: int, *place: int) -> Tensor:
    found = routes(dtype=torch.int16)
    found[place] = value
    return found


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int64])
def test_routes_of_a_model_are_accepted_in_any_integer_type(dtype: torch.dtype) -> None:
    check_routes(batch(routes(dtype=dtype)), LAYERS)
    check_routes(batch(routes(3, dtype), "all"), LAYERS)


REFUSED: dict[str, tuple[PackedBatch, str]] = {
    "no routes": (PackedBatch(torch.arange(2), torch.tensor([2])), "token field 'routed_experts' is missing"),
    "layers that nobody says": (replace(batch(routes()), meta={}), r"meta\['routed_experts_layers'\]=None: say which"),
    "floating-point numbers": (batch(routes(dtype=torch.float32)), "dtype torch.float32; expected integers"),
    "numbers that torch cannot compare": (
        batch(changed(1, 0, 0, 1).to(torch.uint16)),
        "torch.uint16; expected integers",
    ),
    "another model's layers": (batch(routes(3)), r"shape \(5, 3, 2\); expected .* \(5, 2, 2\).*2 of 6 experts"),
    "layers with experts taken for all": (batch(routes(2), "all"), r"shape \(5, 2, 2\); expected .* \(5, 3, 2\)"),
    "another number of experts a token": (batch(routes()[..., :1]), r"shape \(5, 2, 1\)"),
    "an expert that does not exist": (batch(changed(6, 3, 0, 1)), "expert 6; the model has 6 experts, 0 to 5"),
    "a negative expert": (batch(changed(-1, 0, 1, 0)), "expert -1"),
    "an expert twice": (batch(changed(1, 4, 1, 0)), "expert 1 twice for one token in layer 1 of those with experts"),
    "a mask of numbers": (batch(routes(), routed_experts_mask=torch.ones(5)), "routed_experts_mask.*expected .T,. bool"),
    "routes of other weights": (
        batch(routes(), routed_experts_version=torch.tensor([7, 6]), weight_version=torch.tensor([7, 7])),
        "sequence 1 was computed with weights of version 6, the sequence sampled from version 7",
    ),
    "versions of tokens": (
        batch(routes(), routed_experts_version=torch.ones(2, 3), weight_version=torch.ones(2, 3)),
        r"'routed_experts_version' and 'weight_version' must both have shape \(2,\)",
    ),
    "a version and nothing to compare": (batch(routes(), routed_experts_version=torch.tensor([7, 7])), "give both or none"),
}


@pytest.mark.shows("router replay: routes that are not of this model, of other weights, or of no expert are refused")
@pytest.mark.parametrize("case", REFUSED)
def test_routes_that_are_not_of_this_model_are_refused(case: str) -> None:
    refused, message = REFUSED[case]
    with pytest.raises(BatchError, match=message):
        check_routes(refused, LAYERS)


@pytest.mark.parametrize("experts", [(4, 1, 4), (4, 4, 1), (1, 4, 4)])
def test_an_expert_is_found_twice_wherever_it_stands(experts: tuple[int, ...]) -> None:
    of_three = RoutedLayers(num_experts=6, top_k=3, sparse=(True, True))
    found = torch.tensor([[4, 1, 2]], dtype=torch.int16).repeat(5, 2, 1)
    check_routes(batch(found), of_three)
    found[3, 1] = torch.tensor(experts)
    with pytest.raises(BatchError, match="expert 4 twice for one token in layer 1 "):
        check_routes(batch(found), of_three)


def test_what_is_masked_or_of_a_dense_layer_may_hold_anything() -> None:
    mask = torch.tensor([True, True, False, True, True])
    check_routes(batch(changed(9, 2, 1, 0), routed_experts_mask=mask), LAYERS)
    everywhere = routes(3)
    everywhere[:, 0] = 99
    check_routes(batch(everywhere, "all"), LAYERS)


def test_the_type_is_the_smallest_that_torch_computes_on() -> None:
    assert [route_dtype(count) for count in (2, 256, 257, 32768, 32769)] == [
        torch.uint8,
        torch.uint8,
        torch.int16,
        torch.int16,
        torch.int32,
    ]


def test_a_rollouts_routes_lack_the_last_token() -> None:
    fields = route_fields(routes().to(torch.uint16)[:4], 5)
    assert fields["routed_experts"].shape == (5, 2, 2) and fields["routed_experts"].dtype == torch.int16
    assert fields["routed_experts_mask"].tolist() == [True] * 4 + [False]


def mixture(**settings: Any) -> MoE:
    torch.manual_seed(0)
    moe = MoE(8, 12, RouterSettings(5, 2, normalise=True), **settings).double()
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter)
    return moe


def one_by_one(moe: MoE, x: Tensor, experts: Tensor) -> Tensor:
    """Every token through its experts, with the router's weights, in plain operations."""
    rows = []
    for token, chosen in zip(x, experts.tolist(), strict=True):
        scores = (moe.gate.weight @ token).softmax(-1)[chosen]
        weights = scores / scores.sum()
        rows.append(sum(weight * expert(moe.experts, token, number) for weight, number in zip(weights, chosen, strict=True)))
    return torch.stack(rows)


def expert(experts: SwiGLUExperts, token: Tensor, number: int) -> Tensor:
    gate, up = experts.gate_up_proj[number]
    output: Tensor = experts.down_proj[number] @ (torch.nn.functional.silu(gate @ token) * (up @ token))
    return output


@pytest.mark.shows("router replay: the router's gradients at replayed experts equal autograd's of plain operations")
def test_gradients_flow_through_the_router_at_the_replayed_experts() -> None:
    moe, x = mixture(), torch.randn(7, 8, dtype=torch.float64)
    own: Tensor = moe.gate(x).experts
    given = (own + 1) % 5
    given[3] = -1
    outputs = {}
    for name, output in {
        "replayed": moe(x, RouterInput(experts=given.to(torch.int16))),
        "reference": one_by_one(moe, x, torch.where(given < 0, own, given)),
    }.items():
        moe.zero_grad()
        output.square().sum().backward()
        outputs[name] = [output, *(parameter.grad for parameter in moe.parameters())]
    for value, expected in zip(*outputs.values(), strict=True):
        assert value is not None and expected is not None
        torch.testing.assert_close(value, expected)
    assert outputs["reference"][1] is not None and bool(outputs["reference"][1].any())


def test_balancing_losses_count_the_replayed_experts() -> None:
    moe, x = mixture(coefficients=RouterLossCoefficients(load_balancing=0.7)), torch.randn(7, 8, dtype=torch.float64)
    given = torch.tensor([[0, 1]]).expand(7, 2)
    (moe(x, RouterInput(experts=given)) * 0.0).sum().backward()
    found = moe.gate.weight.grad
    assert found is not None
    weight = moe.gate.weight.detach().clone().requires_grad_()
    mean_scores = (x @ weight.T).softmax(-1).mean(0)
    # Half of the choices fell on each of the first two of 5 experts.
    (0.7 * 5 * (0.5 * mean_scores[0] + 0.5 * mean_scores[1])).backward()
    torch.testing.assert_close(found, weight.grad)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The second and the third of four layers have experts."""
    changes: dict[str, Any] = {"num_hidden_layers": 4, "decoder_sparse_step": 1, "mlp_only_layers": [0, 3]}
    return write_moe("qwen3_moe", tmp_path_factory.mktemp("mixed"), **changes)


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_moe("qwen3_moe", tmp_path_factory.mktemp("sparse"), num_hidden_layers=2)


def record(runtime: Any, handle: Any, data: list[PackedBatch]) -> tuple[float, dict[int, Tensor]]:
    result = runtime.forward_backward(handle, data, token_loss, forward_only=True, router_replay="record")
    return result.loss, dict(enumerate(result.output("routed_experts")))


def replayed(runtime: Any, handle: Any, data: list[PackedBatch]) -> float:
    return runtime.forward_backward(  # type: ignore[no-any-return]
        handle, data, token_loss, forward_only=True, router_replay="replay"
    ).loss


@pytest.mark.shows("router replay: other routes give another loss; tokens without routes go where their router sends them")
@pytest.mark.parametrize("backend", OPENED)
def test_routes_matter_and_masked_tokens_follow_their_router(sparse: Path, backend: str) -> None:
    with OPENED[backend](sparse) as runtime:
        handle = runtime.build_model(forward_only=True)
        data = micro_batches(SPLIT)
        loss, recorded = record(runtime, handle, data)
        shifted = {index: (routes + 1) % 4 for index, routes in recorded.items()}

        def masked(keep: Callable[[Tensor], Tensor], wrong: dict[int, Tensor]) -> float:
            """The loss when the tokens that ``keep`` says have the recorded routes, and others ``wrong`` ones, masked."""
            with_wrong = with_routes(data, SPLIT, wrong)
            return replayed(
                runtime,
                handle,
                [
                    replace(batch, token_fields={**batch.token_fields, "routed_experts_mask": keep(batch.position_ids)})
                    for batch in with_wrong
                ],
            )

        assert abs(replayed(runtime, handle, with_routes(data, SPLIT, shifted)) - loss) > 1e-3
        assert replayed(runtime, handle, with_routes(data, SPLIT, recorded)) == loss
        assert masked(lambda position: position < 0, shifted) == loss
        odd_right = {
            index: torch.where((torch.arange(len(routes)) % 2 == 1)[:, None, None], recorded[index], routes)
            for index, routes in shifted.items()
        }
        assert masked(lambda position: position % 2 == 1, odd_right) == loss
        assert masked(lambda position: position % 2 == 1, shifted) != loss
        # What was bound for a pass is gone after it.
        assert runtime.forward_backward(handle, data, token_loss, forward_only=True).loss == loss


def test_layers_may_be_counted_with_or_without_dense_ones(mixed: Path) -> None:
    with open_runtime(mixed) as runtime:
        handle = runtime.build_model(forward_only=True)
        data = micro_batches(SPLIT)
        _, recorded = record(runtime, handle, data)
        shifted = {index: (routes + 1) % 4 for index, routes in recorded.items()}
        loss = replayed(runtime, handle, with_routes(data, SPLIT, shifted))
        everywhere = {index: routes.new_full((len(routes), 4, 2), 77) for index, routes in shifted.items()}
        for index, routes in shifted.items():
            everywhere[index][:, 1:3] = routes
        assert replayed(runtime, handle, with_routes(data, SPLIT, everywhere, routed_experts_layers="all")) == loss


@pytest.mark.parametrize("backend", OPENED)
def test_a_pass_that_cannot_be_replayed_is_refused_before_it_runs(sparse: Path, tied_model: Path, backend: str) -> None:
    with OPENED[backend](sparse) as runtime:
        handle = runtime.build_model(forward_only=True)
        data = micro_batches(SPLIT[:1])
        _, recorded = record(runtime, handle, data)
        good = with_routes(data, deal(SPLIT[:1], 1)[0], recorded)
        another = {**good[0].token_fields, "routed_experts": good[0].token_fields["routed_experts"][:, :1]}
        cases: list[tuple[list[PackedBatch], str, type[RLBackendError], str]] = [
            (data, "replay", BatchError, "micro-batch 0: token field 'routed_experts' is missing"),
            ([replace(good[0], token_fields=another)], "replay", BatchError, "micro-batch 0: routed_experts has shape"),
            (good, "R3", BatchError, "router_replay='R3'; expected one of off, record, replay"),
        ]
        for batches, mode, error, message in cases:
            with pytest.raises(error, match=message):
                runtime.forward_backward(handle, batches, None, forward_only=True, router_replay=mode)
    with OPENED[backend](tied_model) as runtime:
        handle = runtime.build_model(forward_only=True)
        with pytest.raises(UnsupportedError, match="no routers to record or replay"):
            runtime.forward_backward(handle, data, None, forward_only=True, router_replay="record")


def test_a_family_that_gives_a_router_no_routes_is_refused(sparse: Path) -> None:
    with open_runtime(sparse) as runtime:
        handle = runtime.build_model(forward_only=True)
        data = micro_batches(SPLIT[:1])
        _, recorded = record(runtime, handle, data)
        for module in handle.model.modules():
            if isinstance(module, MoE):
                module.register_forward_pre_hook(lambda _, args: (args[0], RouterInput()))
        with pytest.raises(UnsupportedError, match="calls a Router without experts"):
            replayed(runtime, handle, with_routes(data, SPLIT[:1], recorded))


def test_megatrons_registry_of_the_process_stays_empty_and_its_balancing_loss_is_refused(sparse: Path) -> None:
    settings = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
    with open_bridge(sparse, override_transformer_config=settings) as runtime:
        from megatron.core.transformer.moe.router_replay import RouterReplay

        handle = runtime.build_model()
        data = micro_batches(SPLIT)
        _, recorded = record(runtime, handle, data)
        with pytest.raises(UnsupportedError, match=r"moe_aux_loss_coeff=0.1: Megatron balances the experts that it would"):
            runtime.forward_backward(handle, with_routes(data, SPLIT, recorded), token_loss, router_replay="replay")
        assert RouterReplay.global_router_replay_instances == []


def test_a_family_that_miscounts_its_routers_is_refused(mixed: Path) -> None:
    with open_runtime(mixed) as runtime:
        handle = runtime.build_model(forward_only=True)
        handle.family = replace(handle.family, routed_layers=lambda _: RoutedLayers(4, 2, (True,) * 4))
        with pytest.raises(UnsupportedError, match=r"2 Router modules where .* 'qwen3_moe' has 4 layers with experts"):
            record(runtime, handle, micro_batches(SPLIT))


@pytest.mark.parametrize("backend", OPENED)
def test_a_tenant_records_and_replays_routes_as_its_base_does(sparse: Path, backend: str) -> None:
    with OPENED[backend](sparse) as runtime:
        base = runtime.build_model(trainable=False)
        tenant = runtime.create_lora_adapter(base, LoRAConfig(rank=4, targets=("attention",)))
        data = micro_batches(SPLIT)
        loss, recorded = record(runtime, tenant, data)
        assert recorded.keys() == set(range(sum(map(len, SPLIT))))
        assert replayed(runtime, tenant, with_routes(data, SPLIT, recorded)) == loss
        shifted = {index: (routes + 1) % 4 for index, routes in recorded.items()}
        other = replayed(runtime, tenant, with_routes(data, SPLIT, shifted))
        assert abs(other - loss) > 1e-3
        # A new tenant is its base, whose routes it takes too.
        assert replayed(runtime, base, with_routes(data, SPLIT, shifted)) == pytest.approx(other, rel=1e-6)


@pytest.mark.parametrize("mode", ["off", "record", "replay"])
@pytest.mark.parametrize(
    ("settings", "refused_in"),
    [
        ({}, ()),
        ({"moe_router_load_balancing_type": "aux_loss"}, ()),
        ({"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.01}, ("replay",)),
        ({"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.01}, ("replay",)),
        ({"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"], "moe_aux_loss_coeff": [0.0, 0.1]}, ("replay",)),
        ({"moe_router_load_balancing_type": ["aux_loss"], "moe_aux_loss_coeff": [0.0]}, ()),
        ({"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.01}, ()),
        ({"moe_router_load_balancing_type": "sinkhorn"}, ("record", "replay")),
        (
            {"moe_router_load_balancing_type": ["aux_loss", "sinkhorn"], "moe_aux_loss_coeff": [0.0, 0.0]},
            ("record", "replay"),
        ),
        ({"moe_router_fusion": True}, ("record", "replay")),
    ],
    ids=str,
)
def test_what_megatron_routes_differently_with_is_refused_by_name(
    settings: dict[str, Any], refused_in: tuple[str, ...], mode: Any
) -> None:
    from rl_backend.runtime.bridge.passes.routers import require_routing_by_scores

    usual = {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0, "moe_router_fusion": False}
    provider = SimpleNamespace(**usual | settings)
    if mode not in refused_in:
        require_routing_by_scores(provider, mode)
        return
    with pytest.raises(UnsupportedError, match=rf"router_replay='{mode}' with .* ({'|'.join(settings)})="):
        require_routing_by_scores(provider, mode)
