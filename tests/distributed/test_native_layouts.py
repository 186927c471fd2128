"""The native runtime trains the same in every layout, as one rank does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.hybrid import write_hybrid
from tests.support.layouts import layouts
from tests.support.matrix import sampled
from tests.support.models import write_tiny
from tests.support.moe import write_moe
from tests.support.native import (
    LENGTHS,
    assert_near,
    deal,
    micro_batches,
    open_runtime,
    relative_difference,
    token_loss,
    train,
)
from tests.support.rank_pool import RankPool

SPLIT = [[0, 1], [2, 3], [4, 5], [6, 7]]
STEPS = 2

DENSE = {
    2: [{}, {"tp": 2}, {"cp": 2}],
    4: [{"tp": 4}, {"cp": 4}, {"tp": 2, "cp": 2}, {"tp": 2}, {"cp": 2}],
}
MIXTURE = {
    2: [{}, {"ep": 2}, {"tp": 2}, {"tp": 2, "ep": 2}, {"tp": 2, "etp": 2}, {"cp": 2, "ep": 2}, {"etp": 2}],
    4: [{"ep": 4}, {"ep": 2}, {"tp": 2, "ep": 2}, {"tp": 2, "cp": 2, "ep": 4}, {"ep": 2, "etp": 2}],
}


class Run(NamedTuple):
    """Attributes:
    losses, norms: of each step.
    log_probs, entropies: sequence -> (L,), before the first step.
    gradients: Hugging Face name -> of the first step.
    weights: Hugging Face name -> after the last step.
    """

    losses: list[float]
    norms: list[float]
    log_probs: Mapping[int, Tensor]
    entropies: Mapping[int, Tensor]
    gradients: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]


def train_job(model: str, layout: Mapping[str, int], settings: Mapping[str, Any], optimizer: Mapping[str, Any]) -> Run:
    """This rank's part of the outputs, and losses over all ranks."""
    from rl_backend.contracts import OptimizerConfig

    with open_runtime(model, parallel=dict(layout), optimizer=OptimizerConfig(lr=1e-3, **optimizer), **settings) as runtime:
        handle = runtime.build_model()
        dp_rank, dp_size = handle.data_parallel_rank, handle.data_parallel_size
        mine = deal(SPLIT, dp_size)[dp_rank]
        losses, norms, gradients = [], [], {}
        log_probs: dict[int, Tensor] = {}
        entropies: dict[int, Tensor] = {}
        for step in range(STEPS):
            runtime.zero_grad(handle)
            batches = micro_batches(mine, dp_size=dp_size, seed=step, temperature=0.7, calculate_entropy=True)
            result = runtime.forward_backward(handle, batches, token_loss)
            assert bool(result.outputs) == runtime.is_mp_src_rank_with_outputs(handle)
            if step == 0:
                gradients = {name: tensor.clone() for name, tensor in runtime.export_gradients(handle)}
                if result.outputs:
                    order = [index for batch in mine for index in batch]
                    log_probs = dict(zip(order, result.outputs["log_probs"], strict=True))
                    entropies = dict(zip(order, result.outputs["entropy"], strict=True))
            ok, norm, _ = runtime.optimizer_step(handle)
            assert ok
            runtime.lr_scheduler_step(handle)
            loss = torch.tensor(result.loss / dp_size if result.outputs else 0.0, dtype=torch.float64)
            dist.all_reduce(loss)
            losses.append(loss.item())
            norms.append(norm)
        weights = {name: tensor.clone() for name, tensor in runtime.export_weights(handle)}
    return Run(losses, norms, log_probs, entropies, gradients, weights)


def whole(runs: list[Run]) -> Run:
    """The outputs of all ranks together; everything else must be the same on all."""
    first = runs[0]
    for run in runs[1:]:
        assert run.losses == first.losses
        assert run.norms == first.norms
    return first._replace(
        log_probs={index: values for run in runs for index, values in run.log_probs.items()},
        entropies={index: values for run in runs for index, values in run.entropies.items()},
    )


def run_layout(
    ranks: RankPool, world: int, model: Path, layout: Mapping[str, int], settings: Mapping[str, Any], **optimizer: Any
) -> Run:
    return whole(ranks.run(train_job, str(model), dict(layout), dict(settings), optimizer, world_size=world))


def assert_same(run: Run, expected: Run, weights: float = 1e-5) -> None:
    torch.testing.assert_close(run.losses, expected.losses, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(run.norms, expected.norms, rtol=1e-5, atol=0.0)
    assert run.log_probs.keys() == set(range(len(LENGTHS)))
    for index, log_probs in run.log_probs.items():
        torch.testing.assert_close(log_probs, expected.log_probs[index], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(run.entropies[index], expected.entropies[index], rtol=1e-5, atol=1e-5)
    assert_near(run.gradients, expected.gradients)
    assert list(run.weights) == list(expected.weights)
    assert_near(run.weights, expected.weights, weights)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four attention heads and two heads of keys and values: with tp=4 these are copied."""
    return write_tiny("qwen3", tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_moe("qwen3_moe", tmp_path_factory.mktemp("mixture"))


@pytest.fixture(scope="module")
def dense_on_one_rank(dense: Path, ranks: RankPool) -> Run:
    return run_layout(ranks, 1, dense, {}, {})


@pytest.fixture(scope="module")
def mixture_on_one_rank(mixture: Path, ranks: RankPool) -> Run:
    return run_layout(ranks, 1, mixture, {}, {})


@pytest.mark.shows(
    "runtime: native tp, cp, dp and their combinations on 2 and 4 ranks match one rank's losses and gradients to 1e-5"
)
@pytest.mark.parametrize(("world", "layout"), layouts(DENSE))
def test_dense_layouts_train_as_one_rank(
    ranks: RankPool, dense: Path, dense_on_one_rank: Run, world: int, layout: dict[str, int]
) -> None:
    assert_same(run_layout(ranks, world, dense, layout, {}), dense_on_one_rank)


@pytest.mark.shows(
    "runtime: native ep, etp and their combinations with tp, cp and dp match one rank's losses and gradients to 1e-5"
)
@pytest.mark.parametrize(("world", "layout"), layouts(MIXTURE))
def test_mixtures_of_experts_train_as_on_one_rank(
    ranks: RankPool, mixture: Path, mixture_on_one_rank: Run, world: int, layout: dict[str, int]
) -> None:
    assert_same(run_layout(ranks, world, mixture, layout, {}), mixture_on_one_rank)


FAMILIES = {
    "llama with all biases, a vocabulary that tp does not divide": (
        lambda path: write_tiny("llama", path, attention_bias=True, mlp_bias=True, vocab_size=131, head_dim=16),
        [{"tp": 2}, {"tp": 4}, {"tp": 2, "cp": 2}],
    ),
    "qwen2 with biases of queries, keys and values that tp=4 copies": (lambda path: write_tiny("qwen2", path), [{"tp": 4}]),
    "mistral with a window that chunks cross": (
        lambda path: write_tiny("mistral", path, sliding_window=12),
        [{"cp": 2, "tp": 2}, {"cp": 4}],
    ),
    "mixtral": (lambda path: write_moe("mixtral", path), [{"ep": 2, "tp": 2}]),
    "layers of two kinds": (write_hybrid, [{"tp": 2, "ep": 2}, {"pp": 2, "cp": 2}, {"pp": 2, "etp": 2}]),
    "more experts than tokens": (
        lambda path: write_moe("qwen3_moe, experts without tokens", path),
        [{"ep": 4}, {"ep": 2, "tp": 2}],
    ),
}


@pytest.mark.parametrize(
    "case", sampled(FAMILIES, "llama with all biases, a vocabulary that tp does not divide", "layers of two kinds")
)
def test_families_train_in_every_layout_as_on_one_rank(ranks: RankPool, tmp_path: Path, case: str) -> None:
    write, found = FAMILIES[case]
    model = write(tmp_path / "model")
    expected = run_layout(ranks, 1, model, {}, {})
    for layout in found:
        assert_same(run_layout(ranks, 4, model, layout, {}), expected)


@pytest.mark.parametrize(
    ("layout", "settings"),
    sampled(
        [
            ({"tp": 2, "ep": 2}, {"activation_checkpointing": "full"}),
            ({"cp": 2, "ep": 4}, {"activation_checkpointing": "full", "reshard_after_forward": False}),
            ({"tp": 2, "etp": 2}, {"log_prob_chunk_tokens": 5}),
        ],
        ({"tp": 2, "ep": 2}, {"activation_checkpointing": "full"}),
    ),
    ids=str,
)
def test_options_that_trade_memory_for_time_change_nothing(
    ranks: RankPool, mixture: Path, mixture_on_one_rank: Run, layout: dict[str, int], settings: dict[str, Any]
) -> None:
    assert_same(run_layout(ranks, 4, mixture, layout, settings), mixture_on_one_rank)


@pytest.mark.parametrize("layout", [{"tp": 2}, {"cp": 2}, {"pp": 2}], ids=str)
def test_bfloat16_parameters_give_gradients_near_the_exact_ones(
    ranks: RankPool, dense: Path, dense_on_one_rank: Run, layout: dict[str, int]
) -> None:
    run = run_layout(ranks, 4, dense, layout, {"param_dtype": "bfloat16"})
    assert_near(run.gradients, dense_on_one_rank.gradients, 0.05, dtype=torch.float32)


def reopened_job(model: str) -> list[list[tuple[float, float]]]:
    curves = []
    for _ in range(2):
        with open_runtime(model, parallel={"tp": 2}) as runtime:
            curves.append(train(runtime, runtime.build_model(), STEPS))
    return curves


def test_a_runtime_in_the_place_of_a_closed_one_trains_as_that_did(ranks: RankPool, dense: Path) -> None:
    for first, second in ranks.run(reopened_job, str(dense)):
        assert first == second


def activations_job(model: str, layout: dict[str, int]) -> tuple[bool, list[Mapping[str, Tensor]]]:
    with open_runtime(model, parallel=layout) as runtime:
        handle = runtime.build_model(forward_only=True)
        return runtime.is_mp_src_rank_with_outputs(handle), runtime.activations(handle, micro_batches([[0, 3, 5]]))


@pytest.mark.parametrize("layout", [{"tp": 2, "cp": 2}, {"pp": 2, "tp": 2}, {"pp": 2, "vpp": 1, "ep": 2}], ids=str)
def test_activations_are_those_of_one_rank_and_on_the_source_rank(
    ranks: RankPool, mixture: Path, layout: dict[str, int]
) -> None:
    ((_, (expected,)),) = ranks.run(activations_job, str(mixture), {}, world_size=1)
    results = ranks.run(activations_job, str(mixture), layout, world_size=4)
    for is_source, activations in results:
        assert len(activations) == is_source
        for found in activations:
            # Keys and values of all heads, not those of a rank, happen to be as wide as hidden states.
            left_out = ("k_proj", "v_proj") if layout.get("tp") else ()
            assert list(found) == [path for path in expected if not path.endswith(left_out)]
            for path, values in found.items():
                assert relative_difference(values, expected[path]) < 1e-5, path
