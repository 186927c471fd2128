"""Rectangles of Hugging Face's tensors that ranks of the bridge send: together every weight once, nothing that ranks hold is
gathered."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from rl_backend.contracts import TensorInfo, TensorPart, WeightShard, dtype_from_name
from rl_backend.runtime.bridge.engine.engine import BridgeEngine
from rl_backend.weights.staging import require_covered
from tests.support.bridge_runs import open_bridge
from tests.support.bridge_state import stored_weights, write_tiny_mixture
from tests.support.models import write_tiny_qwen3
from tests.support.qwen3_5 import write_qwen3_5
from tests.support.rank_pool import RankPool


class Sent(NamedTuple):
    infos: tuple[TensorInfo, ...]
    parts: tuple[TensorPart, ...]
    shards: list[WeightShard]
    gathered: list[str]


def parts_job(model: str, layout: dict[str, int], dtype: torch.dtype | None) -> Sent:
    gather, gathered = BridgeEngine.gather_weights, list[str]()

    def noted(engine: Any, handle: Any, *args: Any) -> Any:
        gathered.extend(args[2])
        return gather(engine, handle, *args)

    with open_bridge(model, layout) as runtime, pytest.MonkeyPatch.context() as patch:
        handle = runtime.build_model(forward_only=not dtype)
        patch.setattr(BridgeEngine, "gather_weights", noted)
        infos, parts = runtime.weight_infos(handle, dtype=dtype), runtime.shard_infos(handle, dtype=dtype)
        shards = runtime.export_shards(handle, dtype=dtype, held=True)
        return Sent(infos, parts, [each._replace(tensor=each.tensor.clone()) for each in shards], gathered)


def write(name: str, path: Path) -> Path:
    if name == "mixture":
        return write_tiny_mixture(path)
    if name == "qwen3_5":
        return write_qwen3_5(path, moe=True, head_dim=32, linear_key_head_dim=32, linear_value_head_dim=24)
    # A vocabulary that Megatron pads; the last stage has a copy of tied embeddings.
    return write_tiny_qwen3(path, vocab_size=129, tie_word_embeddings=name == "tied")


@pytest.mark.shows("bridge: in every layout ranks send the rectangles that they hold, every weight once, about equally much")
@pytest.mark.parametrize(
    ("name", "world_size", "layout", "share"),
    [
        ("tied", 4, {"tp": 2, "pp": 2}, 0.5),
        ("untied", 4, {"tp": 2}, 0.3),
        ("mixture", 4, {"ep": 2}, 0.3),
        ("mixture", 4, {"tp": 2, "ep": 2}, 0.3),
        pytest.param("qwen3_5", 2, {"tp": 2, "ep": 2}, 1.0, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_ranks_send_what_they_hold(
    ranks: RankPool, tmp_path: Path, name: str, world_size: int, layout: dict[str, int], share: float, dtype: Any
) -> None:
    model = write(name, tmp_path)
    stored = stored_weights(model)
    every = ranks.run(parts_job, str(model), layout, dtype, world_size=world_size)
    infos, parts = every[0].infos, every[0].parts
    require_covered(infos, parts)
    assert {info.name for info in infos} == stored.keys()
    dtypes = {info.name: dtype_from_name(info.dtype) for info in infos}
    for rank, sent in enumerate(every):
        assert sent.parts == parts
        assert [str(shard) for shard in sent.shards] == [str(part) for part in parts if part.rank == rank]
        for shard in sent.shards:
            region = tuple(slice(at, at + size) for at, size in zip(shard.offset, shard.tensor.shape, strict=True))
            expected = stored[shard.name][region]
            assert shard.tensor.dtype == dtypes[shard.name], str(shard)
            assert torch.equal(shard.tensor, expected.to(shard.tensor.dtype)), str(shard)
        assert name == "qwen3_5" or not sent.gathered
    bytes_by_rank = [sum(part.nbytes for part in parts if part.rank == rank) for rank in range(world_size)]
    assert sum(bytes_by_rank) == sum(info.nbytes for info in infos)
    assert max(bytes_by_rank) <= share * sum(bytes_by_rank)
