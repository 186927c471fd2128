"""Megatron trains the same in every layout, as one rank of it does."""

from __future__ import annotations

import gc
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rl_backend.contracts import BatchError, ConfigError
from rl_backend.runtime.bridge.checks import COUNTED_AS_LAYERS
from tests.support.bridge_runs import Run, assert_same, open_bridge, train_job, whole
from tests.support.layouts import layouts
from tests.support.matrix import sampled
from tests.support.models import write_tiny
from tests.support.moe import write_moe
from tests.support.native import (
    VOCAB_SIZE,
    assert_near,
    micro_batches,
    relative_difference,
    token_loss,
)
from tests.support.rank_pool import RankPool
from tests.support.sft_batches import random_token_sequences, sft_micro_batches

STEPS = 2
ROUTER = "model.layers.1.mlp.gate.weight"

DENSE = {
    2: [{}, {"tp": 2}, {"pp": 2}, {"pp": 2, "vpp": 2}],
    4: [{"tp": 2}, {"tp": 2, "pp": 2}, {"pp": 2, "vpp": 2}],
}
MIXTURE = {
    2: [{}, {"ep": 2}, {"tp": 2}, {"tp": 2, "ep": 2}, {"tp": 2, "etp": 2}, {"pp": 2, "vpp": 2}],
    4: [{"ep": 2}, {"ep": 2, "pp": 2}, {"tp": 2, "ep": 4}],
}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("qwen3", tmp_path_factory.mktemp("dense"), num_hidden_layers=4)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_moe("qwen3_moe", tmp_path_factory.mktemp("mixture"), num_hidden_layers=4)


@pytest.fixture(scope="module")
def dense_on_one_rank(dense: Path, ranks: RankPool) -> Run:
    return whole(ranks.run(train_job, str(dense), {}, STEPS, {}, world_size=1))


@pytest.fixture(scope="module")
def mixture_on_one_rank(mixture: Path, ranks: RankPool) -> Run:
    return whole(ranks.run(train_job, str(mixture), {}, STEPS, {}, world_size=1))


@pytest.mark.shows("bridge: dense models train alike with dp, tp and sp, pp, vpp on 2 and 4 ranks")
@pytest.mark.parametrize(("world_size", "layout"), layouts(DENSE, 2))
def test_a_dense_model_trains_the_same_in_every_layout(
    ranks: RankPool, dense: Path, dense_on_one_rank: Run, world_size: int, layout: dict[str, int]
) -> None:
    assert_same(whole(ranks.run(train_job, str(dense), layout, STEPS, {}, world_size=world_size)), dense_on_one_rank)


@pytest.mark.shows("bridge: mixtures of experts train alike with ep, etp, tp, pp, vpp on 2 and 4 ranks")
@pytest.mark.parametrize(("world_size", "layout"), layouts(MIXTURE, 2))
def test_a_mixture_of_experts_trains_the_same_in_every_layout(
    ranks: RankPool, mixture: Path, mixture_on_one_rank: Run, world_size: int, layout: dict[str, int]
) -> None:
    run = whole(ranks.run(train_job, str(mixture), layout, STEPS, {}, world_size=world_size))
    assert_same(run, mixture_on_one_rank)


@pytest.mark.shows("bridge: stages that count the embedding and the loss as layers train alike")
@pytest.mark.parametrize(
    ("world_size", "layout"),
    sampled([(3, {"pp": 3}), (2, {"pp": 2, "vpp": 3})], (2, {"pp": 2, "vpp": 3})),
    ids=["a-layer-less", "none-at-the-ends"],
)
def test_a_mixture_trains_the_same_when_its_ends_count_as_layers(
    ranks: RankPool, mixture: Path, mixture_on_one_rank: Run, world_size: int, layout: dict[str, int]
) -> None:
    counted = {"override_transformer_config": dict.fromkeys(COUNTED_AS_LAYERS, True)}
    run = whole(ranks.run(train_job, str(mixture), layout, STEPS, counted, world_size=world_size))
    assert_same(run, mixture_on_one_rank)


def activations_job(model: str, layout: dict[str, int]) -> list[dict[str, torch.Tensor]]:
    """Outputs of modules on the ranks that have outputs."""
    with open_bridge(model, layout) as runtime:
        handle = runtime.build_model(forward_only=True)
        return [dict(each) for each in runtime.activations(handle, micro_batches([[0, 3], [5, 1]]))]


@pytest.mark.shows("bridge: recorded activations are of every stage of a rank")
def test_outputs_of_all_stages_of_a_rank_are_recorded(ranks: RankPool, dense: Path) -> None:
    (expected,) = ranks.run(activations_job, str(dense), {}, world_size=1)
    found = next(each for each in ranks.run(activations_job, str(dense), {"pp": 2, "vpp": 2}) if each)
    assert {f"model.layers.{layer}" for layer in range(4)} < expected[0].keys()
    for mine, one in zip(found, expected, strict=True):
        assert mine.keys() == one.keys()
        for name, output in one.items():
            torch.testing.assert_close(mine[name], output, rtol=1e-4, atol=1e-5)


@pytest.mark.shows("bridge: router losses with pp and vpp match one rank's gradients and weights")
@pytest.mark.parametrize(("world_size", "layout"), layouts({2: [{"pp": 2}, {"pp": 2, "vpp": 2}], 4: [{"pp": 4}]}, 2))
def test_router_losses_do_not_depend_on_the_pipeline(
    ranks: RankPool, mixture: Path, mixture_on_one_rank: Run, world_size: int, layout: dict[str, int]
) -> None:
    losses = {
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.5,
        "moe_z_loss_coeff": 0.2,
    }
    settings = {"override_transformer_config": losses}
    expected = whole(ranks.run(train_job, str(mixture), {}, STEPS, settings, world_size=1))
    without = mixture_on_one_rank.gradients[ROUTER]
    assert relative_difference(expected.gradients[ROUTER], without) > 0.1
    assert_same(whole(ranks.run(train_job, str(mixture), layout, STEPS, settings, world_size=world_size)), expected)


def z_loss_job(model: str, layout: dict[str, int], lengths: list[int]) -> dict[str, torch.Tensor]:
    """Gradients of the z-loss alone: the loss of the tokens is nothing."""
    options = {"moe_router_load_balancing_type": "none", "moe_z_loss_coeff": 0.2}
    with open_bridge(model, layout, override_transformer_config=options) as runtime:
        handle = runtime.build_model()
        data = sft_micro_batches(random_token_sequences(lengths, VOCAB_SIZE), 2)
        runtime.forward_backward(handle, data, lambda output, batch, group: (output.log_probs.sum() * 0.0, {}))
        return {name: gradient.clone() for name, gradient in runtime.export_gradients(handle)}


@pytest.mark.parametrize(("lengths", "padded"), [([6, 6, 6, 6], False), ([5, 7, 3, 9], True)], ids=["even", "padded"])
def test_the_z_loss_of_tensor_parallel_ranks_is_an_average_of_averages(
    ranks: RankPool, mixture: Path, lengths: list[int], padded: bool
) -> None:
    """One rank's without padding. With it, each half of the positions has its own average (docs/runtime_api.md)."""
    expected = ranks.run(z_loss_job, str(mixture), {}, lengths, world_size=1)[0]
    found = ranks.run(z_loss_job, str(mixture), {"tp": 2}, lengths)[0]
    assert expected[ROUTER].norm() > 0
    assert (relative_difference(found[ROUTER], expected[ROUTER]) > 1e-5) is padded


@pytest.mark.shows("bridge: gradients of bfloat16 weights are float32, near the exact ones, and the norm is theirs")
@pytest.mark.parametrize(("world_size", "layout"), layouts({2: [{}, {"tp": 2}, {"pp": 2}], 4: [{"tp": 2, "pp": 2}]}, 2))
def test_bfloat16_weights_give_gradients_near_the_exact_ones(
    ranks: RankPool, dense: Path, dense_on_one_rank: Run, world_size: int, layout: dict[str, int]
) -> None:
    settings = {"param_dtype": "bfloat16"}
    run = whole(ranks.run(train_job, str(dense), layout, STEPS, settings, world_size=world_size))
    assert_near(run.gradients, dense_on_one_rank.gradients, 0.05, dtype=torch.float32)
    norm = torch.stack([gradient.double().norm() for gradient in run.gradients.values()]).norm().item()
    assert run.norms[0] == pytest.approx(norm, rel=1e-5)


def refusal_job(model: str, layout: dict[str, int]) -> str:
    with open_bridge(model, layout) as runtime, pytest.raises(ConfigError) as refused:
        runtime.build_model()
    return str(refused.value)


@pytest.mark.parametrize(
    ("world_size", "layout", "reason"),
    [
        (2, {"cp": 2}, "Megatron's own attention has no context parallelism"),
        (4, {"tp": 4}, "does not divide num_key_value_heads=2"),
        (2, {"ep": 2}, "this model has no experts"),
        (2, {"pp": 2, "vpp": 3}, "4 layers do not divide into pp.vpp = 2.3"),
    ],
    ids=["cp", "tp", "ep", "vpp"],
)
def test_a_layout_that_the_model_cannot_have_is_refused(
    ranks: RankPool, dense: Path, world_size: int, layout: dict[str, int], reason: str
) -> None:
    for message in ranks.run(refusal_job, str(dense), layout, world_size=world_size):
        assert re.search(reason, message), message


def other_data_job(model: str, layout: dict[str, int]) -> str:
    with open_bridge(model, layout) as runtime:
        handle = runtime.build_model()
        data = micro_batches([[0, 1], [2, 3]], seed=dist.get_rank())
        with pytest.raises(BatchError) as refused:
            runtime.forward_backward(handle, data, token_loss)
        runtime.forward_backward(handle, micro_batches([[0, 1], [2, 3]]), token_loss)
    return str(refused.value)


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}], ids=str)
def test_other_data_on_a_rank_of_the_same_replica_is_refused(ranks: RankPool, dense: Path, layout: dict[str, int]) -> None:
    for message in ranks.run(other_data_job, str(dense), layout):
        assert "different micro-batches" in message


def threads_job() -> int:
    """Threads of this process; every process group has three."""
    gc.collect()
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.shows("bridge: a closed runtime leaves no process group behind")
@pytest.mark.parametrize("layout", sampled([{"pp": 2}, {"ep": 2}], {"ep": 2}), ids=str)
def test_a_closed_runtime_leaves_no_threads(ranks: RankPool, mixture: Path, layout: dict[str, int]) -> None:
    counts = []
    for _ in range(2):
        ranks.run(train_job, str(mixture), layout, 1, {})
        counts.append(ranks.run(threads_job))
    assert counts[0] == counts[1]
