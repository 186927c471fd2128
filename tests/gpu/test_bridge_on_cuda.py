"""Megatron on CUDA: with Transformer Engine's layers where it is installed, with its own where it is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from rl_backend.contracts import ConfigError, NativeConfig, OptimizerConfig, RuntimeConfig, UnsupportedError
from rl_backend.runtime import create_runtime
from rl_backend.runtime.bridge.config import BridgeConfig
from rl_backend.runtime.bridge.installed import has_transformer_engine, import_megatron
from tests.support.models import write_tiny_qwen3
from tests.support.native import micro_batches, token_loss

try:
    import_megatron()
except UnsupportedError as error:
    pytest.skip(str(error), allow_module_level=True)

pytestmark = pytest.mark.gpu

SPLIT = [[0, 1], [2, 3, 4], [5], [6, 7]]


def curve(
    model: Path, backend: Literal["native", "bridge"], steps: int = 10, *, param_dtype: str = "float32", **options: Any
) -> tuple[list[float], list[float], list[torch.Tensor]]:
    """Losses, gradient norms, and the log-probs of the first step."""
    config_type = {"native": NativeConfig, "bridge": BridgeConfig}[backend]
    backend_cfg = config_type(device="cuda", param_dtype=param_dtype, optimizer=OptimizerConfig(lr=1e-3), **options)
    runtime = create_runtime(RuntimeConfig(backend=backend, hf_path=str(model), backend_cfg=backend_cfg))
    try:
        handle = runtime.build_model()
        losses, norms, log_probs = [], [], []
        for step in range(steps):
            runtime.zero_grad(handle)
            result = runtime.forward_backward(handle, micro_batches(SPLIT), token_loss)
            if step == 0:
                log_probs = [value.cpu() for value in result.output("log_probs")]
            losses.append(result.loss)
            ok, norm, _ = runtime.optimizer_step(handle)
            assert ok
            norms.append(norm)
        return losses, norms, log_probs
    finally:
        runtime.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 64, which every attention kernel takes."""
    return write_tiny_qwen3(tmp_path_factory.mktemp("model"), head_dim=64)


def test_megatron_trains_as_the_native_runtime_does(model: Path) -> None:
    (losses, norms, log_probs), (expected, expected_norms, expected_log_probs) = (
        curve(model, backend) for backend in ("bridge", "native")
    )
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=0.0)
    torch.testing.assert_close(norms, expected_norms, rtol=1e-3, atol=0.0)
    for found, wanted in zip(log_probs, expected_log_probs, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0.0)


def test_megatron_learns_in_bfloat16(model: Path) -> None:
    losses, _, log_probs = curve(model, "bridge", 30, param_dtype="bfloat16")
    assert losses[-1] < 0.8 * losses[0]
    for found, wanted in zip(log_probs, curve(model, "native", 1)[2], strict=True):
        torch.testing.assert_close(found, wanted, atol=0.2, rtol=0.0)


def test_overlapped_communication_changes_no_loss(model: Path) -> None:
    overlapped = curve(model, "bridge", override_ddp_config={"overlap_grad_reduce": True, "overlap_param_gather": True})
    torch.testing.assert_close(overlapped[0], curve(model, "bridge")[0], rtol=1e-5, atol=0.0)


@pytest.mark.skipif(has_transformer_engine(), reason="Transformer Engine is installed")
def test_what_needs_transformer_engine_is_refused_without_it(model: Path) -> None:
    with pytest.raises(ConfigError, match="Transformer Engine"):
        curve(model, "bridge", override_transformer_config={"apply_rope_fusion": True})
