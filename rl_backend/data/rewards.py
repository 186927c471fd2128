"""Reward functions, with verl's signature."""

import hashlib
import importlib
import importlib.util
import inspect
import math
import reprlib
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, SupportsFloat, cast

from rl_backend.contracts import BatchError, ConfigError


class RewardFunction(Protocol):
    """verl's ``compute_score``: called with keywords; returns a number, or a mapping with a number under ``score``."""

    def __call__(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
    ) -> float | Mapping[str, Any]: ...


def load_reward_function(spec: str) -> RewardFunction:
    """Imports a reward function and checks that it can be called as verl calls it.

    Args:
        spec: ``package.module:function``, or ``path/to/file.py:function``. A function of a file is known under a module
            name that other processes do not have: send them ``spec``, not the function.

    Raises:
        ConfigError: the spec, the module or the function does not exist, importing fails, or the function does not take
            the four arguments, or is a coroutine.
    """
    location, separator, name = spec.rpartition(":")
    if not (separator and location and name):
        raise ConfigError.of("reward function", spec, "expected package.module:function or path/to/file.py:function")
    module = _load_file(spec, Path(location)) if location.endswith(".py") else _import_module(spec, location)
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError.of("reward function", spec, f"{location} has no function {name!r}")
    if inspect.iscoroutinefunction(function):
        raise ConfigError.of("reward function", spec, "is a coroutine; give a plain function that returns the score")
    try:
        inspect.signature(function).bind(data_source="", solution_str="", ground_truth="", extra_info=None)
    except (TypeError, ValueError) as error:
        raise ConfigError.of(
            "reward function", spec, f"must take (data_source, solution_str, ground_truth, extra_info=None): {error}"
        ) from None
    return cast(RewardFunction, function)


def needs_ground_truth(function: RewardFunction) -> bool:
    """Whether rows need an answer: the function's ``ground_truth`` has no default. Else it gets None of rows without."""
    parameter = inspect.signature(function).parameters.get("ground_truth")
    return parameter is not None and parameter.default is parameter.empty


def score_value(result: float | Mapping[str, Any]) -> float:
    """The number in what a reward function returned; raises :class:`BatchError` for none, or one not real and finite."""
    score = result.get("score") if isinstance(result, Mapping) else result
    # float() of a complex number of numpy or torch is its real part.
    if not isinstance(score, SupportsFloat) or "complex" in str(getattr(score, "dtype", "")):
        raise BatchError(f"the reward function returned {_shown(result)}; expected a real number or a mapping with 'score'")
    try:
        number = float(score)
    except OverflowError:
        number = math.inf
    except Exception as error:  # arrays and tensors of several numbers, and classes of the user's, raise any type
        kind = type(score).__name__
        raise BatchError(
            f"the reward function returned {_shown(result)}, a {kind}, which is not one number: {error}"
        ) from error
    if not math.isfinite(number):
        raise BatchError(f"the reward function returned {_shown(result)}; a score must be finite and fit in a float")
    return number


class _ShortRepr(reprlib.Repr):
    """Short texts of any value; Python refuses to write whole numbers of more than 4300 digits."""

    def repr_int(self, x: int, level: int) -> str:
        bits = x.bit_length()
        return f"<int of {bits} bits>" if bits > _MOST_BITS else super().repr_int(x, level)


_MOST_BITS = 1024
"""No whole number of more bits fits in a float."""
_shown = _ShortRepr().repr


def _import_module(spec: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise ConfigError.of("reward function", spec, f"cannot import {name}: {type(error).__name__}: {error}") from error


def _load_file(spec: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError.of("reward function", spec, f"no such file: {path}")
    path = path.resolve()
    name = f"reward_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    module_spec = importlib.util.spec_from_file_location(name, path)
    if module_spec is None or module_spec.loader is None:
        raise ConfigError.of("reward function", spec, f"{path} is not a Python file")
    module = importlib.util.module_from_spec(module_spec)
    # Dataclasses and pickle look their module up here while the file runs.
    sys.modules[name] = module
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError.of("reward function", spec, f"{path} failed: {type(error).__name__}: {error}") from error
    return module
