"""Tenants of unusual shapes train in every layout as on one rank, and are saved and loaded there."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from rl_backend.contracts import OptimizerConfig, PackedBatch, TokenSequence
from rl_backend.contracts.lora import LORA_FIELD, LoRAConfig
from rl_backend.data.micro_batches import pack
from tests.support.bridge_runs import open_bridge
from tests.support.models import write_tiny
from tests.support.native import assert_near, open_runtime
from tests.support.rank_pool import RankPool
from tests.support.tenants import copied, nll, rows

VOCAB_SIZE = 127
CONFIGS = {
    "one layer": LoRAConfig(rank=1, targets=("model.layers.0.self_attn.q_proj",)),
    "heads that ranks share": LoRAConfig(rank=3, targets=("k_proj", "v_proj"), seed=1),
    "wider than the layer": LoRAConfig(rank=100, alpha=10.0, targets=("model.layers.1.mlp.down_proj", "gate_proj"), seed=2),
}
LENGTHS = (1, 5, 40, 2)
"""Of each tenant: two micro-batches of two, one of which may be another data-parallel rank's."""
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "native dp2": (2, {}),
    "native tp2": (2, {"parallel": {"tp": 2}}),
    "native tp2 cp2": (4, {"parallel": {"tp": 2, "cp": 2}}),
    "native dp2 pp2": (4, {"parallel": {"pp": 2}}),
    "native pp2 zb-h1": (2, {"parallel": {"pp": 2}, "pipeline_schedule": "zb-h1"}),
    "bridge pp2": (2, {"parallel": {"pp": 2}}),
}


class Shaped(NamedTuple):
    """Attributes:
    norms: tenant -> of each step.
    gradients: tenant -> peft's name -> of the first step.
    loaded: tenant -> whether a checkpoint of it gives another tenant its rows.
    """

    norms: dict[str, list[float]]
    gradients: dict[str, dict[str, Tensor]]
    loaded: dict[str, bool]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An odd vocabulary and a head of keys that tensor-parallel ranks share."""
    path = tmp_path_factory.mktemp("models") / "qwen3"
    return str(write_tiny("qwen3", path, vocab_size=VOCAB_SIZE, num_key_value_heads=1, tie_word_embeddings=False))


def shaped_batches(tenants: dict[str, Any], step: int, dp_rank: int, dp_size: int) -> list[PackedBatch]:
    found = []
    generator = torch.Generator().manual_seed(step)
    ids = [torch.randint(0, VOCAB_SIZE, (length,), generator=generator) for length in LENGTHS]
    for half in range(2):
        sequences = [
            TokenSequence(row, sequence_fields={LORA_FIELD: torch.tensor(tenant.lora_id)})
            for tenant in tenants.values()
            for row in ids[half::2][dp_rank::dp_size]
        ]
        facts = {"batch_num_tokens": float(sum(LENGTHS)), "dp_size": dp_size}
        found.append(pack(sequences, facts))
    return found


def shapes_job(model: str, folder: str, backend: str, settings: dict[str, Any]) -> Shaped:
    open_backend = open_bridge if backend == "bridge" else open_runtime
    with open_backend(model, **settings) as runtime:
        base = runtime.build_model(trainable=False)

        def make() -> dict[str, Any]:
            return {
                name: runtime.create_lora_adapter(base, each, OptimizerConfig(lr=1e-2)) for name, each in CONFIGS.items()
            }

        tenants = make()
        norms: dict[str, list[float]] = {name: [] for name in tenants}
        for step in range(2):
            data = shaped_batches(tenants, step, base.data_parallel_rank, base.data_parallel_size)
            runtime.forward_backward(base, data, {tenant.name: nll for tenant in tenants.values()})
            if not step:
                gradients = {name: copied(runtime.export_gradients(tenant)) for name, tenant in tenants.items()}
            for name, result in zip(tenants, runtime.optimizer_step(list(tenants.values())), strict=True):
                assert result.ok
                norms[name].append(result.grad_norm)
            for tenant in tenants.values():
                runtime.zero_grad(tenant)
        loaded = {}
        for (name, tenant), other in zip(tenants.items(), make().values(), strict=True):
            runtime.save_checkpoint(tenant, Path(folder) / name)
            runtime.load_checkpoint(other, Path(folder) / name)
            loaded[name] = all(torch.equal(*pair) for pair in zip(rows(tenant), rows(other), strict=True))
        return Shaped(norms, gradients, loaded)


@pytest.fixture(scope="module")
def on_one_rank(ranks: RankPool, model: str, tmp_path_factory: pytest.TempPathFactory) -> Shaped:
    (found,) = ranks.run(shapes_job, model, str(tmp_path_factory.mktemp("one")), "native", {}, world_size=1)
    return found


@pytest.mark.parametrize("case", LAYOUTS)
def test_tenants_of_unusual_shapes_train_as_on_one_rank(
    ranks: RankPool, model: str, on_one_rank: Shaped, tmp_path: Path, case: str
) -> None:
    world_size, settings = LAYOUTS[case]
    found = ranks.run(shapes_job, model, str(tmp_path), case.partition(" ")[0], settings, world_size=world_size)
    for rank in found:
        assert all(rank.loaded.values())
        for name in CONFIGS:
            assert rank.norms[name] == pytest.approx(on_one_rank.norms[name], rel=1e-5)
    for name, expected in on_one_rank.gradients.items():
        for rank in found:
            assert_near(rank.gradients[name], expected)
