"""verl's engine between its modes: what is offloaded leaves the device, and determinism is switched on."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.support.models import write_tiny
from tests.support.offloads import parts_away
from tests.support.rank_pool import RankPool
from tests.support.verl_engine import open_engine

IMPORT_SECONDS = 300.0
PARTS = ("model", "optimizer", "grad")


def places_job(model: str, backend: str) -> list[list[bool]]:
    """Whether each part is on the device: at rest, in training, in evaluation, at rest, and when verl asks for the model."""

    def places() -> list[bool]:
        return [part not in parts_away(engine.handle.offload) for part in PARTS]

    with open_engine(model, backend=backend, param_offload=True, optimizer_offload=True) as engine:
        found = [places()]
        with engine.train_mode():
            found.append(places())
        with engine.eval_mode():
            found.append(places())
        found.append(places())
        engine.to("cpu" if not torch.cuda.is_available() else "cuda", optimizer=False, grad=False)
        found.append(places())
    return found


def test_parts_are_on_the_device_only_in_the_modes_that_use_them(ranks: RankPool, tmp_path: Path) -> None:
    model = write_tiny("qwen3", tmp_path / "model")
    (found,) = ranks.run(places_job, str(model), "native", world_size=1, timeout=IMPORT_SECONDS)
    away, training, evaluating, away_again, asked_for = found
    assert away == away_again == [False, False, False]
    assert training == [True, True, True]
    assert evaluating == [True, False, False]
    assert asked_for == [True, False, False]


def determinism_job(model: str, wanted: bool) -> bool:
    try:
        with open_engine(model, full_determinism=wanted):
            return torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_full_determinism_reaches_torch(ranks: RankPool, tmp_path: Path) -> None:
    model = str(write_tiny("qwen3", tmp_path / "model"))
    for wanted in (False, True):
        assert ranks.run(determinism_job, model, wanted, world_size=1, timeout=IMPORT_SECONDS) == [wanted]
