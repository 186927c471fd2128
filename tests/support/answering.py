"""A stand-in for vLLM that answers each request in its first step, for tests of an engine around its step loop."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from actors.rollout.engine.in_process import ServingState
from actors.rollout.engine.step_loop import Completion
from actors.rollout.messages import Request


class AnsweringStepper:
    """A request of seed s is answered with the tokens s, s + 1, ... of which there are as many as its prompt has.

    Token t has log-prob -t / 8, and each row of routes the numbers of its layers beside its own.
    """

    room = 100

    def __init__(self) -> None:
        self.jobs: list[Request] = []
        self.forgotten = 0
        self._running: dict[int, Request] = {}

    def add(self, key: int, job: Request) -> None:
        self.jobs.append(job)
        self._running[key] = job

    def step(self) -> list[tuple[int, Completion]]:
        running, self._running = self._running, {}
        # From the last to the first: an engine answers in no order.
        return [(key, Completion(completion_of(job), len(job.prompt_ids) - 1)) for key, job in running.items()][::-1]

    def give_up(self, key: int) -> Completion:
        return Completion(completion_of(self._running.pop(key)), 0)

    def sampled(self, key: int) -> int:
        return 0

    def forget(self) -> None:
        self.forgotten += 1


def completion_of(job: Request, layers: int = 3) -> Any:
    """vLLM's ``CompletionOutput`` for a request."""
    prompt, seed = len(job.prompt_ids), job.seed or 0
    tokens = [seed + place for place in range(prompt)]
    rows = np.arange(2 * prompt - 1, dtype=np.uint8)[:, None] * 10 + np.arange(layers, dtype=np.uint8)
    return SimpleNamespace(
        token_ids=tuple(tokens),
        # Behind each sampled token is another one, which nobody asks for.
        logprobs=SimpleNamespace(
            logprobs=[value for token in tokens for value in (-token / 8, -99.0)],
            start_indices=[2 * n for n in range(prompt)],
        ),
        finish_reason="stop" if seed % 2 else "length",
        routed_experts=rows[:, :, None],
        # Another word below each token.
        sampling_mask=SimpleNamespace(token_ids=[[token, 0] for token in tokens]),
    )


def serve(serving: ServingState, version: int) -> None:
    """An engine has had a push."""
    serving.pause()
    serving.finish(version)
    serving.resume()


class Llm:
    """``vllm.LLM`` as far as an engine calls it: keeps what it is told, and raises what it is given to raise."""

    def __init__(self, *, vocab_size: int = 50, max_model_len: int = 16) -> None:
        self.model_config = SimpleNamespace(get_vocab_size=lambda: vocab_size, max_model_len=max_model_len)
        self.told: list[Any] = []
        self.errors: dict[str, Exception] = {}
        self.answers: dict[str, Any] = {}
        self.cache_is_emptied = True
        self.llm_engine = SimpleNamespace(add_lora=self._teller("add_lora"), remove_lora=self._teller("remove_lora"))

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> Any:
        self._tell((method, *args))
        return self.answers.get(method, [""])

    def reset_prefix_cache(self) -> bool:
        self._tell("reset_prefix_cache")
        return self.cache_is_emptied

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._teller(name)

    def _teller(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: self._tell((name, *args, *([kwargs] if kwargs else [])))

    def _tell(self, what: Any) -> None:
        self.told.append(what)
        name = what if isinstance(what, str) else what[0]
        if name in self.errors:
            raise self.errors[name]
