"""Reward functions, loaded by name."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, cast

from rl_backend.contracts import ConfigError
from rl_backend.data.rewards.result import RewardCall
from rl_backend.data.rewards.worker import module_at


class RewardFunction(Protocol):
    """verl's ``compute_score``: called with keywords; returns a number, or a mapping with a number under ``score``.

    It may be asynchronous (``async def``). One that has a parameter ``prompt`` is given the prompt too, which verl does not.
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

    @cached_property
    def takes_prompt(self) -> bool:
        """Whether the function has a parameter ``prompt``."""
        return "prompt" in inspect.signature(self.function).parameters

    def keywords(self, call: RewardCall) -> dict[str, Any]:
        """What the function is called with: copies, because it may change them, and others are called with the same."""
        return deepcopy(call.arguments | ({"prompt": call.prompt} if self.takes_prompt else {}))

    def __str__(self) -> str:
        return f"reward {self.name!r} ({self.spec})" if self.name else f"reward {self.spec}"


def load_reward_function(spec: str, *, field: str = "reward function") -> RewardFunction:
    """Imports a reward function and checks that it can be called as verl calls it.

    Args:
        spec, field: see :func:`load_callable`.

    Raises:
        ConfigError: it cannot be loaded, or does not take the four arguments.
    """
    function = load_callable(spec, field=field)
    given = {"data_source": "", "solution_str": "", "ground_truth": "", "extra_info": None}
    try:
        signature = inspect.signature(function)
        signature.bind(**given, **({"prompt": ""} if "prompt" in signature.parameters else {}))
    except (TypeError, ValueError) as error:
        raise ConfigError.of(
            field, spec, f"must take (data_source, solution_str, ground_truth, extra_info=None): {error}"
        ) from None
    return cast(RewardFunction, function)


def load_callable(spec: str, *, field: str) -> Callable[..., Any]:
    """Imports what a user names.

    Args:
        spec: ``package.module:function``, or ``path/to/file.py:function``. A function of a file is known under a module
            name that other processes do not have: send them ``spec``, not the function.
        field: the option that names it, for messages.

    Raises:
        ConfigError: the spec, the module or the function does not exist, or importing fails.
    """
    location, separator, name = spec.rpartition(":")
    if not (separator and location and name):
        raise ConfigError.of(field, spec, "expected package.module:function or path/to/file.py:function")
    is_file = location.endswith(".py")
    if is_file and not Path(location).is_file():
        raise ConfigError.of(field, spec, f"no such file: {Path(location).absolute()}; give path/to/file.py:function")
    try:
        module = module_at(location)
    except (Exception, SystemExit) as error:
        problem = f"{Path(location).resolve()} failed" if is_file else f"cannot import {location}"
        if not is_file and Path(f"{location}.py").is_file():
            problem = f"to name a file give {location}.py:{name}; {problem}"
        raise ConfigError.of(field, spec, f"{problem}: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError.of(field, spec, f"{location} has no function {name!r}{_others(module)}")
    return cast(Callable[..., Any], function)


def _others(module: ModuleType) -> str:
    """The functions that a module has of its own, for messages."""
    functions = [
        name for name, each in vars(module).items() if inspect.isfunction(each) and each.__module__ == module.__name__
    ]
    return f"; it has {', '.join(functions)}" if functions else ""
