"""Whole tensors out of the parts that ranks have: right for every layout, and without receiving much more than them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard

from rl_backend.contracts import PackedWeight, ParallelConfig, UnsupportedError, WeightName
from rl_backend.parallel.groups import close_groups, open_groups
from rl_backend.parallel.shards import layout_of, local_region, local_tensor
from rl_backend.runtime.export_stream import plan_buckets
from rl_backend.runtime.native import export
from rl_backend.runtime.native.export import gather_weights, sharded_weights
from rl_backend.runtime.native.layout import TensorLayout, model_layouts
from tests.distributed.test_shards import DENSE, EXPERTS, numbered, sharded
from tests.support.rank_pool import RankPool

LARGE = (4, 2, 64, 96)
"""Each expert's two matrices are larger than what is gathered without a look at its padding."""

CASES: dict[tuple[str, ...], list[tuple[tuple[int, ...], list[Placement], int]]] = {
    DENSE: [
        ((130, 192), [Shard(0)], 0),
        ((128, 192), [Shard(0)], 0),
        ((128, 192), [Shard(1)], 0),
        ((128, 192), [Shard(0)], 1),
        ((128, 192), [Replicate()], 0),
        ((1, 192), [Shard(0)], 0),
        ((33,), [Replicate()], 0),
    ],
    EXPERTS: [
        (LARGE, [Shard(0), Shard(2)], 0),
        (LARGE, [Shard(0), Shard(2)], 3),
        ((3, 2, 64, 96), [Shard(0), Replicate()], 0),
    ],
}


@contextmanager
def received_bytes(count: list[int]) -> Iterator[None]:
    """Adds up what collectives of the gather give to this rank."""
    all_gather, broadcast = export.all_gather_into, dist.broadcast

    def counted_gather(output: Tensor, *args: Any, **kwargs: Any) -> Any:
        count[0] += output.nbytes
        return all_gather(output, *args, **kwargs)

    def counted_broadcast(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        count[0] += tensor.nbytes
        return broadcast(tensor, *args, **kwargs)

    export.all_gather_into, export.dist.broadcast = counted_gather, counted_broadcast
    try:
        yield
    finally:
        export.all_gather_into, export.dist.broadcast = all_gather, broadcast


def gather_job(mesh_shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    parameters: dict[str, Tensor] = {}
    layouts: dict[str, TensorLayout] = {}
    stored: dict[str, WeightName] = {}
    expected: dict[str, Tensor] = {}
    for number, (shape, placements, fsdp_dim) in enumerate(CASES[names]):
        key, whole = f"parameter{number}", numbered(shape) + number
        _, parameter = sharded(shape, mesh, placements, fsdp_dim)
        local = local_tensor(parameter)
        local.copy_(whole[local_region(parameter)].view(local.shape))
        parameters[key], layouts[key] = parameter, TensorLayout(layout_of(parameter), parameter.dtype)
        indices = list(itertools.product(*map(range, shape[:2]))) if names == EXPERTS else [()]
        stored[key] = (
            PackedWeight(shape[:2], tuple(f"{key}{index}" for index in indices)) if names == EXPERTS else f"{key}()"
        )
        expected |= {f"{key}{index}": whole[index] for index in indices}
    group = dist.group.WORLD
    assert group is not None
    for dtype, budget in itertools.product((None, torch.float64), (None, 300_000, 10**9)):
        weights = sharded_weights(parameters, stored, layouts, dtype=dtype, only=None)
        gathered: list[str] = []
        for bucket in plan_buckets(weights, budget):
            count = [0]
            with received_bytes(count):
                for name, tensor in gather_weights(bucket, group, torch.device("cpu")):
                    assert torch.equal(tensor, expected[name].to(dtype or torch.float32)), name
                    gathered.append(name)
            nbytes = sum(weight.nbytes for weight in bucket)
            assert nbytes <= count[0] <= max(nbytes * 9 // 8, 1 << 16), (names, budget, [weight.name for weight in bucket])
        assert gathered == list(expected)


@pytest.mark.shows("weights: an export receives at most an eighth more than the tensors, whatever the layout")
@pytest.mark.parametrize(
    ("mesh_shape", "names"),
    [((2, 2), DENSE), ((1, 4), DENSE), ((2, 2, 1), EXPERTS), ((1, 2, 2), EXPERTS), ((2, 1, 2), EXPERTS)],
    ids=str,
)
def test_tensors_are_gathered_whole_and_little_else_is_received(
    ranks: RankPool, mesh_shape: tuple[int, ...], names: tuple[str, ...]
) -> None:
    ranks.run(gather_job, mesh_shape, names, world_size=4)


def forgotten_job() -> str:
    """A module that tensor parallelism has left out."""
    groups = open_groups(ParallelConfig(tp=2), torch.device("cpu"))
    try:
        module = nn.Linear(4, 4, bias=False)
        fully_shard(module, mesh=groups.fsdp_mesh)
        with pytest.raises(UnsupportedError) as caught:
            model_layouts(dict(module.named_parameters()), groups)
    finally:
        close_groups(groups)
    return str(caught.value)


def test_a_parameter_that_tensor_parallelism_has_forgotten_is_refused(ranks: RankPool) -> None:
    for rank, message in enumerate(ranks.run(forgotten_job)):
        assert f"weight is laid out over the ranks ({rank},) of (0, 1); parallelize must lay it out over all" in message
