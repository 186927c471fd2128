"""Compiled layers on CUDA compute what others do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rl_backend.contracts import PackedBatch
from tests.gpu.conftest import MakeRuntime
from tests.support.native import assert_near, gradients, micro_batches, token_loss

pytestmark = pytest.mark.gpu

SPLIT = [[0, 1], [2, 3, 4], [5], [6, 7]]


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_compiled_layers_in_bfloat16_train_as_others_do(
    wider_model: Path, make_runtime: MakeRuntime, checkpointing: str
) -> None:
    found = []
    for compiled in (False, True):
        options = {"param_dtype": "bfloat16", "compile": compiled, "activation_checkpointing": checkpointing}
        runtime = make_runtime(wider_model, **options)
        handle = runtime.build_model()
        batches: list[PackedBatch] = micro_batches(SPLIT)
        loss = runtime.forward_backward(handle, batches, token_loss).loss
        found.append((loss, {name: value.float() for name, value in gradients(handle).items()}))
    (loss, grads), (compiled_loss, compiled_grads) = found
    torch.testing.assert_close(compiled_loss, loss, rtol=1e-3, atol=0.0)
    assert_near(compiled_grads, grads, 5e-2)
