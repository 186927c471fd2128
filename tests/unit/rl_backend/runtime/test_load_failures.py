"""A checkpoint that cannot be read to its end leaves a model that is refused until another one is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rl_backend.contracts import CheckpointError, HandleError
from rl_backend.runtime import checkpoints
from tests.support.native import micro_batches, open_runtime, token_loss


def test_a_load_that_fails_in_the_middle_leaves_a_model_that_is_refused(
    tied_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(path: Path, tensors: Any, group: Any) -> None:
        raise CheckpointError(f"{path} could not be read: the disk went away")

    data = micro_batches([[0], [1]])
    with open_runtime(tied_model) as runtime:
        handle = runtime.build_model()
        runtime.save_checkpoint(handle, tmp_path / "saved")
        with monkeypatch.context() as patch:
            patch.setattr(checkpoints, "read_training_state", fails)
            with pytest.raises(CheckpointError, match="the disk went away"):
                runtime.load_checkpoint(handle, tmp_path / "saved")
        with pytest.raises(HandleError, match=r"loading .*saved failed in the middle"):
            runtime.forward_backward(handle, data, token_loss)
        runtime.load_checkpoint(handle, tmp_path / "saved")
        runtime.forward_backward(handle, data, token_loss)
