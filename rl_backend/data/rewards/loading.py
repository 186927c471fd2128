"""Reward functions, found by their names."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from rl_backend.contracts import ConfigError
from rl_backend.data.rewards.worker import module_at


class RewardFunction(Protocol):
    """verl's ``compute_score``: called with keywords; returns a number, or a mapping with a number under ``score``.

    It may be asynchronous (``async def``).
    """

    def __call__(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
    ) -> float | Mapping[str, Any] | Awaitable[float | Mapping[str, Any]]: ...


@dataclass(frozen=True)
class LoadedReward:
    """A function of a run's reward.

    Attributes:
        function: what is called.
        spec: as :func:`load_reward_function` takes it; another process finds the function by it.
        name: begins the names of its metrics; empty for the only function of a run.
        weight: of its score in the reward.
    """

    function: RewardFunction
    spec: str
    name: str = ""
    weight: float = 1.0

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(
            getattr(self.function, "__call__", None)  # noqa: B004, objects with an asynchronous __call__
        )

    @property
    def needs_ground_truth(self) -> bool:
        """Whether rows need an answer: the function's ``ground_truth`` has no default. Else it gets None of rows without."""
        parameter = inspect.signature(self.function).parameters.get("ground_truth")
        return parameter is not None and parameter.default is parameter.empty

    def __str__(self) -> str:
        return f"reward {self.name!r} ({self.spec})" if self.name else f"reward {self.spec}"


def load_reward_function(spec: str) -> RewardFunction:
    """Imports a reward function and checks that it can be called as verl calls it.

    Args:
        spec: ``package.module:function``, or ``path/to/file.py:function``. A function of a file is known under a module
            name that other processes do not have: send them ``spec``, not the function.

    Raises:
        ConfigError: the spec, the module or the function does not exist, importing fails, or the function does not take
            the four arguments.
    """
    location, separator, name = spec.rpartition(":")
    if not (separator and location and name):
        raise ConfigError.of("reward function", spec, "expected package.module:function or path/to/file.py:function")
    is_file = location.endswith(".py")
    if is_file and not Path(location).is_file():
        raise ConfigError.of("reward function", spec, f"no such file: {location}")
    try:
        module = module_at(location)
    except (Exception, SystemExit) as error:
        problem = f"{Path(location).resolve()} failed" if is_file else f"cannot import {location}"
        raise ConfigError.of("reward function", spec, f"{problem}: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError.of("reward function", spec, f"{location} has no function {name!r}")
    try:
        inspect.signature(function).bind(data_source="", solution_str="", ground_truth="", extra_info=None)
    except (TypeError, ValueError) as error:
        raise ConfigError.of(
            "reward function", spec, f"must take (data_source, solution_str, ground_truth, extra_info=None): {error}"
        ) from None
    return cast(RewardFunction, function)
