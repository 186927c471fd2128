"""Limits of sense: what a step's metrics may come to before a run warns, or stops."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from rl_backend.contracts import MAY_CHANGE, BaseConfig


class HealthLimits(BaseConfig):
    """Limits of a step; none watches for nothing.

    Attributes:
        log_prob_gap: mean difference between trainer and engine, in nats per token.
        kl: mean of the metric kl, to the reference.
        skipped_updates: steps in a row of which every update was skipped.
        failed_rewards: share of a step's rewards, or episodes, that failed.
        free_disk_gib: least GiB that are free where the run folder is.
        on_limit: warn once, or stop: the run ends with an error after the step that is beyond a limit.
    """

    model_config = ConfigDict(allow_inf_nan=False)

    log_prob_gap: Annotated[float | None, MAY_CHANGE] = Field(default=1.0, gt=0)
    kl: Annotated[float | None, MAY_CHANGE] = Field(default=None, gt=0)
    skipped_updates: Annotated[int | None, MAY_CHANGE] = Field(default=5, ge=1)
    failed_rewards: Annotated[float | None, MAY_CHANGE] = Field(default=0.5, gt=0, lt=1)
    free_disk_gib: Annotated[float | None, MAY_CHANGE] = Field(default=1.0, gt=0)
    on_limit: Annotated[Literal["warn", "stop"], MAY_CHANGE] = "warn"
