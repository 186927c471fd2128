"""Learning-rate schedules: lengths that follow from a run's, and boundaries of what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from rl_backend.contracts import ConfigError, OptimizerConfig


@pytest.mark.parametrize(
    ("fields", "warmup", "decay"),
    [
        ({}, 0, None),
        ({"total_training_steps": 7}, 0, 7),
        ({"total_training_steps": 0}, 0, None),
        ({"lr_warmup_steps": 0, "total_training_steps": 9}, 0, 9),
        ({"lr_warmup_steps": 4}, 4, None),
        ({"lr_warmup_steps_ratio": 0.25, "total_training_steps": 11}, 2, 11),
        ({"lr_decay_style": "cosine", "lr_decay_steps": 5, "total_training_steps": 9}, 0, 5),
        ({"lr_decay_style": "linear", "lr_decay_steps": 12, "lr_warmup_steps": 11}, 11, 12),
        ({"lr_decay_style": "inverse-square-root", "lr_warmup_steps": 3}, 3, None),
    ],
)
def test_lengths_of_warm_up_and_decay(fields: dict[str, Any], warmup: int, decay: int | None) -> None:
    config = OptimizerConfig(**fields)
    assert (config.warmup_steps, config.decay_steps) == (warmup, decay)


LINEAR = {"lr_decay_style": "linear", "lr_decay_steps": 8}
WSD = {"lr_decay_style": "WSD", "lr_decay_steps": 8}
GROWS = {"weight_decay_incr_style": "cosine", "total_training_steps": 9}


@pytest.mark.parametrize(
    "fields",
    [
        {"betas": (0.0, 0.0)},
        {"lr": 1e-3, "min_lr": 1e-3, **LINEAR},
        {"lr": 1e-3, "lr_warmup_init": 1e-3, "lr_warmup_steps": 1},
        {**LINEAR, "lr_warmup_steps": 7},
        {"lr_decay_style": "inverse-square-root", "min_lr": 1e-4},
        {**WSD, "lr_wsd_decay_steps": 8},
        {**WSD, "lr_wsd_decay_steps": 0, "lr_wsd_decay_style": "minus_sqrt"},
        {**GROWS, "weight_decay": 0.1, "weight_decay_start": 0.1},
        {**GROWS, "weight_decay": 0.1, "weight_decay_start": 0.0},
        {"weight_decay": 0.1, "weight_decay_start": 0.1},
        {"lr_warmup_steps": 3, "lr_warmup_steps_ratio": 0.0},
        {"clip_grad": 0.0, "lr": 0.0, "weight_decay": 0.0},
    ],
)
def test_options_at_their_bounds_are_taken(fields: dict[str, Any]) -> None:
    OptimizerConfig(**fields)


def test_a_decay_of_unknown_length_is_one_mistake() -> None:
    with pytest.raises(ConfigError) as raised:
        OptimizerConfig(lr_decay_style="WSD", lr_wsd_decay_steps=1)
    assert "needs lr_decay_steps" in str(raised.value) and "must not exceed" not in str(raised.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"betas": (1.0, 0.9)}, "betas=(1.0, 0.9): each must be in [0, 1)"),
        ({"betas": (-0.1, 0.9)}, "betas=(-0.1, 0.9): each must be in [0, 1)"),
        ({**LINEAR, "lr_warmup_steps": 8}, "lr_warmup_steps=8: must be less than lr_decay_steps=8"),
        ({**WSD, "lr_wsd_decay_steps": 2, "lr_warmup_steps": 9}, "lr_warmup_steps=9: must be less than lr_decay_steps=8"),
        ({**WSD, "lr_wsd_decay_steps": 9}, "lr_wsd_decay_steps=9: must not exceed lr_decay_steps=8"),
        (WSD, "lr_wsd_decay_steps=None: lr_decay_style='WSD' needs it"),
        ({"lr_decay_style": "WSD", "lr_wsd_decay_steps": 1}, "lr_decay_style='WSD': needs lr_decay_steps or total_training"),
        (
            {"weight_decay": 0.1, "weight_decay_start": 0.05},
            "weight_decay_start=0.05: weight_decay_incr_style='constant' keeps weight_decay=0.1; leave it None or set",
        ),
        (
            {**GROWS, "weight_decay": 0.1, "weight_decay_start": 0.2},
            "weight_decay_start=0.2: must not exceed weight_decay=",
        ),
        ({"weight_decay_incr_style": "cosine"}, "weight_decay_incr_style='cosine': needs total_training_steps"),
        ({"lr_warmup_steps_ratio": 0.1, "total_training_steps": 0}, "lr_warmup_steps_ratio=0.1: needs total_training_steps"),
        ({"min_lr": 1e-4}, "min_lr=0.0001: lr_decay_style='constant' never decays; set the style"),
        ({**LINEAR, "lr_wsd_decay_steps": 1}, "lr_wsd_decay_steps=1: lr_decay_style='linear' does not read it; use WSD"),
        ({"lr_warmup_init": 1e-4}, "lr_warmup_init=0.0001: there is no warm-up to begin with it; set lr_warmup_steps or"),
        ({"lr_warmup_steps": 0, "lr_warmup_steps_ratio": 0.1}, "lr_warmup_steps_ratio=0.1: lr_warmup_steps=0 decides; give"),
    ],
)
def test_options_that_cannot_work_are_refused_with_what_to_do(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        OptimizerConfig(**fields)
    assert str(refused.value).startswith(f"OptimizerConfig.{message}")
