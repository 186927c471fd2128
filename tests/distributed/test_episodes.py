"""Losses of branched episodes in every layout and both runtimes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest
from torch import Tensor

from rl_backend.algorithm import episode_sequences, grpo_loss
from rl_backend.algorithm.sequences import with_advantages, with_outputs
from rl_backend.data import prepare_micro_batches
from tests.support.checkpoint_layouts import Layout, bridge, native
from tests.support.episodes import episode, segment
from tests.support.models import write_tiny_qwen3
from tests.support.native import assert_near
from tests.support.rank_pool import RankPool

type Found = tuple[Mapping[str, Tensor], float]

HELD = segment([("given", [1, 2, 3]), ("sampled", [4, 5, 6]), ("given", [7, 8]), ("sampled", [9])], rewards=[0.0, 1.0])
ANEW = segment([("given", [1, 7, 8]), ("sampled", [9, 10, 11, 12, 13])])
SHORT = segment([("given", [1]), ("sampled", [2])])
EPISODES = [episode(HELD, ANEW), episode(SHORT), episode(ANEW, SHORT, HELD), episode(HELD)]
LAYOUTS = [native(2), native(2, cp=2), native(2, pp=2), bridge(2), bridge(2, tp=2)]


def gradients_job(layout: Layout, model: str) -> Found:
    """Gradients of a loss that counts an episode once, and the mean that is optimised."""
    sequences = with_advantages(episode_sequences(EPISODES), [1.0, 0.0, 2.5, -1.0], "grpo", 2)
    old = [each.token_fields["rollout_log_probs"] for each in sequences]
    sequences = with_outputs(sequences, {"old_log_probs": old})
    with layout.open(model) as runtime:
        handle = runtime.build_model()
        ranks = prepare_micro_batches(sequences, handle.data_parallel_size, 16)
        loss = partial(grpo_loss, loss_agg_mode="seq-mean-token-mean")
        result = runtime.forward_backward(handle, ranks[handle.data_parallel_rank], loss)
        gradients = {name: tensor.clone() for name, tensor in runtime.export_gradients(handle)}
    # Only the last rank of a pipeline has metrics.
    return gradients, sum(metric.weight for name, metric in result.metrics.items() if name == "policy_loss")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3(tmp_path_factory.mktemp("model"), num_hidden_layers=2, num_key_value_heads=2)


@pytest.fixture(scope="module")
def on_one_rank(model: Path, ranks: RankPool) -> Found:
    (found,) = ranks.run(gradients_job, native(1), str(model), world_size=1)
    assert found[1] == pytest.approx(len(EPISODES))
    return found


@pytest.mark.shows("episodes: gradients of branched episodes with dp, cp, pp and tp, in both runtimes, match one rank's")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_branched_episodes_train_alike_in_every_layout(
    ranks: RankPool, model: Path, on_one_rank: Found, layout: Layout
) -> None:
    results = ranks.run(gradients_job, layout, str(model), world_size=layout.world_size)
    assert_near(results[0][0], on_one_rank[0])
