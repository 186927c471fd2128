"""Where a tenant's numbers lie in its row, for modules that ranks cut, and how a module's own start."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_backend.contracts.lora import PEFT_PREFIX, LoRAConfig, LoRAKind
from rl_backend.lora.modules import AdaptedModule, modules_of_rank, value_head
from rl_backend.lora.rows import (
    RowTensor,
    Section,
    TenantRows,
    factors_of,
    factors_of_rank,
    head_parameters,
    initial_factor,
    lay_out_row,
    padded_rank,
)

INPUTS, OUTPUTS = 10, 6


def module(name: str = "q_proj", kind: LoRAKind = "attention", **changes: Any) -> AdaptedModule:
    given: dict[str, Any] = {"inputs": (0, INPUTS), "outputs": (0, OUTPUTS), **changes}
    return AdaptedModule(name, kind, INPUTS, OUTPUTS, **given)


@pytest.mark.parametrize(
    ("rank", "padded"), [(1, 16), (15, 16), (16, 16), (17, 32), (32, 32), (33, 64), (64, 64), (65, 128), (200, 256)]
)
def test_memory_is_kept_for_sixteen_times_a_power_of_two(rank: int, padded: int) -> None:
    assert padded_rank(rank) == padded


@pytest.mark.parametrize(
    ("changes", "cuts", "a", "b"),
    [
        ({}, (False, False), ((0, 0), (5, 10), True), ((0, 0), (6, 5), True)),
        ({"inputs": (5, 10)}, (True, False), ((0, 5), (5, 5), False), ((0, 0), (6, 5), True)),
        ({"inputs": (0, 5)}, (True, False), ((0, 0), (5, 5), False), ((0, 0), (6, 5), True)),
        ({"outputs": (2, 6)}, (False, True), ((0, 0), (5, 10), True), ((2, 0), (4, 5), False)),
        ({"outputs": (0, 2)}, (False, True), ((0, 0), (5, 10), True), ((0, 0), (2, 5), False)),
        ({"outputs": (2, 4), "holds_outputs": True}, (False, False), ((0, 0), (5, 10), True), ((0, 0), (6, 5), True)),
    ],
    ids=str,
)
def test_a_rank_has_the_columns_of_a_and_the_rows_of_b_that_it_computes_with(
    changes: dict[str, Any], cuts: tuple[bool, bool], a: tuple[Any, ...], b: tuple[Any, ...]
) -> None:
    cut = module(**changes)
    assert (cut.cuts_inputs, cut.cuts_outputs) == cuts
    first, second, magnitude = factors_of(cut, LoRAConfig(rank=5, use_dora=True))
    assert (first.role, first.size, (first.first, first.held, first.summed)) == ("a", (5, INPUTS), a)
    assert (second.role, second.size, (second.first, second.held, second.summed)) == ("b", (OUTPUTS, 5), b)
    of_magnitude = (magnitude.first, magnitude.held, magnitude.summed)
    assert (magnitude.role, magnitude.size, of_magnitude) == ("magnitude", (OUTPUTS,), (b[0][:1], b[1][:1], b[2]))
    assert (first.padding, second.padding, magnitude.padding) == ((11, 0), (0, 11), (0,))
    assert first.shape == (16, a[1][1]) and second.shape == (b[1][0], 16)
    assert [each.name for each in (first, second, magnitude)] == [
        f"{PEFT_PREFIX}q_proj.{part}" for part in ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")
    ]
    whole = torch.arange(OUTPUTS * 5).view(OUTPUTS, 5)
    assert torch.equal(second.cut(whole), whole[b[0][0] : b[0][0] + b[1][0]])


def test_an_embedding_has_pefts_names_and_no_magnitude_unless_asked() -> None:
    names = [each.name for each in factors_of(module("embed_tokens", "embedding"), LoRAConfig())]
    assert names == [f"{PEFT_PREFIX}embed_tokens.lora_embedding_{part}" for part in "AB"]


def test_experts_that_share_a_factor_have_their_others_in_one_tensor_and_sum_the_shared_one_with_all_ranks() -> None:
    config = LoRAConfig(rank=5, experts_share_factor=True)
    kinds: dict[str, LoRAKind] = {f"l.experts.{number}.down_proj": "experts" for number in range(12)}
    held = [module(name, "experts", is_expert=True, inputs=(5, 10)) for name in list(kinds)[9:]]
    a, b, *others = factors_of_rank([module(), *reversed(held)], config, {**kinds, "q_proj": "attention"})[2:]
    assert not others and [each.name for each in (a, b)] == [
        f"{PEFT_PREFIX}l.experts.w2.lora_{part}.weight" for part in "AB"
    ]
    assert (a.size, a.first, a.held, a.padding) == ((12, 5, INPUTS), (9, 0, 5), (3, 5, 5), (0, 11, 0))
    assert (b.size, b.first, b.held, b.padding) == ((1, OUTPUTS, 5), (0, 0, 0), (1, OUTPUTS, 5), (0, 0, 11))
    assert [(each.module.is_expert, each.summed) for each in (a, b)] == [(True, False), (False, True)]
    rows = TenantRows.new(config, [a, b], torch.device("cpu"), {}, lambda each: None)
    for number, each in enumerate(held):
        factors = rows.modules[each.name]
        assert torch.equal(factors.a[:5], initial_factor(config, a)[9 + number, :, 5:]) and factors.a.shape == (16, 5)
        factors.grad_b[:, :5] += 1.0
        factors.grad_a[:5] += number
    found = {tensor.role: view for tensor, view in rows.views(rows.gradients)}
    assert torch.equal(found["b"], torch.full((1, OUTPUTS, 5), 3.0)) and found["a"].mean((1, 2)).tolist() == [0.0, 1.0, 2.0]
    assert len({rows.modules[each.name].seed for each in held}) == 3


def tensors() -> list[RowTensor]:
    """Of modules that all ranks have whole, of one that ranks cut, of experts, and of a head."""
    config = LoRAConfig(rank=16, use_dora=True)
    return [
        *factors_of(module("expert", "experts", is_expert=True, inputs=(0, 5)), config),
        *factors_of(module("cut", outputs=(0, 3)), config),
        *factors_of(module("whole"), config),
        *head_parameters(value_head(7)),
    ]


def test_a_row_has_a_section_for_each_way_of_adding_up_and_what_does_not_decay_last_in_it() -> None:
    placed, sections = lay_out_row(tensors())
    assert [(each.module.name, each.role) for each in placed] == [
        ("cut", "a"),
        ("whole", "a"),
        ("whole", "b"),
        ("score", "weight"),
        ("whole", "magnitude"),
        ("score", "bias"),
        ("cut", "b"),
        ("cut", "magnitude"),
        ("expert", "b"),
        ("expert", "magnitude"),
        ("expert", "a"),
    ]
    sizes = [16 * 10, 16 * 10, 6 * 16, 7, 6, 1, 3 * 16, 3, 6 * 16, 6, 16 * 5]
    starts = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
    assert [(each.start, each.stop) for each in placed] == list(itertools.pairwise(starts))
    assert sections == [
        Section(0, starts[6], of_experts=False, summed=True),
        Section(starts[6], starts[8], of_experts=False, summed=False),
        Section(starts[8], starts[10], of_experts=True, summed=True),
        Section(starts[10], starts[11], of_experts=True, summed=False),
    ]
    assert lay_out_row([]) == ([], [])
    rows = TenantRows.new(LoRAConfig(rank=16), tensors(), torch.device("cpu"), zeros_of(tensors()), lambda each: None)
    spans = [(span.start, span.stop, decays) for span, decays in rows.spans()]
    assert spans == [
        (0, starts[4], True),
        (starts[4], starts[6], False),
        (starts[6], starts[7], True),
        (starts[7], starts[8], False),
        (starts[8], starts[9], True),
        (starts[9], starts[10], False),
        (starts[10], starts[11], True),
    ]
    assert rows.nbytes == 4 * 4 * starts[-1]


def zeros_of(of: list[RowTensor]) -> dict[str, Tensor]:
    return {each.name: torch.zeros(each.size) for each in of if len(each.size) == 1 or each.role == "weight"}


def test_parameters_of_a_head_are_trained_whole_by_every_rank() -> None:
    weight, bias = head_parameters(value_head(7))
    assert (weight.name, weight.size, weight.held, weight.first) == (f"{PEFT_PREFIX}score.weight", (1, 7), (1, 7), (0, 0))
    assert (bias.name, bias.size, bias.held, bias.first) == (f"{PEFT_PREFIX}score.bias", (1,), (1,), (0,))
    assert weight.summed and bias.summed and (weight.padding, bias.padding) == ((0, 0), (0,))
    assert (value_head(7).in_features, value_head(7).out_features, value_head(7).kind) == (7, 1, "head")


def test_first_factors_are_drawn_whole_whatever_part_a_rank_has() -> None:
    config = LoRAConfig(rank=5, seed=3)
    whole, part = module(), module(inputs=(4, 10))
    a, b = factors_of(whole, config)
    first = initial_factor(config, a)
    generator_free = initial_factor(config, factors_of(part, config)[0])
    assert first.shape == (5, INPUTS) and torch.equal(first, generator_free)
    assert 0.8 / math.sqrt(INPUTS) < float(first.abs().max()) <= 1 / math.sqrt(INPUTS) and first.min() < 0
    assert not initial_factor(config, b).any()
    a, b = factors_of(module("embed_tokens", "embedding"), LoRAConfig(rank=400, seed=3))
    assert not initial_factor(config, a).any()
    normal = initial_factor(config, b)
    assert normal.shape == (OUTPUTS, 400)
    assert [float(normal.mean()), float(normal.std())] == pytest.approx([0.0, 1.0], abs=0.06)
    rows = TenantRows.new(config, factors_of(part, config), torch.device("cpu"), {}, lambda each: None)
    own = rows.own[f"{PEFT_PREFIX}q_proj.lora_A.weight"]
    assert torch.equal(own, first[:, 4:])
    assert own.untyped_storage().data_ptr() == rows.weights.untyped_storage().data_ptr()


def test_layers_compute_with_views_of_the_rows_padding_included() -> None:
    config = LoRAConfig(rank=5, alpha=3.0, dropout=0.25, use_dora=True, use_rslora=True, seed=2)
    shared = module("k_proj", outputs=(2, 4), holds_outputs=True)
    cut = module("o_proj", inputs=(5, 10))
    of_all = [*factors_of(shared, config), *factors_of(cut, config), *head_parameters(value_head(7))]
    magnitudes = {each.name: torch.arange(OUTPUTS) + 1.0 for each in of_all if each.role == "magnitude"}
    head = {each.name: torch.full(each.size, 0.5) for each in head_parameters(value_head(7))}
    asked: list[str] = []

    def sum_over_inputs(each: AdaptedModule) -> Any:
        asked.append(each.name)
        return lambda x: x.add_(len(asked))

    rows = TenantRows.new(config, of_all, torch.device("cpu"), magnitudes | head, sum_over_inputs)
    assert not rows.gradients.any() and not rows.exp_avg.any() and not rows.exp_avg_sq.any() and not asked
    keys, output = rows.modules["k_proj"], rows.modules["o_proj"]
    assert asked == ["k_proj", "o_proj"] and rows.modules is rows.modules
    assert (keys.a.shape, keys.b.shape, keys.magnitude.tolist()) == ((16, 10), (2, 16), [3.0, 4.0])  # type: ignore[union-attr]
    assert (output.a.shape, output.b.shape) == ((16, 5), (6, 16))
    assert output.magnitude is not None and output.magnitude.tolist() == [1, 2, 3, 4, 5, 6]
    assert not keys.a[5:].any() and keys.a[:5].all()
    assert [keys.scale, keys.dropout] == pytest.approx([3 / math.sqrt(5), 0.25])
    for factors in (keys, output):
        assert factors.sum_over_inputs is not None
        factors.sum_over_inputs(added := torch.zeros(1))
        assert added.item() == 2.0
    for factors in (keys, output):
        for gradient, row in ((factors.grad_a, rows.gradients), (factors.a, rows.weights)):
            assert gradient.untyped_storage().data_ptr() == row.untyped_storage().data_ptr()
    keys.grad_b.fill_(1.0)
    rows.gradients.mul_(2.0)
    ((_, of_b),) = [(each, view) for each, view in rows.views(rows.gradients) if (each.module, each.role) == (shared, "b")]
    assert of_b.sum(1).tolist() == [0, 0, 10, 10, 0, 0] and of_b.shape == (6, 5)
    run = rows.run(3, 8, 11, key=4)
    assert (run.start, run.stop, run.draw, run.key, run.modules) == (3, 8, 11, 4, rows.modules)
    assert run.head is not None and run.head.weight.tolist() == [[0.5] * 7] and run.head.bias.tolist() == [0.5]
    assert run.head.grad_weight.untyped_storage().data_ptr() == rows.gradients.untyped_storage().data_ptr()
    assert (
        TenantRows.new(config, factors_of(cut, config), torch.device("cpu"), magnitudes, lambda each: None)
        .run(0, 1, None)
        .head
        is None
    )


def test_dropout_of_the_parts_of_a_cut_module_is_drawn_apart_and_that_of_equal_parts_alike() -> None:
    config = LoRAConfig(rank=4, dropout=0.5)

    def seed(**changes: Any) -> int:
        each = module(**changes)
        return (
            TenantRows.new(config, factors_of(each, config), torch.device("cpu"), {}, lambda _: None).modules["q_proj"].seed
        )

    assert seed(inputs=(0, 5)) == seed() == seed(outputs=(0, 3)) == seed(outputs=(3, 6))
    assert seed(inputs=(5, 10)) != seed()


def test_a_rank_has_those_of_the_modules_that_it_holds_in_the_order_asked() -> None:
    held = {name: module(name) for name in ("a", "b", "c")}
    assert [each.name for each in modules_of_rank(("c", "x", "a"), held)] == ["c", "a"]
