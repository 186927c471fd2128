"""State of a bridge handle, and training it, for tests of exports, gradients, offloading and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from rl_backend.contracts import PackedBatch
from rl_backend.runtime.bridge.engine.engine import BridgeRuntime
from rl_backend.runtime.bridge.engine.handle import BridgeHandle
from rl_backend.runtime.bridge.engine.optimizer import num_steps, parameter_states
from tests.support.models import write_tiny
from tests.support.native import deal, micro_batches, token_loss

SPLIT = [[0, 1], [2, 3], [4, 5], [6, 7]]


def write_tiny_mixture(path: Path, **changes: Any) -> Path:
    """A Qwen3-MoE directory with four experts in each of two layers, unless ``changes`` say otherwise."""
    settings: dict[str, Any] = {
        "tie_word_embeddings": False,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    }
    return write_tiny("qwen3_moe", path, **{**settings, **changes})


def bridge_data(runtime: BridgeRuntime, seed: int = 0) -> list[PackedBatch]:
    """This data-parallel rank's micro-batches of one batch."""
    groups = runtime.engine.groups
    return micro_batches(deal(SPLIT, groups.dp_size)[groups.dp_rank], dp_size=groups.dp_size, seed=seed)


def train_bridge(
    runtime: BridgeRuntime, handle: BridgeHandle, steps: int = 1, *, seed: int = 0, loss: Any = token_loss
) -> list[float]:
    """Gradient norm of each step."""
    norms = []
    for step in range(steps):
        runtime.zero_grad(handle)
        runtime.forward_backward(handle, bridge_data(runtime, seed + step), loss)
        ok, norm, _ = runtime.optimizer_step(handle)
        assert ok
        runtime.lr_scheduler_step(handle)
        norms.append(norm)
    return norms


def exported(runtime: BridgeRuntime, handle: BridgeHandle, **settings: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in runtime.export_weights(handle, **settings)}


def exported_gradients(runtime: BridgeRuntime, handle: BridgeHandle, **settings: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in runtime.export_gradients(handle, **settings)}


def optimizer_shards(handle: BridgeHandle) -> dict[str, Tensor]:
    """Copies of what this rank's optimizer holds."""
    assert handle.optimizer is not None
    shards = {"step": Tensor([num_steps(handle.optimizer.megatron)])}
    for index, state in enumerate(parameter_states(handle.optimizer.megatron)):
        shards.update({f"{index}.{name}": tensor.detach().clone() for name, tensor in state.tensors.items()})
    return shards


def stored_weights(model: Path | str) -> dict[str, Tensor]:
    stored: dict[str, Tensor] = {}
    for file in Path(model).glob("*.safetensors"):
        stored.update(load_file(file))
    return stored
