"""verl's engines replay routes that a pass recorded (R2), or that a rollout returned (R3)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from tests.support.moe import write_moe
from tests.support.qwen3_5 import write_qwen3_5
from tests.support.rank_pool import RankPool
from tests.support.verl_batches import make_batch, rows
from tests.support.verl_engine import open_engine

IMPORT_SECONDS = 300.0

BY_TOKENS = {"use_dynamic_bsz": True, "max_token_len_per_gpu": 38, "global_batch_size": 8}


class Replay(NamedTuple):
    """Log-probs of each sequence.

    Attributes:
        recorded: with the model's own routes, while they were recorded.
        reference: without replay, though routes are there.
        own, rotated: with these routes, and with the next expert in the place of each.
        rotated_of_rollout: the same without the last token's, whatever a batch's padding has.
        replayed_fraction: what an update with these reports.
    """

    recorded: list[Tensor]
    reference: list[Tensor]
    own: list[Tensor]
    rotated: list[Tensor]
    rotated_of_rollout: list[Tensor]
    replayed_fraction: float


def replay_job(model: str, backend: str, grouped: bool) -> Replay:
    found = rows()
    found[3]["response_mask"].zero_()

    def routed(routes: list[Tensor] | None, cut: dict[str, Any], **facts: Any) -> TensorDict:
        batch = make_batch(found, "response", **cut, **facts)
        if routes is not None:
            batch["routed_experts"] = torch.nested.as_nested_tensor(routes, layout=torch.jagged)
        return batch

    def infer(engine: Any, routes: list[Tensor] | None, cut: dict[str, Any], **facts: Any) -> dict[str, list[Tensor]]:
        with engine.eval_mode():
            output = engine.infer_batch(routed(routes, cut, **facts))["model_output"]
        return {name: list(value.unbind()) for name, value in output.items()}

    flag = {"enable_routing_replay": True}
    with open_engine(model, backend=backend, router_replay="R2", grouped=grouped) as engine:
        recorded = infer(engine, None, BY_TOKENS, **flag)
        routes = recorded["routed_experts"]
        rotated = [((row.to(torch.int16) + 1) % 4).to(torch.int16) for row in routes]
        # Only routes of sequences with a response are read of a rollout.
        of_rollout = [row[:-1] if index != 3 else torch.zeros_like(row) for index, row in enumerate(rotated)]
        results = [
            recorded,
            infer(engine, rotated, {}, enable_routing_replay=False),
            infer(engine, routes, {"micro_batch_size_per_gpu": 2}, **flag),
            infer(engine, rotated, BY_TOKENS, **flag),
        ]
    with open_engine(model, backend=backend, router_replay="R3", grouped=grouped) as engine:
        results.append(infer(engine, of_rollout, BY_TOKENS, **flag))
        with engine.train_mode():
            output = engine.train_batch(routed(of_rollout, BY_TOKENS, **flag), summed)
    return Replay(*(result["log_probs"] for result in results), *output["metrics"]["router_replay/replayed_fraction"])


def summed(model_output: Any, data: Any, dp_group: Any) -> tuple[Tensor, dict[str, Any]]:
    return model_output["log_probs"].values().sum(), {"sum": 0.0}


@pytest.mark.shows("verl: both backends replay routes recorded in compute_log_prob (R2) or by a rollout (R3)")
@pytest.mark.parametrize(
    ("family", "backend", "grouped"),
    [
        pytest.param("qwen3_moe", "native", False, id="qwen3_moe-native"),
        pytest.param("qwen3_moe", "native", True, id="qwen3_moe-groups", marks=pytest.mark.long),
        pytest.param("qwen3_moe", "bridge", False, id="qwen3_moe-bridge"),
        pytest.param("qwen3_5_moe", "native", False, id="qwen3_5_moe-native"),
    ],
)
def test_routes_of_the_policy_and_of_a_rollout_are_replayed(
    ranks: RankPool, tmp_path: Path, family: str, backend: str, grouped: bool
) -> None:
    if family == "qwen3_5_moe":
        mixture = write_qwen3_5(tmp_path / "mixture", moe=True, released=True, num_experts=4)
    else:
        mixture = write_moe(family, tmp_path / "mixture", num_hidden_layers=2)
    (found,) = ranks.run(replay_job, str(mixture), backend, grouped, world_size=1, timeout=IMPORT_SECONDS)
    for index, recorded in enumerate(found.recorded):
        torch.testing.assert_close(found.reference[index], recorded, rtol=0, atol=1e-5)
        torch.testing.assert_close(found.own[index], recorded, rtol=0, atol=1e-5)
        # The last log-prob but one is computed at the last token but one, whose routes are there.
        assert float((found.rotated[index][:-1] - recorded[:-1]).abs().max()) > 1e-3
        expected = recorded if index == 3 else found.rotated[index]
        torch.testing.assert_close(found.rotated_of_rollout[index], expected, rtol=0, atol=1e-5)
    lengths = [len(row) for row in found.recorded]
    replayed = sum(length - 1 for index, length in enumerate(lengths) if index != 3)
    assert found.replayed_fraction == pytest.approx(replayed / sum(lengths))
