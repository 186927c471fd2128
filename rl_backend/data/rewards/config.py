"""Options of rewards: functions, weights, how they are called, and what a failed call counts."""

import re
from collections import Counter
from collections.abc import Callable
from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from rl_backend.contracts import MAY_CHANGE, SAME_CONTENTS, BaseConfig, ConfigError
from rl_backend.data.rewards.loading import LoadedReward, load_reward_function
from rl_backend.data.rewards.result import OnFailure
from rl_backend.data.rewards.scorer import RewardScorer


class WeightedReward(BaseConfig):
    """One of several reward functions.

    Attributes:
        function: package.module:function or path/file.py:function.
        weight: of its score in the reward; 0 only measures it.
    """

    model_config = ConfigDict(allow_inf_nan=False)

    function: str
    weight: float = 1.0


_WEIGHTED = (str, dict, WeightedReward)
_FUNCTIONS = "RewardConfig.functions"


class RewardConfig(BaseConfig):
    """Reward functions, and how they are called. See docs/rewards.md.

    Attributes:
        functions: verl-style compute_score as package.module:function or path/file.py:function, plain or async; or several,
            whose scores are added: a list, or NAME=FUNCTION, or name -> function and weight.
        timeout_seconds: longest time of one call; none: endless.
        workers: calls of plain functions at once, in threads; 1 without a limit of time: in the main thread.
        processes: call plain functions in processes, which a time limit ends and which share no memory.
        concurrency: calls of async functions at once; none: 64.
        on_failure: when a call raises, takes too long or returns no number: stop the run, count its score as zero, or drop
            the group of its prompt from the batch.
    """

    model_config = ConfigDict(allow_inf_nan=False)

    functions: Annotated[str | dict[str, WeightedReward], SAME_CONTENTS]
    timeout_seconds: Annotated[float | None, MAY_CHANGE] = Field(default=None, gt=0)
    workers: Annotated[int, MAY_CHANGE] = Field(default=1, ge=1)
    processes: Annotated[bool, MAY_CHANGE] = False
    concurrency: Annotated[int | None, MAY_CHANGE] = Field(default=None, ge=1)
    on_failure: OnFailure = "stop"

    @field_validator("functions", mode="before")
    @classmethod
    def _by_name(cls, given: Any) -> Any:
        """A list becomes names and functions; a function by itself stays one."""
        if isinstance(given, list | tuple) and len(given) > 1 and all(isinstance(each, str | dict) for each in given):
            named = [
                pair
                for each in given
                for pair in (each.items() if isinstance(each, dict) else [(each.rpartition(":")[2], each)])
            ]
            twice = [name for name, times in Counter(name for name, _ in named).items() if times > 1]
            if twice:
                first = f"{twice[0]}_1={dict(reversed(named))[twice[0]]}"
                raise ConfigError.of(_FUNCTIONS, list(given), f"two are named {twice[0]!r}; name them, such as {first}")
            given = dict(named)
        if isinstance(given, list | tuple) and len(given) == 1:
            given = given[0]
        if isinstance(given, str):
            return given
        if not (isinstance(given, dict) and given and all(isinstance(each, _WEIGHTED) for each in given.values())):
            raise ConfigError.of(
                _FUNCTIONS, given, "expected a function, several, or name -> function or {function, weight}"
            )
        for name in given:
            if not re.fullmatch(r"\w[\w.-]*", str(name)):
                raise ConfigError.of(
                    _FUNCTIONS, name, "a name has letters, digits, _, . and -, because metrics are named by it"
                )
        return {name: {"function": each} if isinstance(each, str) else each for name, each in given.items()}

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        if isinstance(self.functions, dict) and not any(each.weight for each in self.functions.values()):
            found = {name: each.weight for name, each in self.functions.items()}
            raise ConfigError.of(_FUNCTIONS, found, "needs at least one function with a weight other than 0")
        return self

    def load(self, check: Callable[[], None] = lambda: None) -> RewardScorer:
        """Imports the functions.

        Args:
            check: see :class:`RewardScorer`.

        Raises:
            ConfigError: a function that cannot be loaded, or an option without effect on these functions.
        """
        if isinstance(self.functions, str):
            rewards = [LoadedReward(load_reward_function(self.functions, field=_FUNCTIONS), self.functions)]
        else:
            rewards = [
                LoadedReward(
                    load_reward_function(each.function, field=f"{_FUNCTIONS}.{name}"), each.function, name, each.weight
                )
                for name, each in self.functions.items()
            ]
        return RewardScorer(
            rewards,
            timeout_seconds=self.timeout_seconds,
            workers=self.workers,
            processes=self.processes,
            concurrency=self.concurrency,
            on_failure=self.on_failure,
            check=check,
        )
