"""Exactness of a family: each runtime against transformers and the other, and each layout against one rank, in float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from benchmarks.family_models import Family, write_small
from benchmarks.parity import STEPS, Pair, Recorder, Side, in_words, make_folder
from benchmarks.replayed_choices import Choices, compare_on_choices, kept_choices
from benchmarks.report import machine
from benchmarks.sparse_reference import record_corrected

LAYOUT_STEPS = 5
LENGTHS = {"min_length": 1, "max_length": 150}
"""Tokens of the sequences of a batch: one alone, and more than two chunks of the gated DeltaNet."""

TRANSFORMERS, NATIVE, BRIDGE = (Side(name, {}) for name in ("transformers", "native", "bridge"))
PAIRS = {"native": (TRANSFORMERS, NATIVE), "bridge": (TRANSFORMERS, BRIDGE), "native_to_bridge": (BRIDGE, NATIVE)}
"""Name in the result -> reference and candidate."""


def layouts(family: Family) -> Iterator[Side]:
    """Layouts of both runtimes on the fewest ranks that have them."""
    experts = [{"ep": 2}] if family.is_mixture else []
    for layout in ({"dp": 2}, {"tp": 2}, {"cp": 2}, *experts, {"pp": 2}):
        yield Side("native", layout)
    yield Side("native", {"pp": 2}, "zb-h1")
    yield Side("native", {"pp": 2, "vpp": 2}, "zbv")
    for layout in ({"dp": 2}, {"tp": 2}, *experts, {"pp": 2}, {"pp": 2, "vpp": 2}):
        yield Side("bridge", layout)


def measure_parity(family: Family, folder: Path) -> dict[str, Any]:
    """Pair -> figures of as many steps as ``benchmarks.parity`` takes, or a refusal.

    Of families with indexers ``on_their_choices`` says the same of native training on the keys and experts that transformers
    chose.
    """
    corrected = record_corrected if family.corrected else None
    recorder = Recorder(write_small(family, folder / "model"), "float32", make_folder(folder / "sides"), LENGTHS, corrected)
    keeping: AbstractContextManager[Choices | None] = kept_choices() if family.corrected else nullcontext()
    with keeping as chosen:
        theirs = recorder.record(TRANSFORMERS)
    cells: dict[str, dict[str, Any]] = {}
    for name, (reference, candidate) in PAIRS.items():
        if name == "native_to_bridge" and "refused" in cells["bridge"]:
            continue
        cells[name] = recorder.compare(Pair(family.model_type, reference, candidate))
        print(f"parity {name}: {in_words(cells[name])}", flush=True)
    corrections = {"corrected": family.corrected} if family.corrected else {}
    if chosen is not None:
        cells["native"]["on_their_choices"] = compare_on_choices(recorder.config(NATIVE), theirs, chosen)
        print(f"parity native, on what transformers chose: {cells['native']['on_their_choices']}", flush=True)
    return {"pairs": cells, **corrections, **_settings(family, STEPS)}


def measure_layouts(family: Family, folder: Path) -> dict[str, Any]:
    """Layout -> figures of a few steps against one rank of the same runtime, or a refusal."""
    settings = {**LENGTHS, "steps": LAYOUT_STEPS}
    recorder = Recorder(write_small(family, folder / "model"), "float32", make_folder(folder / "sides"), settings)
    cells: dict[str, dict[str, Any]] = {}
    for side in layouts(family):
        cells[side.name] = recorder.compare(Pair(family.model_type, Side(side.runtime, {}), side))
        print(f"layout {side.name}: {in_words(cells[side.name])}", flush=True)
    return {"layouts": cells, **_settings(family, LAYOUT_STEPS)}


def _settings(family: Family, steps: int) -> dict[str, Any]:
    return {
        "steps": steps,
        "lengths": LENGTHS,
        "dtype": "float32",
        "seed": family.seed,
        "model": {"model_type": family.model_type, **family.settings("small")},
        "machine": machine(),
    }
