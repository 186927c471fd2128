"""Adapters beside a frozen linear layer in every form, against autograd: DoRA, dropout, fused layers, biases, dtypes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from rl_backend.primitive.adapters import (
    AdapterRun,
    Columns,
    Factors,
    adapted_linear,
    adapters_at_work,
    add_products,
    dropped,
    padded_product,
)

INPUTS = 7


class Form(NamedTuple):
    """How the adapters of a layer are."""

    rows: Sequence[int]
    scales: Sequence[float] = (2.0, 0.5)
    dora: bool = False
    dropout: float = 0.0
    bias: bool = False
    dtype: torch.dtype = torch.float64
    modules: Mapping[str, Columns | None] = {"q_proj": None}
    outputs: int = 9


FUSED = {"q_proj": Columns(3, 0, 2), "v_proj": Columns(3, 3, 5)}
FORMS = {
    "few rows": Form((3, 2)),
    "a stack with two scales": Form((17, 17)),
    "a stack with one scale": Form((17, 17), (0.5, 0.5)),
    "many outputs": Form((3, 20), outputs=40),
    "bias": Form((3, 2), bias=True),
    "dropout": Form((4, 18), dropout=0.4),
    "fused": Form((3, 17), modules=FUSED, outputs=15),
    "fused, a stack": Form((17, 17), modules=FUSED, outputs=15, bias=True),
    "fused, dropout": Form((3, 17), modules=FUSED, outputs=15, dropout=0.3),
    "DoRA": Form((3, 17), dora=True, dtype=torch.float32),
    "DoRA, bias": Form((17, 17), dora=True, dtype=torch.float32, bias=True),
    "DoRA, dropout": Form((5, 18), dora=True, dtype=torch.float32, dropout=0.3),
    "DoRA, fused": Form((5, 18), dora=True, dtype=torch.float32, modules=FUSED, outputs=15, bias=True),
    "DoRA, fused, dropout": Form((5, 18), dora=True, dtype=torch.float32, modules=FUSED, outputs=15, dropout=0.3),
    "bfloat16": Form((5, 18), dtype=torch.bfloat16, bias=True),
    "bfloat16, a stack": Form((18, 18), dtype=torch.bfloat16, modules=FUSED, outputs=15),
    "bfloat16, DoRA": Form((5, 18), dtype=torch.bfloat16, dora=True, dropout=0.3),
}


def adapter(form: Form, seed: int, scale: float, columns: Columns | None) -> Factors:
    generator = torch.Generator().manual_seed(seed)
    outputs = form.outputs if columns is None else columns.groups * (columns.stop - columns.start)
    dtype = torch.float64 if form.dtype == torch.float64 else torch.float32
    a, b = (torch.randn(shape, generator=generator).to(dtype) for shape in ((4, INPUTS), (outputs, 4)))
    magnitude = 1.0 + torch.rand(outputs, generator=generator).to(dtype) if form.dora else None
    return Factors(
        a,
        b,
        torch.zeros_like(a),
        torch.zeros_like(b),
        scale,
        form.dropout,
        seed,
        magnitude,
        None if magnitude is None else torch.zeros_like(magnitude),
    )


def by_definition(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    form: Form,
    runs: Sequence[AdapterRun],
    leaves: Mapping[int, list[Tensor]],
) -> Tensor:
    """``(m / |W + s B A|) (W + s B A) x`` with what is dropped left out of all but ``W x``; module by module."""
    y = x @ weight.t()
    for run in runs:
        for name, columns in form.modules.items():
            factors = run.modules[name]
            a, b, *magnitude = leaves[id(factors)]
            places = torch.arange(form.outputs)
            if columns is not None:
                places = torch.cat([group[columns.start : columns.stop] for group in places.view(columns.groups, -1)])
            own = x[run.start : run.stop]
            kept = own * (dropped(torch.ones_like(own), run.draw, factors))
            change = factors.scale * kept @ a.t() @ b.t()
            if magnitude:
                norm = (weight[places] + factors.scale * b @ a).detach().norm(dim=1)
                base = kept @ weight[places].t()
                change = (magnitude[0] / norm) * (base + change) - base
            whole = torch.zeros(len(own), form.outputs, dtype=change.dtype).index_copy(1, places, change)
            y = torch.cat((y[: run.start], y[run.start : run.stop] + whole, y[run.stop :]))
    return y if bias is None else y + bias


@pytest.mark.parametrize("name", FORMS)
def test_outputs_and_gradients_are_those_of_the_definition(name: str) -> None:
    form = FORMS[name]
    generator = torch.Generator().manual_seed(5)
    total = sum(form.rows) + 4
    x, weight, bias, mix = (
        torch.randn(shape, generator=generator).to(form.dtype)
        for shape in ((total, INPUTS), (form.outputs, INPUTS), (form.outputs,), (total, form.outputs))
    )
    runs, start = [], 2
    for index, (rows, scale) in enumerate(zip(form.rows, form.scales, strict=True)):
        modules = {
            module: adapter(form, 10 * index + number, scale, columns)
            for number, (module, columns) in enumerate(form.modules.items())
        }
        runs.append(AdapterRun(start, start + rows, modules, draw=index if form.dropout else None))
        start += rows
    held = [factors for run in runs for factors in run.modules.values()]
    inputs = x.clone().requires_grad_()
    # Twice: gradients are added up.
    for _ in range(2):
        with adapters_at_work(runs):
            found = adapted_linear(inputs, weight, bias if form.bias else None, form.modules)
        (found * mix).sum().backward()
    reference = x.double().requires_grad_()
    leaves = {
        id(each): [leaf.double().requires_grad_() for leaf in (each.a, each.b, each.magnitude) if leaf is not None]
        for each in held
    }
    expected = by_definition(reference, weight.double(), bias.double() if form.bias else None, form, runs, leaves)
    (expected * mix.double()).sum().backward()
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 0.03}[form.dtype]

    def compare(mine: Tensor, right: Tensor) -> None:
        torch.testing.assert_close(mine.double(), right, atol=tolerance * float(right.abs().max()), rtol=0)

    assert found.dtype == form.dtype and inputs.grad is not None and reference.grad is not None
    compare(found.detach(), expected.detach())
    compare(inputs.grad, 2 * reference.grad)
    for each in held:
        for mine, leaf in zip((each.grad_a, each.grad_b, each.grad_magnitude), leaves[id(each)], strict=False):
            assert mine is not None and leaf.grad is not None
            compare(mine, 2 * leaf.grad)


def test_a_layer_without_an_adapter_for_it_is_the_frozen_one() -> None:
    x, weight, bias = torch.randn(20, INPUTS), torch.randn(9, INPUTS), torch.randn(9)
    form = Form((20,))
    with adapters_at_work([AdapterRun(0, 20, {"k_proj": adapter(form, 1, 1.0, None)})]):
        found = adapted_linear(x, weight, bias, {"q_proj": None})
    torch.testing.assert_close(found, x @ weight.t() + bias)


def test_norms_of_a_layer_whose_inputs_are_cut_are_those_of_all_ranks() -> None:
    """Ranks that have half of the inputs each, whose squares are added up."""
    form = Form((5,), dora=True)
    whole = adapter(form, 1, 1.5, None)
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=generator).double() for shape in ((5, INPUTS), (9, INPUTS)))
    parts, sums = [slice(0, 3), slice(3, INPUTS)], []
    other = (weight[:, parts[1]].float() + 1.5 * (whole.b @ whole.a[:, parts[1]]).float()).square().sum(1)

    def add(squares: Tensor) -> None:
        sums.append(squares.clone())
        squares += other

    half = whole._replace(a=whole.a[:, parts[0]].float(), b=whole.b.float(), sum_over_inputs=add)
    assert whole.magnitude is not None
    half = half._replace(magnitude=whole.magnitude.float())
    with adapters_at_work([AdapterRun(0, 5, {"q_proj": half})]):
        found = adapted_linear(x[:, parts[0]].float(), weight[:, parts[0]].float(), None, {"q_proj": None})
    norm = (weight + 1.5 * whole.b @ whole.a).norm(dim=1)
    expected = whole.magnitude / norm * (x[:, parts[0]] @ (weight + 1.5 * whole.b @ whole.a)[:, parts[0]].t())
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    assert len(sums) == 1


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (15, 16), (16, 15), (17, 40), (0, 3)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_padded_product_is_the_product(rows: int, columns: int, with_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, matrix, bias = (torch.randn(shape, generator=generator) for shape in ((rows, 6), (6, columns), (columns,)))
    found = padded_product(x, matrix, bias if with_bias else None)
    assert found.is_contiguous() and found.shape == (rows, columns)
    torch.testing.assert_close(found, x @ matrix + (bias if with_bias else 0.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_are_added_to_each_buffer_without_the_rows_beyond_it(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=generator).to(dtype) for shape in ((2, 5, 3), (2, 3, 4)))
    buffers = [torch.full((4, 4), 1.0), torch.full((4, 4), 10.0)]
    add_products(buffers, torch.bmm(a, b))
    for buffer, before, left, right in zip(buffers, (1.0, 10.0), a, b, strict=True):
        assert buffer.dtype == torch.float32
        torch.testing.assert_close(buffer, before + (left[:4] @ right).float(), atol=1e-5, rtol=1e-2)
