"""What was saved comes back into every stage."""

from __future__ import annotations

from pathlib import Path

from tests.support.native import assert_equal_tensors, open_runtime, optimizer_state, train, weights


def test_a_tied_head_in_a_stage_of_its_own_is_loaded_with_its_embeddings(tied_model: Path, tmp_path: Path) -> None:
    stages = {"parallel": {"vpp": 2}, "pipeline_schedule": "zbv"}
    with open_runtime(tied_model, **stages) as runtime:
        handle = runtime.build_model()
        train(runtime, handle, 2)
        runtime.save_checkpoint(handle, tmp_path / "saved")
        expected = {**weights(handle), **optimizer_state(handle)}
        fresh = runtime.build_model(name="fresh")
        assert fresh.stage_copies
        runtime.load_checkpoint(fresh, tmp_path / "saved")
        assert_equal_tensors({**weights(fresh), **optimizer_state(fresh)}, expected)
        assert train(runtime, fresh, 1, first_seed=2) == train(runtime, handle, 1, first_seed=2)
