"""Calls of engines, and what comes of them: samples, results, errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from itertools import chain, count
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from actors.cluster.ray_watch import memory_death
from actors.rollout.messages import EngineInfo, Response, Routes, Sample, prompt_problem
from rl_backend.contracts import BatchError, EngineDeadError, RLBackendError, RolloutError


def check_prompts(prompts: Sequence[Sequence[int]], samples: int, seeds: Sequence[int] | None, info: EngineInfo) -> None:
    for index, prompt in enumerate(prompts):
        if problem := prompt_problem(prompt, info.max_model_len, info.vocab_size):
            raise BatchError(f"prompt {index} {problem}", prompt=index)
    if seeds is not None and len(seeds) != len(prompts) * samples:
        raise BatchError(
            f"{len(seeds)} seeds for {len(prompts)} prompts with n={samples}; expected {len(prompts) * samples}"
        )


def outcome_of(reference: Any, engine: str) -> Any:
    """The result of a finished call; or, returned and not raised, the error that it ended with."""
    try:
        return ray.get(reference, timeout=0)
    except RayActorError as error:
        return EngineDeadError(f"{engine} is dead: its process ended ({_reason(error)}); restart it", engine=engine)
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, RLBackendError):
            return cause
        return RolloutError(f"{engine} failed with {type(cause).__name__}: {cause}\n{error}", engine=engine)
    except RayError as error:
        if memory := memory_death(error):
            return EngineDeadError(f"{engine} is dead: {memory}", engine=engine)
        return EngineDeadError(f"{engine} is dead: {type(error).__name__}: {_reason(error)}; restart it", engine=engine)


def collect(calls: Mapping[int, Any], names: Mapping[int, str], timeout: float) -> dict[int, Any]:
    """Waits until every call has ended; each one's outcome. An engine that has not answered for ``timeout`` s counts as
    dead.
    """
    done, _ = ray.wait(list(calls.values()), num_returns=len(calls), timeout=timeout) if calls else ([], [])
    ended = set(done)
    return {
        engine: outcome_of(reference, names[engine])
        if reference in ended
        else EngineDeadError(f"{names[engine]} did not answer for {timeout:g} s; restart it", engine=names[engine])
        for engine, reference in calls.items()
    }


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    # Of an actor that could not be made, Ray's text ends with the error that it raised.
    return lines[-1] if "creation task" in lines[0] else lines[0]


class PendingSamples:
    """Samples in the making; ``answers`` has those of each prompt."""

    def __init__(self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[Future[Response]]]) -> None:
        self._prompts, self._answers = prompts, answers
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether :meth:`result` has something to return, or to raise, at once."""
        answers = list(chain.from_iterable(self._answers))
        return self._error is not None or all(each.done() for each in answers) or _first_error(answers) is not None

    def when_answered(self, call: Callable[[], None]) -> None:
        """Calls it once for each prompt whose samples have all been made or have failed; in any thread."""

        def answered(left: count[int]) -> None:
            if next(left) == 0:
                call()

        for of_prompt in self._answers:
            left = count(1 - len(of_prompt))
            for answer in of_prompt:
                answer.add_done_callback(lambda _, left=left: answered(left))  # type: ignore[misc]

    def cancel(self) -> None:
        """Gives up what has not been answered, so that no push waits for it."""
        for answer in chain.from_iterable(self._answers):
            answer.cancel()

    def result(self, timeout: float | None = None) -> list[Sample]:
        """The samples, in the caller's order; raises what ``RolloutGroup.generate`` raises, as soon as it is known."""
        answers = list(chain.from_iterable(self._answers))
        _, waiting = wait(answers, timeout, FIRST_EXCEPTION) if self._error is None else ((), ())
        self._error = self._error or _first_error(answers)
        if self._error is not None:
            self.cancel()
            raise self._error
        if waiting:
            raise TimeoutError(f"{len(waiting)} of {len(answers)} samples have not been answered for {timeout:g} s")
        return [
            _sample(prompt, index, self._prompts[prompt], answer.result())
            for prompt, of_prompt in enumerate(self._answers)
            for index, answer in enumerate(of_prompt)
        ]


def _first_error(answers: Sequence[Future[Response]]) -> BaseException | None:
    return next((each.exception() for each in answers if each.done() and each.exception() is not None), None)


def _sample(prompt: int, index: int, prompt_ids: Sequence[int], response: Response) -> Sample:
    return Sample(
        prompt_index=prompt,
        sample_index=index,
        prompt_ids=list(prompt_ids),
        response_ids=response.token_ids,
        log_probs=response.log_probs,
        finish_reason="stop" if response.finish_reason == "stop" else "length",
        version_spans=response.spans,
        engine=response.engine,
        routes=None if response.routes is None else Routes(response.routes, response.spans[0].version),
        sampling_mask=response.sampling_mask,
    )
