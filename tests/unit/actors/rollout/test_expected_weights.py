"""The weights that an engine waits for, and what a push may leave out."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.rollout.vllm.expected import expected_weights
from actors.sync.transport.base import PushPlan
from rl_backend.contracts import TensorInfo, WeightCheckError, dtype_from_name
from rl_backend.weights.compare import check_manifest
from tests.support.kept_family import TRAINED, stored_bytes, write_towered


@pytest.mark.shows("weight sync: a push leaves out what is not trained, and nothing else")
@pytest.mark.parametrize("own_names", [True, False])
def test_a_push_may_leave_out_what_its_trainer_keeps_and_nothing_else(tmp_path: Path, own_names: bool) -> None:
    stored = stored_bytes(write_towered(tmp_path / "source"))
    # Whether vLLM calls its parameters as the directory does, or otherwise.
    parameters = [name if own_names else f"language_{name}" for name in stored]
    expected = expected_weights(str(tmp_path / "source"), "float32", parameters, {})
    infos = tuple(TensorInfo.of(name, stored[name].shape, dtype_from_name("float32")) for name in TRAINED)
    kept = tuple(name for name in stored if name not in TRAINED)

    def check(infos: tuple[TensorInfo, ...], kept: tuple[str, ...]) -> None:
        plan = PushPlan("key", None, "float32", None, 0, infos, "node", "host", kept=kept)
        check_manifest(plan.manifest, expected, engine="engine 0")

    check(infos, kept)
    with pytest.raises(WeightCheckError, match=f"missing: {TRAINED[0]}$"):
        check(infos[1:], kept)
    with pytest.raises(WeightCheckError, match=f"missing: {kept[0]}$"):
        check(infos, kept[1:])
