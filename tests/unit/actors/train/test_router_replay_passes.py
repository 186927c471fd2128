"""Which passes of the RL examples record routes and which replay them, and which know the entropy."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors import Loss
from actors.train.model import GroupModel, RouterReplayMode
from rl_backend import TokenSequence
from rl_backend.contracts import ForwardResult, StepResult

SEQUENCES = [TokenSequence(torch.tensor([5, 6, 7]))]
OUTPUTS = {
    "log_probs": [torch.zeros(3)],
    "entropy": [torch.ones(3)],
    "values": [torch.zeros(3)],
    "routed_experts": [torch.zeros(3, 2, 2)],
}


class Group:
    """Answers like a training group; keeps how routers were told to choose, and whether the entropy was asked for."""

    def __init__(self) -> None:
        self.replays: list[str] = []
        self.entropies: list[bool] = []
        for name, answer in {
            "zero_grad": None,
            "optimizer_step": StepResult(True, 1.0, None),
            "lr_scheduler_step": 0.1,
        }.items():
            setattr(self, name, SimpleNamespace(submit=lambda *_, answer=answer: self._future(answer)))
        self.forward = self.forward_backward = SimpleNamespace(submit=self._forward)

    def _forward(self, *_: Any, meta: Mapping[str, Any], router_replay: str = "off") -> Any:
        self.replays.append(router_replay)
        self.entropies.append(meta.get("calculate_entropy", False))
        outputs = {name: rows for name, rows in OUTPUTS.items() if name != "entropy" or self.entropies[-1]}
        return self._future(ForwardResult(outputs=outputs))

    def _future(self, answer: Any) -> Any:
        return SimpleNamespace(result=lambda: answer)


@pytest.mark.parametrize(
    ("mode", "old_policy", "update", "fields"),
    [
        ("off", "off", "off", {"old_log_probs", "old_entropy"}),
        ("R2", "record", "replay", {"old_log_probs", "old_entropy", "routed_experts"}),
        ("R3", "replay", "replay", {"old_log_probs", "old_entropy"}),
    ],
)
def test_r2_records_in_the_first_pass_and_r3_replays_in_all(
    mode: RouterReplayMode, old_policy: str, update: str, fields: set[str]
) -> None:
    group: Any = Group()
    policy = GroupModel(group, "handle", mode)  # type: ignore[arg-type]
    outputs = policy.outputs({"old_log_probs": "log_probs"}, SEQUENCES, {}, before_updates=True)
    assert set(outputs) == fields
    policy.submit_update(SEQUENCES, Loss("rl_backend.algorithm:grpo_loss"), {})()
    assert group.replays == [old_policy, update]
    assert group.entropies == [True, False], "an update would compute a gradient of the entropy that nobody wants"


def test_reference_and_critic_route_freely() -> None:
    group: Any = Group()
    other = GroupModel(group, "handle")  # type: ignore[arg-type]
    assert set(other.outputs({"log_probs": "log_probs"}, SEQUENCES, {"calculate_entropy": True})) == {"log_probs"}
    other.submit_update(SEQUENCES, Loss("rl_backend.algorithm:value_loss"), {})()
    assert group.replays == ["off", "off"]
    assert group.entropies == [False, False]
