"""The memory that vLLM's kernels read adapters from, written and compared whole."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from actors.rollout.vllm.slots import ModuleSlots, SlotTable
from actors.wire.factors import factor_digest

SLOTS, LARGEST = 3, 4
INPUTS, OUTPUTS = 5, (3, 2)
"""Of a module whose outputs vLLM has in two slices."""


def names(module: str) -> tuple[str, str]:
    return f"{module}.lora_A", f"{module}.lora_B"


@pytest.fixture
def table() -> SlotTable:
    """Of a module in two slices and one whose A lies the other way, as an embedding's does; all slots have old values."""
    torch.manual_seed(0)
    sliced = ModuleSlots(
        "sliced",
        tuple(torch.randn(SLOTS, LARGEST, INPUTS) for _ in OUTPUTS),
        tuple(torch.randn(SLOTS, outputs, LARGEST) for outputs in OUTPUTS),
        names("sliced"),
    )
    turned = ModuleSlots(
        "turned",
        (torch.randn(SLOTS, INPUTS, LARGEST).transpose(1, 2),),
        (torch.randn(SLOTS, 7, LARGEST),),
        names("turned"),
    )
    return SlotTable([sliced, turned], [])


def adapter(rank: int, *modules: str) -> dict[str, Tensor]:
    shapes = {"sliced": (INPUTS, sum(OUTPUTS)), "turned": (INPUTS, 7)}
    factors = {}
    for module in modules:
        (inputs, outputs), (a, b) = shapes[module], names(module)
        factors |= {a: torch.randn(rank, inputs), b: torch.randn(outputs, rank)}
    return factors


def change(table: SlotTable, index: int, module: int) -> Tensor:
    """B A as the kernels compute it, over all that the slot holds."""
    slots = table.modules[module]
    return torch.cat([b[index] @ a[index] for a, b in zip(slots.a, slots.b, strict=True)])


@pytest.mark.parametrize("rank", [1, 3, LARGEST])
def test_a_slot_holds_an_adapter_and_nothing_of_the_one_before(table: SlotTable, rank: int) -> None:
    others = [tuple(part[[0, 2]].clone() for part in (*slots.a, *slots.b)) for slots in table.modules]
    for modules in (("sliced", "turned"), ("turned",), ("sliced",)):
        factors = adapter(rank, *modules)
        table.write(1, rank, factors)
        assert table.difference(1, rank, factors) == ""
        assert table.digest(1, rank, factors) == factor_digest(factors, factors.values())
        for number, module in enumerate(("sliced", "turned")):
            a, b = (factors.get(name) for name in names(module))
            expected = torch.zeros(()) if a is None or b is None else b @ a
            torch.testing.assert_close(change(table, 1, number), expected.expand_as(change(table, 1, number)))
    for before, slots in zip(others, table.modules, strict=True):
        assert all(torch.equal(old, part[[0, 2]]) for old, part in zip(before, (*slots.a, *slots.b), strict=True))


def test_whatever_else_a_slot_holds_is_a_difference(table: SlotTable) -> None:
    factors = adapter(2, "sliced")
    digest = factor_digest(factors, factors.values())
    for module, part, place in (
        (0, 1, (0, 1, 4)),
        (0, 3, (0, 1, 1)),
        (0, 0, (0, 3, 0)),
        (0, 2, (0, 0, 2)),
        (1, 0, (0, 0, 0)),
    ):
        table.write(0, 2, factors)
        slots = table.modules[module]
        (*slots.a, *slots.b)[part][place] += 1.0
        assert table.difference(0, 2, factors) == slots.names[part >= len(slots.a)]
        assert table.digest(0, 2, factors) != digest
    table.write(0, 2, factors)
    assert table.difference(0, 2, factors) == ""
    assert table.digest(0, 2, factors) == digest
    assert table.digest(0, 2, {name: factors[name] for name in reversed(factors)}) != digest


def test_an_adapter_of_no_module_here_leaves_a_slot_empty(table: SlotTable) -> None:
    table.write(1, 2, {"elsewhere.lora_A": torch.ones(2, INPUTS)})
    assert not any(bool(part[1].any()) for slots in table.modules for part in (*slots.a, *slots.b))


def test_layers_without_a_name_in_the_checkpoint_are_emptied(table: SlotTable) -> None:
    emptied: list[int] = []
    SlotTable(table.modules, [SimpleNamespace(reset_lora=emptied.append)]).write(2, 1, adapter(1, "turned"))
    assert emptied == [2]


def test_what_takes_adapters_is_named_once_for_all_layers() -> None:
    modules = ["embed_tokens", "lm_head"]
    modules += [f"layers.{layer}.self_attn.{name}_proj" for layer in (0, 11) for name in "qkv"]
    slots = [ModuleSlots(f"model.{module}", (), (), names(module)) for module in modules]
    assert SlotTable(slots, []).kinds == (
        "model.embed_tokens, model.lm_head, self_attn.q_proj, self_attn.k_proj, self_attn.v_proj"
    )
