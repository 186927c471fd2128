"""A model of a run: what its loop sends to the group, waits for and is told."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors import Loss
from actors.train.model import (
    GroupModel,
    RouterReplayMode,
    TokenCount,
    Update,
    require_experts,
    require_known_end,
    update_metrics,
)
from rl_backend import TokenSequence
from rl_backend.contracts import BatchError, ConfigError, ForwardResult, Metric, StepResult

LOSS = Loss("rl_backend.algorithm:grpo_loss")
SEQUENCES = [TokenSequence(torch.arange(3)), TokenSequence(torch.arange(5))]
OUTPUTS = {
    "log_probs": [torch.zeros(3), torch.ones(5)],
    "entropy": [torch.full((3,), 2.0), torch.full((5,), 3.0)],
    "values": [torch.full((3,), 4.0), torch.full((5,), 5.0)],
    "routed_experts": [torch.zeros(3, 2, 2), torch.ones(5, 2, 2)],
}


class Group:
    """Keeps what it is sent, and whether its answer was waited for."""

    def __init__(self, outputs: dict[str, Any] | None = None) -> None:
        self.sent: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.waited: list[str] = []
        answers = {
            "zero_grad": None,
            "forward_backward": ForwardResult(metrics={"loss": Metric(3.0, 2.0)}),
            "forward": ForwardResult(outputs=OUTPUTS if outputs is None else outputs),
            "optimizer_step": StepResult(False, 7.0, 4),
            "lr_scheduler_step": 0.25,
        }
        for name, answer in answers.items():
            setattr(self, name, SimpleNamespace(submit=self._submit(name, answer)))

    def _submit(self, name: str, answer: Any) -> Any:
        def wait() -> Any:
            self.waited.append(name)
            return answer

        def submit(*arguments: Any, **named: Any) -> Any:
            self.sent.append((name, arguments, named))
            return SimpleNamespace(result=wait)

        return submit


def model(group: Any, mode: RouterReplayMode = "off") -> GroupModel:
    handle: Any = "a handle"
    return GroupModel(group, handle, mode)


@pytest.mark.parametrize(
    ("mode", "fields", "before_updates", "replay", "entropy", "expected"),
    [
        ("off", {"ref_log_probs": "log_probs"}, False, "off", False, {"ref_log_probs": "log_probs"}),
        ("R2", {"ref_log_probs": "log_probs"}, False, "off", False, {"ref_log_probs": "log_probs"}),
        ("off", {"uncertain": "entropy"}, False, "off", True, {"uncertain": "entropy"}),
        (
            "R3",
            {"a": "log_probs", "b": "values"},
            True,
            "replay",
            True,
            {"a": "log_probs", "b": "values", "old_entropy": "entropy"},
        ),
        (
            "R2",
            {"a": "log_probs"},
            True,
            "record",
            True,
            {"a": "log_probs", "routed_experts": "routed_experts", "old_entropy": "entropy"},
        ),
    ],
)
def test_outputs_become_the_fields_that_were_asked_for(
    mode: RouterReplayMode,
    fields: dict[str, str],
    before_updates: bool,
    replay: str,
    entropy: bool,
    expected: dict[str, str],
) -> None:
    group = Group()
    policy, meta, before = model(group, mode), {"temperature": 0.5}, dict(fields)
    wait = policy.submit_outputs(fields, SEQUENCES, meta, before_updates=before_updates)
    assert not group.waited and policy.tokens.take() == 0
    found = wait()
    assert found.keys() == expected.keys()
    for field, name in expected.items():
        assert isinstance(found[field], list)
        assert all(torch.equal(row, given) for row, given in zip(found[field], OUTPUTS[name], strict=True))
    meta_sent = {"temperature": 0.5, "calculate_entropy": entropy}
    assert group.sent == [("forward", ("a handle", SEQUENCES), {"meta": meta_sent, "router_replay": replay})]
    assert meta == {"temperature": 0.5} and fields == before
    assert policy.tokens.take() == 8


def test_an_update_clears_computes_steps_and_then_moves_the_schedule() -> None:
    group = Group()
    policy = model(group, "R2")
    wait = policy.submit_update(SEQUENCES, LOSS, {"temperature": 0.5})
    sent = [
        ("zero_grad", ("a handle",), {}),
        ("forward_backward", ("a handle", SEQUENCES, LOSS), {"meta": {"temperature": 0.5}, "router_replay": "replay"}),
        ("optimizer_step", ("a handle",), {}),
        ("lr_scheduler_step", ("a handle",), {}),
    ]
    assert group.sent == sent and not group.waited and policy.tokens.take() == 0
    assert wait() == Update({"loss": Metric(3.0, 2.0)}, False, 7.0, 0.25)
    # A failure that nobody reads would stop what follows.
    assert group.waited == ["zero_grad", "forward_backward", "optimizer_step", "lr_scheduler_step"]
    assert policy.tokens.take() == 8
    assert policy.update(SEQUENCES, LOSS).ok is False
    assert group.sent[5][2]["meta"] == {}
    assert policy.update(SEQUENCES, LOSS, {"a": 1}).next_lr == 0.25
    assert group.sent[9][2]["meta"] == {"a": 1}


def test_a_runtime_that_knows_no_entropy_serves_a_policy_and_not_who_asks_for_it() -> None:
    policy = model(Group({"log_probs": OUTPUTS["log_probs"]}))
    assert policy.outputs({"a": "log_probs"}, SEQUENCES, {}, before_updates=True).keys() == {"a"}
    with pytest.raises(BatchError, match="output 'entropy' was not computed"):
        policy.outputs({"a": "entropy"}, SEQUENCES, {})


def test_tokens_are_counted_from_one_look_to_the_next_by_each_model() -> None:
    count, other = TokenCount(), TokenCount()
    count.add(SEQUENCES)
    count.add(SEQUENCES[:1])
    assert (count.take(), count.take(), other.take()) == (11, 0, 0)
    count.add(SEQUENCES[1:])
    assert count.take() == 5


def test_metrics_of_updates_are_weighted_means_and_the_worst_norm() -> None:
    updates = [
        Update({"a": Metric(6.0, 2.0), "only": Metric(1.0, 4.0)}, True, 2.0, 0.3),
        Update({"a": Metric(1.0, 5.0)}, False, 5.0, 0.2),
        Update({"a": Metric(0.0, 3.0)}, True, 4.0, 0.1),
    ]
    found = update_metrics(updates)
    assert found == {"a": 0.7, "only": 0.25, "grad_norm": 5.0, "step_ok": 2 / 3, "next_lr": 0.1}
    counted = [Update({"tokens_computed": Metric(*each)}, True, 1.0, 0.1) for each in ((300.0, 900.0), (50.0, 60.0))]
    assert {"tokens_computed": 350.0, "tokens_trained": 960.0}.items() <= update_metrics(counted).items()
    # Whether NaN is larger than a number depends on their order.
    for place in range(3):
        broken = [*updates]
        broken[place] = broken[place]._replace(grad_norm=math.nan)
        assert math.isnan(update_metrics(broken)["grad_norm"])


def write_config(folder: Path, **config: Any) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(
    "config",
    [
        {"num_experts": 4},
        {"num_local_experts": 8},
        {"n_routed_experts": 2, "num_experts": None},
        {"num_experts": 0, "text_config": {"num_experts": 4}},
    ],
)
def test_replay_is_for_models_with_experts(config: dict[str, Any], tmp_path: Path) -> None:
    model = write_config(tmp_path, **config)
    for mode in ("off", "R2", "R3"):
        require_experts("router_replay", mode, model)


@pytest.mark.parametrize("config", [{}, {"num_experts": 0}, {"num_experts": 4, "text_config": {"num_local_experts": None}}])
def test_replay_of_a_dense_model_is_refused(config: dict[str, Any], tmp_path: Path) -> None:
    model = write_config(tmp_path, **config)
    require_experts("router_replay", "off", str(tmp_path / "nowhere"))
    require_experts("router_replay", "off", model)
    with pytest.raises(ConfigError) as caught:
        require_experts("router_replay", "R3", model)
    assert str(caught.value) == (
        f"router_replay='R3': {model} is a dense model (its config.json has none of num_experts, num_local_experts, "
        "n_routed_experts); use off"
    )


@pytest.mark.parametrize(
    ("config", "end", "fits"),
    [
        ({"vocab_size": 10}, 9, True),
        ({"vocab_size": 10}, 10, False),
        ({"vocab_size": 10}, 11, False),
        ({"vocab_size": 99, "text_config": {"vocab_size": 10}}, 10, False),
        ({}, 1000, True),
    ],
)
def test_a_text_ends_with_a_token_of_the_model(config: dict[str, Any], end: int, fits: bool, tmp_path: Path) -> None:
    model = write_config(tmp_path, **config)
    tokenizer = SimpleNamespace(eos_token_id=end, eos_token="<end>")
    if fits:
        require_known_end("tokenizer", model, tokenizer)
        return
    with pytest.raises(ConfigError) as caught:
        require_known_end("tokenizer", model, tokenizer)
    assert str(caught.value) == (
        f"tokenizer='{model}': its tokenizer ends a text with token {end} (<end>), and the model has 10 tokens, 0 to 9; "
        "give the tokenizer that belongs to it"
    )


def test_a_tenant_moves_with_its_base_and_its_optimizer_alone() -> None:
    moved: list[tuple[Any, ...]] = []
    group: Any = SimpleNamespace(to=lambda *given, **named: moved.append((*given, named)))
    handle: Any = "tenant"
    base: Any = "base"
    for model, expected in (
        (GroupModel(group, handle, base=base), [("tenant", "cpu", {"model": True}), ("base", "cpu")]),
        (GroupModel(group, handle), [("tenant", "cpu", {"model": True})]),
    ):
        moved.clear()
        model.to("cpu")
        assert [each if each[-1] else each[:-1] for each in moved] == expected
        moved.clear()
        model.to("device", model=False)
        assert moved == [("tenant", "device", {"model": False})]
