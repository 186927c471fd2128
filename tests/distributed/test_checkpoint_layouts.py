"""A checkpoint of any layout and runtime goes on in any other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from rl_backend.contracts import Head
from tests.support.bridge_state import write_tiny_mixture
from tests.support.checkpoint_layouts import (
    DENSE,
    HYBRID,
    MIXTURE,
    MORE_OF_HYBRID,
    Layout,
    Saved,
    bridge,
    load_in,
    native,
    read_whole,
    save_in,
)
from tests.support.critic import squared_error
from tests.support.models import write_tiny, write_tiny_qwen3
from tests.support.native import assert_equal_tensors, micro_batches, token_loss
from tests.support.qwen3_5 import write_qwen3_5
from tests.support.rank_pool import RankPool


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, for four stages."""
    return write_tiny_qwen3(tmp_path_factory.mktemp("dense"), num_hidden_layers=4)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_mixture(tmp_path_factory.mktemp("mixture"))


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_5(tmp_path_factory.mktemp("hybrid") / "model", moe=True, released=True)


type Saves = Callable[[Path, Layout], Saved]


@pytest.fixture(scope="module")
def saves(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Saves:
    """What a layout saves of a model; once for all that load it."""

    @cache
    def save(model: Path, saver: Layout) -> Saved:
        return save_in(ranks, model, tmp_path_factory.mktemp("saved") / "checkpoint", saver)

    return save


def from_one_to_another(pairs: Mapping[Layout, list[Layout]], *marks: pytest.MarkDecorator) -> list[object]:
    return [
        pytest.param(saver, loader, id=f"{saver} to {loader}", marks=marks)
        for saver, found in pairs.items()
        for loader in found
    ]


def check(loader: Layout, saver: Layout, difference: float) -> None:
    if loader == saver:
        assert difference == 0
    else:
        assert difference < 1e-6, f"{saver} to {loader}"


@pytest.mark.shows(
    "checkpoints: dp, tp, pp, vpp, cp, the world size and the runtime may change; moments stay equal in every bit"
)
@pytest.mark.parametrize(("saver", "loader"), from_one_to_another(DENSE))
def test_a_dense_model_goes_on_in_another_layout(
    ranks: RankPool, dense: Path, saves: Saves, tmp_path: Path, saver: Layout, loader: Layout
) -> None:
    check(loader, saver, load_in(ranks, dense, saves(dense, saver), tmp_path / "again", loader))


@pytest.mark.shows("recovery: what ranks keep in memory goes on in another layout and runtime, as a checkpoint does")
@pytest.mark.parametrize(
    ("saver", "loader"),
    [
        (native(2), native(2)),
        (native(2), native(1)),
        (native(2), bridge(2, tp=2)),
        (native(4, "zbv", pp=2, vpp=2), native(4, tp=2)),
        (bridge(2, tp=2), native(4)),
    ],
    ids=str,
)
def test_a_state_in_memory_goes_on_in_another_layout(
    ranks: RankPool, dense: Path, saves: Saves, tmp_path: Path, saver: Layout, loader: Layout
) -> None:
    check(loader, saver, load_in(ranks, dense, saves(dense, saver), tmp_path / "again", loader, in_memory=True))


@pytest.mark.shows("checkpoints: a mixture of experts continues with another layout of its experts, on either runtime")
@pytest.mark.parametrize(("saver", "loader"), from_one_to_another(MIXTURE))
def test_a_mixture_goes_on_in_another_layout(
    ranks: RankPool, mixture: Path, saves: Saves, tmp_path: Path, saver: Layout, loader: Layout
) -> None:
    check(loader, saver, load_in(ranks, mixture, saves(mixture, saver), tmp_path / "again", loader))


@pytest.mark.shows(
    "checkpoints: gated DeltaNet, gated attention and shared experts go on in other layouts, on either runtime"
)
@pytest.mark.parametrize(
    ("saver", "loader"), [*from_one_to_another(HYBRID), *from_one_to_another(MORE_OF_HYBRID, pytest.mark.long)]
)
def test_a_model_with_recurrent_states_goes_on_in_another_layout(
    ranks: RankPool, hybrid: Path, saves: Saves, tmp_path: Path, saver: Layout, loader: Layout
) -> None:
    check(loader, saver, load_in(ranks, hybrid, saves(hybrid, saver), tmp_path / "again", loader))


def exchange_job(model: str, folder: str, head: Head) -> None:
    """From the native runtime to the bridge and back."""
    loss = squared_error if head == "values" else token_loss
    paths = [Path(folder, name) for name in ("first", "second", "third")]
    with native(1).open(model) as runtime:
        handle = runtime.build_model(head=head)
        runtime.forward_backward(handle, micro_batches([[0, 1, 2]]), loss)
        assert runtime.optimizer_step(handle).ok
        runtime.save_checkpoint(handle, paths[0])
    for opened, path, again in [(bridge(1), paths[0], paths[1]), (native(1), paths[1], paths[2])]:
        with opened.open(model) as runtime:
            handle = runtime.build_model(head=head)
            runtime.load_checkpoint(handle, path)
            runtime.save_checkpoint(handle, again)
            weights = {f"model.{name}": tensor.clone() for name, tensor in runtime.export_weights(handle)}
        state = read_whole(path)
        assert_equal_tensors(read_whole(again), state)
        assert_equal_tensors(weights, {name: tensor for name, tensor in state.items() if name.startswith("model.")})


@pytest.mark.shows("checkpoints: families of both runtimes, and a critic, go from one to the other and back, bit for bit")
@pytest.mark.parametrize(
    ("family", "head", "settings"),
    [
        pytest.param("qwen2", "log_probs", {"head_dim": None}, marks=pytest.mark.long),
        pytest.param("llama", "log_probs", {"attention_bias": False, "tie_word_embeddings": False}, marks=pytest.mark.long),
        ("qwen3", "log_probs", {"vocab_size": 129}),
        ("qwen3", "values", {}),
    ],
    ids=str,
)
def test_families_and_critics_go_to_the_other_runtime_and_back(
    ranks: RankPool, tmp_path: Path, family: str, head: Head, settings: dict[str, Any]
) -> None:
    model = write_tiny(family, tmp_path / "model", **settings)
    ranks.run(exchange_job, str(model), str(tmp_path), head, world_size=1)
