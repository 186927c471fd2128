"""The benchmark of LoRA tenants counts what it says it counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import lora, lora_curves
from rl_backend.contracts.lora import LORA_FIELD

MODEL = {**lora_curves.MODEL, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16}


@pytest.mark.long
def test_memory_of_a_tenant_is_weights_gradients_and_two_moments(tmp_path: Path) -> None:
    found = lora.memory_per_tenant(lora_curves.write_model(tmp_path, MODEL))
    assert found["16"] == pytest.approx(4.0, abs=0.1) and found["64"] == pytest.approx(4.0, abs=0.1)
    assert found["4"] == pytest.approx(4 * found["16"], rel=0.05)


def test_held_bytes_are_of_memory_and_count_views_once() -> None:
    before = lora.held_bytes()
    rows = torch.zeros(1000, 100)
    views = [rows[0], rows.t()]
    assert lora.held_bytes() - before == rows.nbytes
    del rows, views
    assert lora.held_bytes() == before


def test_sequences_are_a_tenants_own() -> None:
    for tokens in lora_curves.SEQUENCES:
        rows = lora_curves.draw_sequences(5, tokens)
        assert sum(map(len, rows)) == tokens
        assert {int(row.sequence_fields[LORA_FIELD]) for row in rows} == {5}


def test_a_cell_has_the_medians_of_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    sides: dict[str, Any] = {"swapped": iter([9.0] * 99).__next__, "batched": iter([3.0] * 99).__next__}
    cell = lora_curves._cell(sides, seconds=1.0)
    assert (cell["ratio"], cell["swapped_ms"], cell["batched_ms"], cell["runs"]) == (
        3.0,
        9000.0,
        3000.0,
        lora_curves.MOST_RUNS,
    )
    sides = {"swapped": iter([9.0, 1.0, 5.0]).__next__, "batched": iter([1.0, 1.0, 1.0]).__next__}
    cell = lora_curves._cell(sides, seconds=0.0)
    assert (cell["ratio"], cell["runs"]) == (5.0, lora_curves.LEAST_RUNS)
