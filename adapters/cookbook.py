"""tinker-cookbook's environments as players of episodes. Nothing of tinker-cookbook is imported: yours brings it."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rl_backend.contracts import BatchError, ConfigError, EpisodeEndError
from rl_backend.data.rewards.worker_pool import TimeLimitError
from rl_backend.environment.playing import ended_by
from rl_backend.environment.protocol import Result, Sampler, Stop
from rl_backend.environment.user_code import Caller

# The metric with which a cookbook environment leaves a turn out of training.
MASKED = "parse_error_masked"
_STOP = "stop/"
STOPS: Mapping[str, Stop] = {
    "completed": "done",
    "tool_stopped": "done",
    "max_turns": "turns",
    "max_tokens": "length",
    "max_sampled_tokens": "tokens",
    "max_tool_calls": "tool_calls",
    "context_overflow": "context",
    "parse_error": "parse",
    "rollout_timeout": "timeout",
}
"""Cookbook's reasons, which its environments give as metrics ``stop/<reason>``, and those of an episode."""


class CookbookEnv(Protocol):
    """What is asked of an environment: of ``tinker_cookbook.rl.types.Env``."""

    async def initial_observation(self) -> Any:
        """An observation and its stop condition; or, of a prompt that is too long, an object with reward and metrics."""

    async def step(self, action: list[int], *, extra: Any = None) -> Any:
        """``StepResult``: reward, episode_done, next_observation, next_stop_condition, metrics."""


class MakeCookbookEnv(Protocol):
    def __call__(self, row: Mapping[str, Any], seed: int) -> CookbookEnv: ...


class CookbookPlayer:
    """A :class:`~rl_backend.environment.protocol.Player` of cookbook environments.

    An observation that begins with all ids so far extends the segment; any other begins another, which depends on the
    renderer. ``EnvGroupBuilder`` is not played: give its environments one by one, and a group's rewards as ``score``.

    Args:
        make: makes the environment of an episode; plain or asynchronous.
        tokenizer: of the model, for stop conditions that are texts.
        step_seconds: limit of a step; None is endless.
    """

    def __init__(self, make: MakeCookbookEnv, tokenizer: Any, *, step_seconds: float | None = None) -> None:
        self._make = make
        self._tokenizer = tokenizer
        self._seconds = step_seconds
        self._caller = Caller()

    async def __call__(self, row: Mapping[str, Any], sampler: Sampler) -> Result:
        env = await self._call(self._make, row, sampler.seed)
        first = await self._call(env.initial_observation)
        if not isinstance(first, tuple):
            return Result(float(first.reward), _numbers(first.metrics), _stop(first.metrics))
        metrics: dict[str, float] = {}
        try:
            return await self._turns(env, first, sampler, metrics)
        except (EpisodeEndError, TimeLimitError) as end:
            return ended_by(end, metrics)

    async def _turns(self, env: CookbookEnv, first: tuple[Any, Any], sampler: Sampler, metrics: dict[str, float]) -> Result:
        # The metrics are the caller's, because an episode that ends early keeps those of its steps.
        observation, condition = first
        while True:
            turn = await sampler.sample(observation.to_ints(), stop_token_ids=self._stop_ids(condition))
            step = await self._call(_step, env, list(turn.token_ids), turn.finish)
            sampler.reward(float(step.reward))
            if step.metrics.get(MASKED):
                sampler.leave_out()
            for name, value in _numbers(step.metrics).items():
                metrics[name] = metrics.get(name, 0.0) + value
            if step.episode_done:
                return Result(metrics=metrics, stop=_stop(step.metrics))
            observation, condition = step.next_observation, step.next_stop_condition
            if not observation.to_ints():
                raise BatchError("the environment goes on with an empty observation; have it end the episode")

    async def _call(self, function: Any, *arguments: Any) -> Any:
        return await self._caller(function, *arguments, seconds=self._seconds)

    def _stop_ids(self, condition: Sequence[int] | Sequence[str]) -> list[int]:
        token_ids = []
        for each in condition:
            encoded = [each] if isinstance(each, int) else self._tokenizer.encode(each, add_special_tokens=False)
            # Engines look at ids: an end of several tokens would have to be looked for in the text of what they sample.
            if len(encoded) != 1:
                raise ConfigError.of(
                    "stop condition",
                    each,
                    f"is {len(encoded)} tokens; only an end of one token can be used: take a renderer whose turns end "
                    "with a special token, such as qwen3 or llama3",
                )
            token_ids.append(int(encoded[0]))
        return token_ids


async def _step(env: CookbookEnv, action: list[int], finish: str) -> Any:
    return await env.step(action, extra={"stop_reason": finish})


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {str(name): float(value) for name, value in metrics.items()}


def _stop(metrics: Mapping[str, Any]) -> Stop:
    found = [name.removeprefix(_STOP) for name, value in metrics.items() if name.startswith(_STOP) and value]
    return STOPS.get(found[0], "done") if found else "done"
