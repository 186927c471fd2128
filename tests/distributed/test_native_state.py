"""Weights, gradients' statistics and checkpoints of the native runtime do not depend on the layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rl_backend.contracts import OptimizerConfig
from rl_backend.parallel.shards import local_tensor, owns
from rl_backend.runtime.native.handle import NativeHandle
from tests.distributed.test_export import stored_weights
from tests.support.models import write_tiny
from tests.support.moe import write_moe
from tests.support.native import (
    assert_equal_tensors,
    deal,
    micro_batches,
    open_runtime,
    optimizer_state,
    token_loss,
    train,
    weights,
)
from tests.support.rank_pool import RankPool

BUDGET = 129 * 64 * 4
"""The embeddings: several parameters of several layouts in one bucket."""

type Layout = Mapping[str, int]

DENSE: dict[int, list[Layout]] = {
    2: [{"tp": 2}, {"cp": 2}],
    4: [{"tp": 4}, {"tp": 2}, {"tp": 2, "cp": 2}, {"pp": 2, "tp": 2}],
}
MIXTURE: dict[int, list[Layout]] = {
    2: [{"ep": 2}, {"tp": 2}, {"tp": 2, "ep": 2}, {"etp": 2}, {"pp": 2}],
    4: [{"ep": 2}, {"ep": 4, "cp": 2}, {"tp": 2, "ep": 2, "etp": 2}, {"tp": 2, "ep": 4}],
}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary that no layout divides, fewer heads of keys and values than tp=4, biases, an untied head."""
    path = tmp_path_factory.mktemp("dense")
    return write_tiny("qwen2", path, vocab_size=129, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_moe("qwen3_moe", tmp_path_factory.mktemp("mixture"), vocab_size=129)


def export_job(model: str, layouts: Sequence[Layout], stored: Mapping[str, Tensor]) -> None:
    """Every rank gets every tensor of the directory, bit for bit and in the order of ``weight_infos``."""
    for layout in layouts:
        with open_runtime(model, parallel=layout) as runtime:
            handle = runtime.build_model(forward_only=True)
            infos = {info.name: (info.shape, info.nbytes) for info in runtime.weight_infos(handle)}
            for byte_budget in (None, BUDGET, 10**9):
                stream = runtime.export_weights(handle, byte_budget=byte_budget)
                exported = {name: tensor.clone() for name, tensor in stream}
                assert list(exported) == list(infos)
                assert infos == {name: (tuple(tensor.shape), tensor.nbytes) for name, tensor in exported.items()}
                assert_equal_tensors(exported, stored)
            some = sorted(stored)[::3]
            chosen = {name: tensor.clone() for name, tensor in runtime.export_weights(handle, names=some, dtype=torch.half)}
            assert_equal_tensors(chosen, {name: stored[name].half() for name in some})


@pytest.mark.shows("weights: native tp, cp, ep, etp, pp read their shards and export what the directory holds, bit for bit")
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(("model", "layouts"), [("dense", DENSE), ("mixture", MIXTURE)], ids=["dense", "mixture"])
def test_every_layout_reads_and_exports_the_directory(
    ranks: RankPool, request: pytest.FixtureRequest, model: str, layouts: dict[int, list[Layout]], world_size: int
) -> None:
    path: Path = request.getfixturevalue(model)
    ranks.run(export_job, str(path), layouts[world_size], stored_weights(path), world_size=world_size)


def save_job(model: str, layout: Layout, path: str, asynchronous: bool) -> dict[str, Tensor]:
    """Trains, saves, and returns weights and moments."""
    with open_runtime(model, parallel=layout) as runtime:
        handle = runtime.build_model()
        train(runtime, handle, 2)
        runtime.save_checkpoint(handle, path, asynchronous=asynchronous)
        state = {**weights(handle), **optimizer_state(handle)}
        runtime.wait_for_checkpoint(handle)
    return state


def assert_holds(handle: NativeHandle, held: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """What a pipeline stage has; without a pipeline everything."""
    for name, tensor in held.items():
        for copy, original in handle.stage_copies.items():
            name = name.removesuffix(copy) + original if name.endswith(copy) else name
        assert torch.equal(tensor, expected[name]), name
    if handle.groups.parallel.pp == 1:
        assert held.keys() == expected.keys()


def pass_on_job(model: str, layouts: Sequence[Layout], path: str, expected: Mapping[str, Tensor]) -> str:
    """Loads in one layout after another, each what the one before saved; returns the path of the last save."""
    for layout in layouts:
        with open_runtime(model, parallel=layout, seed=3) as runtime:
            handle = runtime.build_model()
            train(runtime, handle, 1, first_seed=7)
            runtime.load_checkpoint(handle, path)
            assert handle.weight_version == 2
            assert_holds(handle, {**weights(handle), **optimizer_state(handle)}, expected)
            path = f"{path}-{'-'.join(map(str, layout.items()))}"
            runtime.save_checkpoint(handle, path)
            reference = runtime.build_model(forward_only=True)
            runtime.load_checkpoint(reference, path)
            assert_holds(reference, weights(reference), {name: expected[name] for name in handle.weight_names})
    return path


@pytest.mark.shows("runtime: checkpoints of native tp, ep, etp, cp, pp and dp load in each other's layouts bit for bit")
@pytest.mark.long
def test_a_checkpoint_goes_from_layout_to_layout_unchanged(ranks: RankPool, mixture: Path, tmp_path: Path) -> None:
    source, path = str(mixture), str(tmp_path / "saved")
    expected, *others = ranks.run(save_job, source, {"tp": 2}, path, True)
    for other in others:
        assert_equal_tensors(other, expected)
    chain = [(2, [{}, {"ep": 2}, {"pp": 2}, {"etp": 2}]), (1, [{}]), (4, [{"tp": 2, "ep": 2}, {"tp": 2, "cp": 2}])]
    for world_size, layouts in chain:
        path = ranks.run(pass_on_job, source, layouts, path, expected, world_size=world_size)[0]


def statistics_job(model: str, layout: Layout) -> tuple[float, int]:
    """Norm and zeros of a step that is taken after one that a single rank's gradient makes impossible."""
    optimizer = OptimizerConfig(lr=1e-3, log_num_zeros_in_grad=True)
    with open_runtime(model, parallel=layout, optimizer=optimizer) as runtime:
        handle = runtime.build_model()
        rank, size = handle.data_parallel_rank, handle.data_parallel_size
        batches = micro_batches(deal([[0, 1], [2, 3], [4, 5], [6, 7]], size)[rank], dp_size=size)
        runtime.forward_backward(handle, batches, token_loss)
        spoil_last_rank(handle)
        before = {name: local_tensor(parameter).clone() for name, parameter in handle.parameters.items()}
        skipped = runtime.optimizer_step(handle)
        assert not skipped.ok and math.isnan(skipped.grad_norm) and handle.weight_version == 0
        assert_equal_tensors({name: local_tensor(value) for name, value in handle.parameters.items()}, before)
        runtime.zero_grad(handle)
        runtime.forward_backward(handle, batches, token_loss)
        result = runtime.optimizer_step(handle)
        assert result.ok and result.num_zeros is not None
        return result.grad_norm, result.num_zeros


def spoil_last_rank(handle: NativeHandle) -> None:
    """NaN in a gradient that only the last rank has a part of."""
    if not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1:
        gradients = [parameter.grad for parameter in handle.parameters.values() if owns(parameter)]
        local_tensor(next(each for each in gradients if local_tensor(each).numel())).view(-1)[0] = math.nan


@pytest.fixture(scope="module")
def on_one_rank(ranks: RankPool) -> Callable[[Path], tuple[float, int]]:
    """Norm and zeros of a model; computed once."""
    return cache(lambda model: ranks.run(statistics_job, str(model), {}, world_size=1)[0])


@pytest.mark.shows("runtime: gradient norm and zeros of native tp, cp, ep, etp and pp count every element once")
@pytest.mark.parametrize(
    ("model", "world", "layout"),
    [
        pytest.param(model, world, layout, id="-".join([model, f"{world}-ranks", *(f"{k}{v}" for k, v in layout.items())]))
        for model, layouts in (("dense", DENSE), ("mixture", MIXTURE))
        for world, found in layouts.items()
        for layout in found
    ],
)
def test_norm_and_zeros_are_one_ranks_and_one_bad_gradient_stops_all(
    ranks: RankPool,
    request: pytest.FixtureRequest,
    on_one_rank: Callable[[Path], tuple[float, int]],
    model: str,
    world: int,
    layout: Layout,
) -> None:
    path: Path = request.getfixturevalue(model)
    norm, zeros = on_one_rank(path)
    assert zeros > 0 or model == "mixture"
    for found in ranks.run(statistics_job, str(path), layout, world_size=world):
        assert found == (pytest.approx(norm, rel=1e-5), zeros)
