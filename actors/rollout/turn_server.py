"""An engine's part in serving turns of episodes: they come one by one, and each is answered when it has ended."""

from __future__ import annotations

import queue
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from functools import partial

from actors.cluster import prometheus
from actors.rollout.adapters import AdapterReceiver
from actors.rollout.config import RolloutConfig
from actors.rollout.jobs import Finished, Job
from actors.rollout.messages import Response, TurnAnswer, TurnRequest
from actors.rollout.requests import prompt_problem
from actors.rollout.sample import ExpertIds, pack_routes
from rl_backend.contracts import (
    UNVERSIONED,
    BatchError,
    RLBackendError,
    RolloutError,
)

CONCURRENCY_GROUPS = {"turns": 1, "answers": 1}
"""Of an engine's actor: turns come in, and answers are waited for, while a call that samples or a push is served."""
_MOST_ANSWERS = 256


class TurnServer(AdapterReceiver):
    """Serves turns beside calls of :meth:`~actors.rollout.engine.RolloutEngine.generate`, in the same step loop."""

    def __init__(self, config: RolloutConfig, engine: int, device: str) -> None:
        super().__init__(config, engine, device)
        self._require_push = False
        self._moe_layers: tuple[int, ...] = ()
        self._answers: queue.SimpleQueue[tuple[int, TurnAnswer | RLBackendError]] = queue.SimpleQueue()
        self._keys: dict[int, int] = {}
        """The asking process's key -> the loop's, of turns that are not answered."""

    def start_turns(self, turns: Sequence[TurnRequest]) -> None:
        """Asks for turns. Whatever is wrong with one is its own answer."""
        pausable = self._config.turns_at_push == "pause"
        jobs = [
            Job(turn.request, turn.sampling, turn.adapter, turn.require_version, pausable and turn.adapter is None)
            for turn in turns
        ]
        for turn, (key, result) in zip(turns, self._loop.submit(jobs).items(), strict=True):
            self._keys[turn.key] = key
            result.add_done_callback(partial(self._answer, turn))

    def give_up_turns(self, keys: Iterable[int]) -> None:
        """Ends turns: each is answered with what there is of it. Those that are answered already are passed over."""
        # Looked up once: the loop's thread takes a key out when its turn is answered.
        self._loop.give_up([found for key in keys if (found := self._keys.get(key)) is not None])

    def take_turns(self, seconds: float) -> list[tuple[int, TurnAnswer | RLBackendError]]:
        """Key and answer, or error, of turns that have ended; waits for the first. None within ``seconds``: empty."""
        answers = []
        try:
            answers.append(self._answers.get(timeout=seconds))
            while len(answers) < _MOST_ANSWERS:
                answers.append(self._answers.get_nowait())
        except queue.Empty:
            pass
        return answers

    def admit(self, job: Job) -> bool:
        """As :class:`~actors.rollout.jobs.Host`.

        Raises:
            BatchError: an empty or too long prompt, or an unknown token id.
            EngineDirtyError: a weight update failed after its first load.
            RolloutError: no weights have been pushed yet, or the adapter is not here.
            WeightVersionError: the weights are older than the job requires.
        """
        self._check_clean()
        self._check_weights()
        model = self._llm.model_config
        if problem := prompt_problem(job.request.prompt_ids, model.max_model_len, model.get_vocab_size()):
            raise BatchError(f"the prompt {problem}", engine=self._name)
        self._require_version(job.adapter, job.require_version)
        return job.adapter is None or self._take_slot(job.adapter)

    def version_for(self, job: Job) -> int:
        """As :class:`~actors.rollout.jobs.Host`."""
        return self._version if job.adapter is None else job.adapter.version

    def ended(self, job: Job) -> None:
        """As :class:`~actors.rollout.jobs.Host`."""
        if job.adapter is not None:
            self._leave_slot(job.adapter)

    def _answer(self, turn: TurnRequest, result: Future[Finished]) -> None:
        del self._keys[turn.key]
        answer: TurnAnswer | RLBackendError
        try:
            answer = self._answer_of(turn, result.result())
        except RLBackendError as error:
            answer = error
        except Exception as error:  # noqa: BLE001 vLLM raises errors of any type
            answer = RolloutError(f"{self._name} failed with {type(error).__name__}: {error}", engine=self._name)
        self._answers.put((turn.key, answer))

    def _answer_of(self, turn: TurnRequest, finished: Finished) -> TurnAnswer:
        output, cached = finished.completion
        if output is None:
            return TurnAnswer([], [], "abort", (), 0, None)
        response = Response.of(output, self._name)
        engine, prompt = str(self._engine), turn.request.prompt_ids
        prometheus.count("rl_backend_rollout_responses_total", 1, engine=engine)
        prometheus.count("rl_backend_rollout_tokens_total", len(response.token_ids), engine=engine)
        prometheus.count("rl_backend_turn_prompt_tokens_total", len(prompt), engine=engine)
        prometheus.count("rl_backend_turn_cached_tokens_total", cached, engine=engine)
        finish = "abort" if output.finish_reason == "abort" else response.finish_reason
        routes: ExpertIds | None = None
        if self._config.return_routed_experts and response.token_ids:
            routes = pack_routes([output], [len(prompt) + len(response.token_ids)], self._moe_layers, self._name)
        return TurnAnswer(response.token_ids, response.log_probs, finish, finished.spans, cached, routes)

    def _check_weights(self) -> None:
        if self._lacks_weights:
            raise RolloutError(
                f"{self._name} has no weights of the trainer yet (UNVERSIONED): push before sampling", engine=self._name
            )

    @property
    def _lacks_weights(self) -> bool:
        return self._require_push and self._version == UNVERSIONED
