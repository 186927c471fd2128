"""Weights that are not trained, in models that several ranks save."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from rl_backend.contracts import CheckpointError
from tests.support.kept_family import require_index, stored_bytes, write_towered
from tests.support.native import open_runtime, train
from tests.support.rank_pool import RankPool


def save_job(model: str, path: str) -> str:
    """Saves, and once more when the directory that the model was built from is gone; the message of that."""
    with open_runtime(model) as runtime:
        handle = runtime.build_model()
        runtime.save_checkpoint(handle, path, hf=True)
        dist.barrier()
        if dist.get_rank() == 0:
            Path(model).rename(f"{model}-elsewhere")
        dist.barrier()
        with pytest.raises(CheckpointError) as caught:
            runtime.save_checkpoint(handle, f"{path}-again", hf=True)
        train(runtime, handle, 1)
    return str(caught.value)


def test_several_ranks_save_what_is_kept_and_all_refuse_a_source_that_is_gone(ranks: RankPool, tmp_path: Path) -> None:
    source = write_towered(tmp_path / "source", sharded=True)
    expected = stored_bytes(source)
    for message in ranks.run(save_job, str(source), str(tmp_path / "out")):
        assert f"{source}/config.json cannot be read" in message
    assert stored_bytes(tmp_path / "out") == expected
    require_index(tmp_path / "out")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out", "source-elsewhere"]
