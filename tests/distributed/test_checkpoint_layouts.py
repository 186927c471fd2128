"""A checkpoint of any layout and runtime goes on in any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rl_backend.contracts import Head
from tests.support.bridge_state import write_tiny_mixture
from tests.support.checkpoint_layouts import DENSE, MIXTURE, Layout, bridge, continue_in, native, read_whole
from tests.support.critic import squared_error
from tests.support.models import write_tiny, write_tiny_qwen3
from tests.support.native import assert_equal_tensors, micro_batches, token_loss
from tests.support.rank_pool import RankPool


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, for four stages."""
    return write_tiny_qwen3(tmp_path_factory.mktemp("dense"), num_hidden_layers=4)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_mixture(tmp_path_factory.mktemp("mixture"))


def check(ranks: RankPool, model: Path, folder: Path, saver: Layout, loaders: list[Layout]) -> None:
    for loader, difference in continue_in(ranks, model, folder, saver, loaders).items():
        if loader == saver:
            assert difference["loss"] == 0, loader
        else:
            assert difference["loss"] < 1e-6, f"{loader}: {difference}"


@pytest.mark.shows(
    "checkpoints: dp, tp, pp, vpp, cp, the world size and the runtime may change; moments stay equal in every bit"
)
@pytest.mark.parametrize("saver", list(DENSE), ids=str)
def test_a_dense_model_goes_on_in_another_layout(ranks: RankPool, dense: Path, tmp_path: Path, saver: Layout) -> None:
    check(ranks, dense, tmp_path, saver, DENSE[saver])


@pytest.mark.shows("checkpoints: a mixture of experts continues with another layout of its experts, on either runtime")
@pytest.mark.parametrize("saver", list(MIXTURE), ids=str)
def test_a_mixture_goes_on_in_another_layout(ranks: RankPool, mixture: Path, tmp_path: Path, saver: Layout) -> None:
    check(ranks, mixture, tmp_path, saver, MIXTURE[saver])


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
        ("qwen2", "log_probs", {"head_dim": None}),
        ("llama", "log_probs", {"attention_bias": False, "tie_word_embeddings": False}),
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
