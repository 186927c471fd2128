"""Turns of episodes in an engine: they come one by one, and each is answered when it has ended."""

from __future__ import annotations

import queue
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from functools import partial

from actors.cluster import prometheus
from actors.rollout.engine.in_process import VllmInProcess
from actors.rollout.engine.step_loop import Finished, Job
from actors.rollout.messages import Response, TurnAnswer, TurnRequest
from actors.rollout.sample import ExpertIds, pack_routes
from rl_backend.contracts import RLBackendError, RolloutError

CONCURRENCY_GROUPS = {"turns": 1, "answers": 1}
"""Of an engine's actor: turns come in, and answers are waited for, while a call that samples or a push is served."""
_MOST_ANSWERS = 256


class TurnQueue:
    """Turns that are asked for and those that have ended, beside calls of
    :meth:`~actors.rollout.engine.engine.RolloutEngine.generate` in the same step loop.

    Args:
        vllm: samples them.
    """

    def __init__(self, vllm: VllmInProcess) -> None:
        self._vllm = vllm
        self._answers: queue.SimpleQueue[tuple[int, TurnAnswer | RLBackendError]] = queue.SimpleQueue()
        self._keys: dict[int, int] = {}
        """The asking process's key -> the loop's, of turns that are not answered."""

    def start(self, turns: Sequence[TurnRequest]) -> None:
        """Asks for turns. An error of one turn is its answer and affects no other."""
        pausable = self._vllm.config.turns_at_push == "pause"
        jobs = [
            Job(turn.request, turn.sampling, turn.adapter, turn.require_version, pausable and turn.adapter is None)
            for turn in turns
        ]
        for turn, (key, result) in zip(turns, self._vllm.loop.submit(jobs).items(), strict=True):
            self._keys[turn.key] = key
            result.add_done_callback(partial(self._answer, turn))

    def give_up(self, keys: Iterable[int]) -> None:
        """Ends turns: each is answered with what there is of it. Those that are answered already are passed over."""
        # Looked up once: the loop's thread takes a key out when its turn is answered.
        self._vllm.loop.give_up([found for key in keys if (found := self._keys.get(key)) is not None])

    def take(self, seconds: float) -> list[tuple[int, TurnAnswer | RLBackendError]]:
        """Key and answer, or error, of turns that have ended; waits for the first. None within ``seconds``: empty."""
        answers = []
        try:
            answers.append(self._answers.get(timeout=seconds))
            while len(answers) < _MOST_ANSWERS:
                answers.append(self._answers.get_nowait())
        except queue.Empty:
            pass
        return answers

    def _answer(self, turn: TurnRequest, result: Future[Finished]) -> None:
        del self._keys[turn.key]
        answer: TurnAnswer | RLBackendError
        try:
            answer = self._answer_of(turn, result.result())
        except RLBackendError as error:
            answer = error
        except Exception as error:  # noqa: BLE001 vLLM raises errors of any type
            answer = RolloutError(f"{self._vllm.name} failed with {type(error).__name__}: {error}", engine=self._vllm.name)
        self._answers.put((turn.key, answer))

    def _answer_of(self, turn: TurnRequest, finished: Finished) -> TurnAnswer:
        output, cached = finished.completion
        if output is None:
            return TurnAnswer([], [], "abort", (), 0, None)
        response = Response.of(output, self._vllm.name)
        engine, prompt = str(self._vllm.number), turn.request.prompt_ids
        prometheus.count("rl_backend_rollout_responses_total", 1, engine=engine)
        prometheus.count("rl_backend_rollout_tokens_total", len(response.token_ids), engine=engine)
        prometheus.count("rl_backend_turn_prompt_tokens_total", len(prompt), engine=engine)
        prometheus.count("rl_backend_turn_cached_tokens_total", cached, engine=engine)
        finish = "abort" if output.finish_reason == "abort" else response.finish_reason
        routes: ExpertIds | None = None
        if self._vllm.config.return_routed_experts and response.token_ids:
            routes = pack_routes([output], [len(prompt) + len(response.token_ids)], self._vllm.moe_layers, self._vllm.name)
        return TurnAnswer(response.token_ids, response.log_probs, finish, finished.spans, cached, routes)
