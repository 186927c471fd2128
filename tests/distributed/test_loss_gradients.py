"""Gradients through entropies, and temperatures of single sequences, in every layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from rl_backend.contracts import LossFn, ModelOutput, PackedBatch
from tests.support.checkpoint_layouts import Layout, bridge, native
from tests.support.models import write_tiny_qwen3
from tests.support.native import (
    LENGTHS,
    assert_near,
    deal,
    gradients,
    micro_batches,
    open_runtime,
    relative_difference,
    token_loss,
)
from tests.support.rank_pool import RankPool

SPLIT = [[0, 1], [2, 3], [4, 5], [6, 7]]
TEMPERATURES = torch.linspace(0.4, 1.8, len(LENGTHS))
LAYOUTS = [
    native(2, tp=2),
    native(2, cp=2),
    native(2, "zbv", pp=2, vpp=2),
    native(4, tp=2, cp=2),
    native(4, tp=4),
    bridge(2),
    bridge(2, tp=2),
    bridge(2, pp=2),
]


class Found(NamedTuple):
    """Gradients by Hugging Face name, and by sequence what source ranks gave."""

    gradients: Mapping[str, Tensor]
    log_probs: Mapping[int, Tensor]
    entropies: Mapping[int, Tensor]


def entropy_loss(model_output: ModelOutput, data: PackedBatch, dp_group: Any = None) -> Any:
    """Of the entropies and the log-probs, with weights that differ by token."""
    assert model_output.log_probs is not None
    assert model_output.entropy is not None
    mask = data.token_field("loss_mask")
    weights = 1 + torch.arange(data.num_tokens, device=mask.device) % 3
    loss = -((0.3 * model_output.log_probs + weights * model_output.entropy) * mask).sum()
    return loss / data.meta["batch_num_tokens"] * data.meta["dp_size"], {}


def gradients_job(layout: Layout, model: str, temperatures: Tensor) -> Found:
    with layout.open(model) as runtime:
        handle = runtime.build_model()
        mine = deal(SPLIT, handle.data_parallel_size)[handle.data_parallel_rank]
        data = [
            replace(batch, sequence_fields={"temperature": temperatures[indices]})
            for batch, indices in zip(
                micro_batches(mine, dp_size=handle.data_parallel_size, calculate_entropy=True), mine, strict=True
            )
        ]
        result = runtime.forward_backward(handle, data, entropy_loss)
        gradients = {name: tensor.clone() for name, tensor in runtime.export_gradients(handle)}
        order = [index for indices in mine for index in indices]
        log_probs, entropies = (
            dict(zip(order, result.outputs.get(name, ()), strict=bool(result.outputs))) for name in ("log_probs", "entropy")
        )
    return Found(gradients, log_probs, entropies)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four heads of keys and values, for tp=4, and a vocabulary that it does not divide."""
    path = tmp_path_factory.mktemp("model")
    return write_tiny_qwen3(path, num_hidden_layers=4, num_key_value_heads=4, vocab_size=130)


@pytest.fixture(scope="module")
def on_one_rank(model: Path, ranks: RankPool) -> Found:
    (found,) = ranks.run(gradients_job, native(1), str(model), TEMPERATURES, world_size=1)
    mean = torch.full_like(TEMPERATURES, float(TEMPERATURES.mean()))
    (alike,) = ranks.run(gradients_job, native(1), str(model), mean, world_size=1)
    assert relative_difference(found.gradients["model.norm.weight"], alike.gradients["model.norm.weight"]) > 0.1
    return found


@pytest.mark.shows("runtime: gradients of entropies and of per-sequence temperatures with tp, cp and pp match one rank's")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_entropies_and_temperatures_of_sequences_do_not_depend_on_the_layout(
    ranks: RankPool, model: Path, on_one_rank: Found, layout: Layout
) -> None:
    results = ranks.run(gradients_job, layout, str(model), TEMPERATURES, world_size=layout.world_size)
    assert_near(results[0].gradients, on_one_rank.gradients)
    for name in ("log_probs", "entropies"):
        found = {index: value for result in results for index, value in getattr(result, name).items()}
        assert found.keys() == set(range(len(LENGTHS)))
        for index, value in found.items():
            torch.testing.assert_close(value, getattr(on_one_rank, name)[index], rtol=1e-5, atol=1e-5)


def doubled_in_place(model_output: ModelOutput, data: PackedBatch, dp_group: Any = None) -> Any:
    """Twice :func:`~tests.support.native.token_loss`, in the memory of the outputs."""
    assert model_output.log_probs is not None
    loss = -model_output.log_probs.mul_(2.0 * data.token_field("loss_mask")).sum()
    return loss / data.meta["batch_num_tokens"] * data.meta["dp_size"], {}


def in_place_job(model: str, loss_fn: LossFn) -> tuple[Mapping[str, Tensor], Sequence[Tensor]]:
    """Whole gradients, and the outputs of this rank."""
    with open_runtime(model) as runtime:
        handle = runtime.build_model()
        mine = deal(SPLIT, handle.data_parallel_size)[handle.data_parallel_rank]
        result = runtime.forward_backward(handle, micro_batches(mine, dp_size=handle.data_parallel_size), loss_fn)
        return gradients(handle), result.output("log_probs")


def test_a_loss_may_change_the_outputs_that_it_is_given(ranks: RankPool, model: Path) -> None:
    for world_size in (1, 2):
        expected, found = (
            ranks.run(in_place_job, str(model), each, world_size=world_size) for each in (token_loss, doubled_in_place)
        )
        for (once, told), (twice, told_again) in zip(expected, found, strict=True):
            assert_near(twice, {name: 2.0 * value for name, value in once.items()}, 1e-6)
            assert all(torch.equal(*pair) for pair in zip(told, told_again, strict=True))
