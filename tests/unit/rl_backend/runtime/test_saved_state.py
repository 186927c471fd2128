"""What was saved comes back into every stage."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.support.checkpoint_layouts import read_whole
from tests.support.native import (
    assert_equal_tensors,
    gradients,
    micro_batches,
    open_runtime,
    optimizer_state,
    token_loss,
    train,
    weights,
)


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


def test_a_checkpoint_has_every_tensor_under_its_own_name(untied_model: Path, tmp_path: Path) -> None:
    """After the first step the moments are known from its gradients."""
    with open_runtime(untied_model) as runtime:
        handle = runtime.build_model()
        config = handle.options.optimizer
        runtime.forward_backward(handle, micro_batches([[0, 1], [2, 3]]), token_loss)
        found = gradients(handle)
        clip = min(1.0, config.clip_grad / float(torch.cat([each.flatten() for each in found.values()]).norm()))
        assert runtime.optimizer_step(handle).ok
        runtime.save_checkpoint(handle, tmp_path / "saved")
        saved = read_whole(tmp_path / "saved")
        for name, gradient in found.items():
            stored = handle.weight_names[name]
            clipped = gradient * clip
            expected = {
                "model": handle.parameters[name].detach(),
                "optimizer.exp_avg": (1 - config.betas[0]) * clipped,
                "optimizer.exp_avg_sq": (1 - config.betas[1]) * clipped.square(),
            }
            for kind, value in expected.items():
                torch.testing.assert_close(
                    saved[f"{kind}.{stored}"], value, rtol=1e-4, atol=1e-12, msg=f"{kind} of {stored}"
                )
