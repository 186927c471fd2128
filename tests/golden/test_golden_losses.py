"""Short training runs stay what they were; see ``native_training.py`` for how to write the file anew."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.golden.native_training import GOLDEN_FILE, all_curves


def test_native_training_follows_the_golden_losses(tmp_path: Path) -> None:
    golden = json.loads(GOLDEN_FILE.read_text())
    curves = all_curves(tmp_path)
    assert curves.keys() == golden.keys()
    for name, curve in curves.items():
        assert curve["loss"] == pytest.approx(golden[name]["loss"], rel=1e-5)
        assert curve["grad_norm"] == pytest.approx(golden[name]["grad_norm"], rel=1e-5)
