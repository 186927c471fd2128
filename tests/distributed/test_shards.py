"""Where shards lie: computed regions against what FSDP2 and DTensor really left on each rank."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from rl_backend.contracts import UnsupportedError
from rl_backend.parallel.shards import Region, layout_of, local_region, local_tensor, owns
from tests.support.rank_pool import RankPool

REPLICATE = Replicate()
DENSE = ("fsdp", "tp")
EXPERTS = ("edp", "ep", "etp")
SHAPES = [(8, 4), (7, 4), (3, 4), (1, 4), (9,), (2,), (5, 2, 6)]


def numbered(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float32).view(shape)


def sharded(
    shape: tuple[int, ...], mesh: DeviceMesh, placements: list[Placement] | None, fsdp_dim: int
) -> tuple[nn.Module, nn.Parameter]:
    """A module with one parameter, cut by ``placements`` over the last mesh dimensions and then by FSDP over the first."""
    whole = numbered(shape)
    names = mesh.mesh_dim_names
    assert names is not None
    inner = mesh[names[1:]] if len(names) > 1 else None
    value = whole if placements is None or inner is None else distribute_tensor(whole, inner, placements)
    module = nn.Module()
    module.register_parameter("weight", nn.Parameter(value))
    fully_shard(module, mesh=mesh[names[0]], shard_placement_fn=lambda parameter: Shard(fsdp_dim))
    (parameter,) = module.parameters()
    return module, parameter


def cases(names: tuple[str, ...]) -> Iterator[tuple[tuple[int, ...], list[Placement] | None, int]]:
    if names == DENSE:
        for shape, dim in itertools.product(SHAPES, (0, 1)):
            if dim < len(shape):
                yield shape, [Shard(dim)], 0
        for shape in SHAPES:
            yield shape, [REPLICATE], 0
        yield from [((5, 8), [Shard(0)], 1), ((5, 8), [Shard(1)], 1), ((5, 8), [REPLICATE], 1), ((3, 4), [Shard(1)], 1)]
    elif names == EXPERTS:
        for shape in ((8, 2, 6, 4), (5, 2, 3, 4), (3, 2, 7, 4)):
            for fsdp_dim in (0, 3):
                yield shape, [Shard(0), Shard(2)], fsdp_dim
                yield shape, [Shard(0), REPLICATE], fsdp_dim
        yield (4, 2, 8, 4), [Shard(0), Shard(2)], 2
        yield (8, 4), [Shard(0), Shard(0)], 0
    else:
        yield from ((shape, None, 0) for shape in SHAPES)
        yield (5, 8), None, 1


def regions_job(mesh_shape: tuple[int, ...], names: tuple[str, ...]) -> list[list[Region]]:
    """Every rank's region of every case as this rank computes it, compared with what it really holds."""
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    world, rank = dist.get_world_size(), dist.get_rank()
    computed = []
    for shape, placements, fsdp_dim in cases(names):
        _, parameter = sharded(shape, mesh, placements, fsdp_dim)
        layout = layout_of(parameter)
        case = (shape, placements, fsdp_dim, parameter.placements)  # type: ignore[attr-defined]
        held = local_tensor(parameter)
        region = local_region(parameter)
        assert region == layout.region(rank)
        assert torch.equal(held.flatten(), numbered(shape)[region].flatten()), case
        assert torch.equal(local_tensor(torch.zeros_like(parameter)), torch.zeros_like(held)), case

        copies = torch.zeros(shape)
        for part, (first, *others) in layout.copies().items():
            assert layout.counts(first) and not any(layout.counts(other) for other in others)
            copies[part] += 1
        assert torch.equal(copies, torch.ones(shape)), case
        owned = float(owns(parameter)) * held.double().sum()
        dist.all_reduce(owned)
        assert owned.item() == numbered(shape).double().sum().item(), case
        computed.append([layout.region(each) for each in range(world)])
    return computed


@pytest.mark.parametrize(
    ("mesh_shape", "names"),
    [
        ((4,), ("fsdp",)),
        ((2, 2), DENSE),
        ((4, 1), DENSE),
        ((1, 4), DENSE),
        ((2, 2, 1), EXPERTS),
        ((2, 1, 2), EXPERTS),
        ((1, 2, 2), EXPERTS),
    ],
    ids=str,
)
def test_every_rank_knows_what_each_rank_holds(ranks: RankPool, mesh_shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    results = ranks.run(regions_job, mesh_shape, names, world_size=4)
    assert all(regions == results[0] for regions in results)


def gradient_job() -> None:
    """Gradients of a copied and of a twice cut parameter have their parameter's layout."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=DENSE)
    for placements in ([Shard(0)], [REPLICATE]):
        module, parameter = sharded((7, 4), mesh, placements, 0)
        inputs = numbered((4,)) * (1 + dist.get_rank())
        module.forward = lambda x, module=module: module.weight.to_local() @ x  # type: ignore[misc]
        module(inputs).sum().backward()
        assert isinstance(parameter.grad, DTensor)
        assert layout_of(parameter.grad) == layout_of(parameter)


def test_gradients_have_the_layout_of_their_parameter(ranks: RankPool) -> None:
    ranks.run(gradient_job, world_size=4)


def refusals_job() -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    messages = []
    for tensor in (DTensor.from_local(torch.ones(3), mesh, [Partial()]),):
        with pytest.raises(UnsupportedError) as caught:
            layout_of(tensor)
        messages.append(str(caught.value))
    return messages


def test_a_sum_that_is_still_spread_over_ranks_has_no_layout(ranks: RankPool) -> None:
    (message,) = ranks.run(refusals_job)[0]
    assert "Partial" in message and "expected Replicate" in message


def test_a_plain_tensor_is_this_ranks_alone() -> None:
    tensor: Any = torch.zeros(3, 2)
    assert layout_of(tensor).copies() == {(slice(0, 3), slice(0, 2)): [0]}
    assert local_region(torch.zeros(())) == ()
    assert owns(tensor)
    assert layout_of(torch.zeros(0, 2)).copies() == {}
