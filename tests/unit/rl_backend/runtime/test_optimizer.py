"""Schedules equal those of the installed Megatron-Core at every step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal

import pytest

from rl_backend.contracts import ConfigError, OptimizerConfig
from rl_backend.runtime.bridge import installed
from rl_backend.runtime.optimizer import ParameterSchedule, clip_factor, values_of_step

STEPS = 40

STYLES: list[dict[str, Any]] = [
    {"lr_decay_style": "constant"},
    {"lr_decay_style": "linear"},
    {"lr_decay_style": "cosine"},
    {"lr_decay_style": "inverse-square-root"},
    *(
        {"lr_decay_style": "WSD", "lr_wsd_decay_style": style, "lr_wsd_decay_steps": 7}
        for style in ("linear", "cosine", "exponential", "minus_sqrt")
    ),
]
WARM_UPS: list[dict[str, Any]] = [
    {"lr_warmup_steps": 0},
    {"lr_warmup_steps": 5, "lr_warmup_init": 1e-5},
    {"lr_warmup_steps_ratio": 0.3},
]
WEIGHT_DECAYS: list[dict[str, Any]] = [
    {},
    {"weight_decay_start": 0.01, "weight_decay_incr_style": "linear"},
    {"weight_decay_start": 0.0, "weight_decay_incr_style": "cosine"},
]


def megatron_schedule(config: OptimizerConfig) -> list[tuple[float, float]]:
    """(learning rate, weight decay) before each step."""
    megatron = pytest.importorskip("megatron.core.optimizer_param_scheduler")
    group: dict[str, Any] = {}
    start = config.weight_decay if config.weight_decay_start is None else config.weight_decay_start
    scheduler = megatron.OptimizerParamScheduler(
        SimpleNamespace(param_groups=[group]),
        init_lr=config.lr_warmup_init,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=config.warmup_steps,
        lr_decay_steps=config.decay_steps,
        lr_decay_style=config.lr_decay_style,
        start_wd=start,
        end_wd=config.weight_decay,
        wd_incr_steps=config.total_training_steps,
        wd_incr_style=config.weight_decay_incr_style,
        wsd_decay_steps=config.lr_wsd_decay_steps,
        lr_wsd_decay_style=config.lr_wsd_decay_style,
    )
    values = []
    for _ in range(STEPS):
        values.append((group["lr"], group["weight_decay"]))
        scheduler.step(1)
    return values


@pytest.mark.shows("runtime: learning-rate and weight-decay schedules equal Megatron's at every step")
@pytest.mark.parametrize("weight_decay", WEIGHT_DECAYS, ids=str)
@pytest.mark.parametrize("warm_up", WARM_UPS, ids=str)
@pytest.mark.parametrize("style", STYLES, ids=lambda style: "-".join(map(str, style.values())))
def test_every_style_equals_megatrons_at_every_step(
    style: dict[str, Any], warm_up: dict[str, Any], weight_decay: dict[str, Any]
) -> None:
    # Above what the inverse square root comes to before the schedule ends.
    least = {} if style["lr_decay_style"] == "constant" else {"min_lr": 1e-3}
    config = OptimizerConfig(lr=3e-3, total_training_steps=30, weight_decay=0.1, **least, **style, **warm_up, **weight_decay)
    schedule = ParameterSchedule(config)
    for expected in megatron_schedule(config):
        assert (schedule.learning_rate, schedule.weight_decay) == pytest.approx(expected, rel=1e-14, abs=0)
        schedule.step()


@pytest.mark.parametrize(
    ("style", "length"),
    [
        ("constant", {"total_training_steps": 6}),
        ("constant", {}),
        ("inverse-square-root", {"total_training_steps": 6}),
        ("inverse-square-root", {"lr_decay_steps": 4}),
        ("inverse-square-root", {}),
    ],
    ids=str,
)
def test_the_bridge_warms_up_for_longer_than_the_rate_decays_as_the_native_runtime_does(
    style: Literal["constant", "inverse-square-root"], length: dict[str, int]
) -> None:
    installed.import_megatron()
    from rl_backend.runtime.bridge.engine.optimizer import _scheduler

    least = 0.0 if style == "constant" else 1e-3
    config = OptimizerConfig(lr=3e-3, min_lr=least, lr_warmup_steps=6, lr_decay_style=style, **length)
    group: dict[str, float] = {}
    scheduler, schedule = _scheduler(SimpleNamespace(param_groups=[group]), config), ParameterSchedule(config)
    for _ in range(STEPS):
        assert (group["lr"], group["weight_decay"]) == pytest.approx(
            (schedule.learning_rate, schedule.weight_decay), rel=1e-14, abs=0
        )
        scheduler.step(1)
        schedule.step()


def test_an_own_number_of_decay_steps_takes_precedence_over_the_training_steps() -> None:
    config = OptimizerConfig(lr=1.0, lr_decay_style="linear", lr_decay_steps=10, total_training_steps=100)
    schedule = ParameterSchedule(config)
    rates = [schedule.step() for _ in range(12)]
    assert rates[4] == pytest.approx(0.5)
    assert rates[9:] == [0.0, 0.0, 0.0]


def test_without_known_length_the_rate_can_be_constant_or_fall_with_the_root() -> None:
    constant = ParameterSchedule(OptimizerConfig(lr=0.5))
    assert [constant.step() for _ in range(3)] == [0.5] * 3
    falling = ParameterSchedule(OptimizerConfig(lr=0.5, lr_decay_style="inverse-square-root"))
    assert [falling.step() for _ in range(4)][3] == pytest.approx(0.25)
    bounded = ParameterSchedule(OptimizerConfig(lr=1.0, min_lr=0.5, lr_decay_style="inverse-square-root"))
    assert [bounded.step() for _ in range(10)] == pytest.approx([1.0, 0.5**0.5, 3**-0.5, *[0.5] * 7])
    with pytest.raises(ConfigError, match="lr_decay_style='cosine'"):
        OptimizerConfig(lr_decay_style="cosine")


def test_values_of_a_step_are_taken_back_after_an_error_too() -> None:
    before: list[dict[str, Any]] = [
        {"lr": 0.5, "weight_decay": 0.2, "wd_mult": 1.0, "betas": (0.9, 0.99), "params": ["a"]},
        {"lr": 0.25, "weight_decay": 0.0, "wd_mult": 0.0, "betas": (0.9, 0.99), "params": ["b"]},
        {"lr": 0.125, "wd_mult": 0.5, "params": ["c"]},
    ]
    groups = [dict(group) for group in before]
    given = {"lr": 3.0, "weight_decay": 0.7, "clip_grad": 0.1}

    @values_of_step(groups, given)
    def step() -> None:
        assert [group["lr"] for group in groups] == [3.0] * 3
        assert [group.get("weight_decay") for group in groups] == [0.7, 0.0, None]
        assert not any("clip_grad" in group for group in groups) and groups[0]["betas"] == (0.9, 0.99)
        raise KeyError

    with pytest.raises(KeyError):
        step()
    assert groups == before


@pytest.mark.parametrize(
    ("limit", "norm", "factor"), [(0.0, 9.0, 1.0), (2.0, 1.0, 1.0), (2.0, 8.0, 0.25), (1.0, 0.0, 1.0), (0.5, 1e30, 5e-31)]
)
def test_gradients_are_multiplied_by_what_brings_their_norm_down_to_the_limit(
    limit: float, norm: float, factor: float
) -> None:
    assert clip_factor(limit, norm) == pytest.approx(factor, rel=1e-6)
