"""Reward functions: verl's signature and TRL's, loading by name, and the scores, metrics and records of what they return."""

import inspect
import json
import math
import reprlib
import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol, SupportsFloat, TypeGuard, cast

from rl_backend.contracts import BatchError, ConfigError
from rl_backend.data.rewards.worker import module_at

type OnFailure = Literal["stop", "zero", "drop"]
"""What comes of a call that fails: the run stops, the call's score is 0, or the group of its prompt leaves the batch."""


@dataclass(frozen=True)
class RewardCall:
    """A response to be scored: the arguments of a reward function, and what some functions ask for beside these.

    Attributes:
        prompt: text or messages.
        response_ids: the response's tokens.
        columns: the row as the data set has it.
    """

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: Mapping[str, Any] | None
    prompt: Any = ""
    response_ids: Sequence[int] = ()
    columns: Mapping[str, Any] = field(default_factory=dict)

    @property
    def arguments(self) -> dict[str, Any]:
        return {
            "data_source": self.data_source,
            "solution_str": self.solution_str,
            "ground_truth": self.ground_truth,
            "extra_info": self.extra_info,
        }

    def __str__(self) -> str:
        return (
            f"prompt {_shown(self.prompt)}, response {_shown(self.solution_str)}, ground truth {_shown(self.ground_truth)}"
        )


@dataclass(frozen=True)
class Score:
    """The reward of one response.

    Attributes:
        value: the weighted sum of the functions' scores.
        numbers: name -> finite number, for metrics: what a function returned beside its score, and the score of each
            function that has a name.
        info: the same for the response's record, with what is no number too.
        failures: a message for each call that failed.
        dropped: a call failed, and the group of the response's prompt is to leave the batch.
    """

    value: float
    numbers: Mapping[str, float] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)
    failures: Sequence[str] = ()
    dropped: bool = False


def reward_metrics(scores: Sequence[Score]) -> dict[str, float]:
    """``reward/<name>``: means over the responses that have the number."""
    values: dict[str, list[float]] = {}
    for score in scores:
        for name, value in score.numbers.items():
            values.setdefault(f"reward/{name}", []).append(value)
    return {name: statistics.fmean(each) for name, each in sorted(values.items())}


def score_value(result: Any) -> float:
    """The number in what a reward function returned; raises :class:`BatchError` for none, or one not real and finite."""
    number = _finite_number(result.get("score") if isinstance(result, Mapping) else result)
    if number is None:
        raise BatchError(
            f"the reward function returned {_shown(result)}; expected a real number (one, finite, that fits in a float) "
            "or a mapping with 'score'"
        )
    return number


def beside_the_score(result: Any) -> tuple[dict[str, float], dict[str, Any]]:
    """The finite numbers that a reward function returned beside its score, and all that it did as values that JSON has."""
    numbers: dict[str, float] = {}
    info: dict[str, Any] = {}
    for key, value in result.items() if isinstance(result, Mapping) else ():
        if key != "score":
            number = _finite_number(value)
            if number is not None:
                numbers[str(key)] = number
            info[str(key)] = for_json(value) if number is None else number
    return numbers, info


def _finite_number(value: Any) -> float | None:
    try:
        number = float(value) if _is_real(value) else math.nan
    # Arrays and tensors of several numbers, and classes of the user's, raise any type.
    except Exception:  # noqa: BLE001
        return None
    return number if math.isfinite(number) else None


def _is_real(value: Any) -> TypeGuard[SupportsFloat]:
    # float() of a complex number of numpy or torch is its real part.
    return isinstance(value, SupportsFloat) and "complex" not in str(getattr(value, "dtype", ""))


def for_json(value: Any) -> Any:
    """``value`` for a record: what JSON has no form for, such as a date, becomes a short text of Python's."""
    try:
        return json.loads(json.dumps(value, default=_in_python))
    except (TypeError, ValueError, RecursionError):
        return _shown(value)


def _in_python(value: Any) -> Any:
    return value.item() if getattr(value, "ndim", None) == 0 else _shown(value)


class _ShortRepr(reprlib.Repr):
    """Short texts of any value; Python refuses to write whole numbers of more than 4300 digits."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 200

    def repr_int(self, x: int, level: int) -> str:
        bits = x.bit_length()
        return f"<int of {bits} bits>" if bits > _MOST_BITS else super().repr_int(x, level)


_MOST_BITS = 1024
"""No whole number of more bits fits in a float."""
_shown = _ShortRepr().repr


class RewardFunction(Protocol):
    """verl's ``compute_score``: called with keywords; returns a number, or a mapping with a number under ``score``.

    It may be asynchronous (``async def``). One that has a parameter ``prompt`` is given the prompt too, which verl does not.
    """

    def __call__(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
    ) -> float | Mapping[str, Any] | Awaitable[float | Mapping[str, Any]]: ...


class BatchRewardFunction(Protocol):
    """A reward function of TRL, told by its parameter ``completions``: called once with all responses of a batch.

    It is given those of ``prompts``, ``completions``, ``completion_ids`` and the data set's columns that it takes, each a
    list with an entry per response; where prompts are messages, a completion is a list of one message. It returns a list of
    numbers, None where a response is not its to judge. It may be asynchronous.
    """

    def __call__(
        self, *, completions: list[Any], **columns: list[Any]
    ) -> Sequence[float | None] | Awaitable[Sequence[float | None]]: ...


VERLS_SIGNATURE = "(data_source, solution_str, ground_truth, extra_info=None)"
TRLS_SIGNATURE = "(prompts, completions, completion_ids, **columns)"
_NOT_GIVEN = ("prompt", "completion")
_GIVEN_TO_ALL = ("prompts", "completions", "completion_ids")
_OF_TRLS_TRAINER = ("trainer_state", "log_extra", "log_metric", "environments")


@dataclass(frozen=True)
class LoadedReward:
    """A function of a run's reward.

    Attributes:
        spec: as :func:`load_reward` takes it; another process finds the function by it.
        name: begins the names of its metrics; empty for the only function of a run.
        weight: of its score in the reward.
    """

    function: RewardFunction | BatchRewardFunction
    spec: str
    name: str = ""
    weight: float = 1.0

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(
            getattr(self.function, "__call__", None)  # noqa: B004, objects with an asynchronous __call__
        )

    @cached_property
    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.function).parameters

    @cached_property
    def is_batched(self) -> bool:
        """Whether it is a :class:`BatchRewardFunction`."""
        return "completions" in self._parameters

    @property
    def needs_ground_truth(self) -> bool:
        """Whether rows need an answer: the function's ``ground_truth`` has no default."""
        return not self.is_batched and "ground_truth" in _required(self._parameters)

    @property
    def columns(self) -> list[str]:
        """Of the data set, that rows need: parameters of a batched function without a default."""
        return [name for name in _required(self._parameters) if name not in _GIVEN_TO_ALL] if self.is_batched else []

    @cached_property
    def takes_prompt(self) -> bool:
        return "prompt" in self._parameters

    def keywords(self, calls: Sequence[RewardCall]) -> dict[str, Any]:
        """What it is called with for these responses: one, unless it is batched."""
        # Copies, because the function may change them, and others are called with the same.
        if self.is_batched:
            return deepcopy(self._lists(calls))
        (call,) = calls
        return deepcopy(call.arguments | ({"prompt": call.prompt} if self.takes_prompt else {}))

    def _lists(self, calls: Sequence[RewardCall]) -> dict[str, list[Any]]:
        # A column that only some rows of a file have is None in the others, as in the datasets library.
        names = dict.fromkeys(name for call in calls for name in call.columns if name not in _NOT_GIVEN)
        lists = {name: [call.columns.get(name) for call in calls] for name in names}
        lists |= {
            "prompts": [call.prompt for call in calls],
            "completions": [
                call.solution_str if isinstance(call.prompt, str) else [{"role": "assistant", "content": call.solution_str}]
                for call in calls
            ],
            "completion_ids": [list(call.response_ids) for call in calls],
        }
        takes_any = any(each.kind is each.VAR_KEYWORD for each in self._parameters.values())
        return lists if takes_any else {name: each for name, each in lists.items() if name in self._parameters}

    def __str__(self) -> str:
        return f"reward {self.name!r} ({self.spec})" if self.name else f"reward {self.spec}"


def load_reward(spec: str, *, field: str = "reward function", name: str = "", weight: float = 1.0) -> LoadedReward:
    """Imports a reward function of verl's signature or of TRL's.

    Raises:
        ConfigError: it cannot be loaded, has neither signature, or needs what only TRL's trainer has.
    """
    function = load_callable(spec, field=field)
    given: dict[str, Any] = {"data_source": "", "solution_str": "", "ground_truth": "", "extra_info": None}
    try:
        signature = inspect.signature(function)
        parameters = signature.parameters
        if "completions" in parameters:
            given = {each: [] for each in (*_required(parameters), "completions")}
        elif "prompt" in parameters:
            given["prompt"] = ""
        signature.bind(**given)
    except (TypeError, ValueError) as error:
        problem = f"must take verl's {VERLS_SIGNATURE} or TRL's {TRLS_SIGNATURE}: {error}"
        raise ConfigError.of(field, spec, problem) from None
    if "completions" in parameters and (asked := [each for each in (*_NOT_GIVEN, *_OF_TRLS_TRAINER) if each in given]):
        problem = f"takes {', '.join(asked)}; a run gives {', '.join(_GIVEN_TO_ALL)} and the data set's other columns"
        raise ConfigError.of(field, spec, f"{problem}: take these, or give a default")
    return LoadedReward(cast(RewardFunction, function), spec, name, weight)


def _required(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    open_ended = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [name for name, each in parameters.items() if each.default is each.empty and each.kind not in open_ended]


def load_callable(spec: str, *, field: str) -> Callable[..., Any]:
    """Imports what a user names with the option ``field``: ``package.module:function`` or ``path/to/file.py:function``.

    A function of a file is known under a module name that other processes do not have: send them ``spec``, not the function.
    """
    location, separator, name = spec.rpartition(":")
    if not (separator and location and name):
        raise ConfigError.of(field, spec, "expected package.module:function or path/to/file.py:function")
    is_file = location.endswith(".py")
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
    functions = [
        name for name, each in vars(module).items() if inspect.isfunction(each) and each.__module__ == module.__name__
    ]
    return f"; it has {', '.join(functions)}" if functions else ""
