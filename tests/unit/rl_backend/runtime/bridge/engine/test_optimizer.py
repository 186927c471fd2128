"""Counts, moments, schedules and clipping of the bridge's optimizer, with stand-ins for Megatron's parts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rl_backend.contracts import OptimizerConfig, StepResult
from rl_backend.runtime.bridge.engine import optimizer
from rl_backend.runtime.bridge.engine.optimizer import BridgeOptimizer


def megatron(*parts: Any) -> Any:
    return SimpleNamespace(chained_optimizers=list(parts))


def part(adam: Any, *, stub: bool = False, **fields: Any) -> Any:
    return SimpleNamespace(optimizer=adam, is_stub_optimizer=stub, **fields)


def test_steps_are_counted_by_parameter_or_by_group_in_every_optimizer_that_is_no_stub() -> None:
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    adam = torch.optim.Adam(parameters[:2])
    for each in parameters[:2]:
        adam.state[each]["step"] = torch.tensor(3.0)
    groups = [{"params": []}, {"params": [parameters[2]], "step": 3}, {"params": [parameters[1]]}]
    both = megatron(part(None, stub=True), part(adam), part(SimpleNamespace(param_groups=groups)))
    assert optimizer.num_steps(both) == 3
    optimizer.set_num_steps(both, 7)
    assert [adam.state[each]["step"].item() for each in parameters[:2]] == [7.0, 7.0]
    assert "step" not in groups[0] and [group["step"] for group in groups[1:]] == [7, 7]
    alone = part(SimpleNamespace(param_groups=groups[2:]))
    assert optimizer.num_steps(alone) == 7 and optimizer.num_steps(megatron()) == 0
    assert optimizer.num_steps(part(SimpleNamespace(param_groups=[{"params": [1]}]))) == 0


@pytest.mark.parametrize(("fused", "capturable"), [(False, False), (True, False), (False, True)])
def test_moments_are_there_before_the_first_step_and_those_that_are_there_stay(fused: bool, capturable: bool) -> None:
    old, new = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3, device="meta"))
    adam = torch.optim.Adam([{"params": [old]}, {"params": [new]}])
    adam.param_groups[1] |= {"fused": fused, "capturable": capturable}
    adam.state[old]["step"] = torch.tensor(5.0)
    started: list[Any] = []

    def init(given: Any, config: Any) -> None:
        started.append((given, config))
        given.state[new]["exp_avg"] = torch.zeros(3)

    optimizer._allocate_moments(megatron(part(adam, init_state_fn=init, config="config")))
    assert started == [(adam, "config")] and adam.state[old] == {"step": torch.tensor(5.0)}
    step = adam.state[new]["step"]
    assert (step.dtype, step.shape, step.device.type) == (torch.float32, (), "meta" if fused or capturable else "cpu")
    other = SimpleNamespace(param_groups=[{"params": [old]}], state={old: {}})
    optimizer._allocate_moments(part(other, init_state_fn=lambda *_: None, config=None))
    assert other.state == {old: {}}
    held = object.__new__(BridgeOptimizer)
    held.megatron = megatron(part(adam))
    assert [tuple(tensor.shape) for tensor in held.held_tensors()] == [(2,), (3,), (3,)], "without steps"


def test_parameters_are_counted_with_those_of_float32_first() -> None:
    names = [nn.Parameter(torch.ones(1)) for _ in range(4)]
    a, b, c, d = names
    made = part(
        None,
        model_fp32_groups=[[c], [d]],
        model_float16_groups=[[a, b], []],
        model_param_group_index_map={a: 0, c: 9, b: 1, d: 2},
    )
    optimizer._count_in_adams_order(megatron(made))
    assert made.model_param_group_index_map == {a: (0, 1), c: (0, 0), b: (0, 2), d: (1, 0)}
    assert list(made.model_param_group_index_map) == [a, c, b, d]


def schedule(**settings: Any) -> Any:
    config = OptimizerConfig(lr=1.0, weight_decay=0.5, **settings)
    groups = [{"params": [], "max_lr": 1.0, "min_lr": config.min_lr, "wd_mult": 1.0, "lr_mult": 1.0}]
    return optimizer._scheduler(SimpleNamespace(param_groups=groups), config), groups


def test_a_schedule_is_megatrons_of_the_same_numbers() -> None:
    made, groups = schedule(
        lr_warmup_init=0.2,
        min_lr=0.1,
        lr_warmup_steps=4,
        lr_decay_steps=12,
        lr_decay_style="linear",
        weight_decay_start=0.1,
        weight_decay_incr_style="linear",
        total_training_steps=10,
    )
    found = []
    for _ in range(13):
        found.append((round(groups[0]["lr"], 6), round(groups[0]["weight_decay"], 6)))
        made.step(increment=1)
    warm = [0.2, 0.4, 0.6, 0.8]
    decay = [round(0.1 + 0.9 * (12 - step) / 8, 6) for step in range(4, 13)]
    assert [rate for rate, _ in found] == warm + decay
    assert [decays for _, decays in found] == [round(0.1 + 0.04 * min(step, 10), 6) for step in range(13)]


def test_a_schedule_without_an_end_stays_and_one_that_ends_in_its_warm_up_is_taken() -> None:
    made, groups = schedule(weight_decay_start=None)
    made.step(increment=1000)
    assert groups[0]["lr"] == pytest.approx(1.0, abs=1e-9) and groups[0]["weight_decay"] == 0.5
    short, groups = schedule(lr_warmup_steps=4, total_training_steps=3)
    rates = []
    for _ in range(6):
        rates.append(groups[0]["lr"])
        short.step(increment=1)
    assert rates == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]


@pytest.mark.parametrize(("clip", "ok"), [(2.0, True), (0.0, True), (2.0, False)])
def test_a_step_clips_every_optimizer_by_the_norm_of_all(monkeypatch: pytest.MonkeyPatch, clip: float, ok: bool) -> None:
    told: list[Any] = []
    monkeypatch.setattr(optimizer, "clip_grad_by_total_norm_fp32", lambda *args: told.append(args))
    config = SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8="decoupled")
    parts = [part(None, get_parameters=lambda each=each: each, config=config) for each in (["a"], [], ["b", "c"])]
    made = object.__new__(BridgeOptimizer)
    made.megatron = megatron(*parts)
    made.megatron.prepare_grads, made.megatron.param_groups = lambda: False, []
    made.megatron.step_with_ready_grads = lambda: told.append("step")
    made.balance = SimpleNamespace(step=lambda *, taken: told.append(taken))  # type: ignore[assignment]
    made._config = OptimizerConfig(clip_grad=clip)
    result = StepResult(ok, 5.0, None)
    seen: list[bool] = []
    monkeypatch.setattr(
        BridgeOptimizer, "_step_result", lambda self, *, found_not_finite: seen.append(found_not_finite) or result
    )  # type: ignore[func-returns-value]
    assert made.step("actor") is result and seen == [False]
    clipped: list[Any] = [(["a"], 2.0, 5.0, "decoupled"), (["b", "c"], 2.0, 5.0, "decoupled")] if clip else []
    assert told == ([True, *clipped, "step"] if ok else [False])
    made.balance = None
    made.step("actor")
    assert told.count(True) + told.count(False) == 1


def test_a_restored_schedule_counts_on_from_its_steps() -> None:
    told: list[Any] = []
    made = object.__new__(BridgeOptimizer)
    made.scheduler = SimpleNamespace(num_steps=9, step=lambda increment: told.append((made.scheduler.num_steps, increment)))
    made.restore_schedule(4)
    assert told == [(0, 4)]
    made.scheduler.get_lr = lambda group: group["max_lr"] - group["min_lr"]
    made._config = OptimizerConfig(lr=0.75, min_lr=0.25, lr_decay_style="linear", lr_decay_steps=9)
    assert made.schedule_step() == 0.5 and told[-1][1] == 1
