"""The weights that an engine waits for."""

from __future__ import annotations

from pathlib import Path

from actors.rollout.vllm.expected import expected_weights
from rl_backend.contracts import TensorInfo, dtype_from_name
from rl_backend.weights.compare import find_mismatches
from tests.support.kept_family import TRAINED, stored_bytes, write_towered


def test_an_engine_waits_for_trained_weights_alone(tmp_path: Path) -> None:
    path = write_towered(tmp_path / "source")
    stored = stored_bytes(path)
    # Whether vLLM calls its parameters as the directory does, or otherwise.
    for parameters in (list(stored), [f"language_{name}" for name in stored]):
        expected = expected_weights(str(path), "float32", parameters, {})
        assert set(expected.required) == set(TRAINED)
        pushed = [TensorInfo.of(name, stored[name].shape, dtype_from_name("float32")) for name in TRAINED]
        assert find_mismatches(pushed, expected) == []
        assert find_mismatches(pushed[1:], expected) == [f"missing: {TRAINED[0]}"]
