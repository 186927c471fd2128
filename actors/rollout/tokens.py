"""Engines as the source of an episode's tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from actors.rollout.config import SamplingConfig, require_bounded, require_tokenizer
from actors.rollout.group.group import RolloutGroup
from actors.rollout.messages import Request, Response
from rl_backend.contracts import ConfigError, RolloutError
from rl_backend.environment.protocol import Generation


class RolloutTokens:
    """A :class:`~rl_backend.environment.protocol.TokenSource` over a group of engines, for any number of episodes at
    once.

    A prompt that begins with an earlier prompt and its answer goes to the engine that gave it, which has their keys
    and values in its prefix cache; any other goes to the engine with the fewest turns in flight, once it has room. Results
    do not depend on the choice.

    When an engine dies, or a push leaves it dirty, its turns in flight are asked again of another one, or of the one that
    replaces it. The same prompt and seed give the same tokens there, as long as both serve the same weights; the
    versions say so.

    Args:
        sampling: temperature, ``top_p``, ``top_k``, ``min_p``, stop strings, and stop tokens beside those of each
            turn; the rest comes with each turn.
        adapter: the LoRA tenant that samples; None for the weights alone.
        require_version: refuse weights, or versions of the adapter, that are older. May be changed between turns.

    Raises:
        ConfigError: ``max_new_tokens``, ``n`` or ``log_probs`` in ``sampling``; stop strings and engines without
            tokenizer; no ``top_k``, or temperature 0, and engines that return masks.

    Attributes:
        prompt_tokens: of all turns so far.
        cached_tokens: those of them that no engine computed again.
    """

    def __init__(
        self,
        rollout: RolloutGroup,
        sampling: SamplingConfig | None = None,
        *,
        adapter: str | None = None,
        require_version: int | None = None,
    ) -> None:
        self._rollout = rollout
        self._sampling = sampling or SamplingConfig()
        self._adapter = adapter
        self.require_version = require_version
        self.prompt_tokens = self.cached_tokens = 0
        if unfit := [name for name in ("max_new_tokens", "n", "log_probs") if self._sampling.is_set(name)]:
            raise ConfigError.of(
                f"SamplingConfig.{unfit[0]}",
                getattr(self._sampling, unfit[0]),
                f"a turn is one response with log-probs and brings its own max_new_tokens; unset {' and '.join(unfit)}",
            )
        require_tokenizer(rollout.config, self._sampling)
        require_bounded(rollout.config, self._sampling)

    @property
    def context_tokens(self) -> int:
        return next(iter(self._rollout.infos.values())).max_model_len

    @property
    def vocab_size(self) -> int:
        return next(iter(self._rollout.infos.values())).vocab_size

    @property
    def cached_share(self) -> float:
        return self.cached_tokens / max(self.prompt_tokens, 1)

    async def generate(
        self, token_ids: Sequence[int], *, seed: int, stop_token_ids: Sequence[int], max_tokens: int
    ) -> Generation:
        """See the protocol.

        Raises:
            BatchError: a prompt that no engine can answer; other turns are not concerned.
            EngineDeadError, EngineDirtyError: all engines are lost and none is being replaced, or one was too often.
            RolloutError: engines without weights, an adapter that has not been pushed, or a group that is closed.
            WeightVersionError: the weights are older than ``require_version``.
        """
        stops = tuple(dict.fromkeys([*stop_token_ids, *self._sampling.stop_token_ids]))
        sampling = self._sampling.replace(max_new_tokens=max_tokens, stop_token_ids=stops)
        request = Request(list(token_ids), sampling, seed)
        answer = await self._answer(request)
        self.prompt_tokens += len(request.prompt_ids)
        self.cached_tokens += answer.cached_tokens
        return Generation(
            token_ids=answer.token_ids,
            log_probs=answer.log_probs,
            finish=answer.finish_reason,
            versions=[span.version for span in answer.spans for _ in range(span.tokens)],
            routes=answer.routes,
            sampling_mask=answer.sampling_mask,
            cached_tokens=answer.cached_tokens,
        )

    def give_up(self) -> None:
        """Ends every turn in flight of these engines: each returns ``finish="abort"`` and what it had sampled."""
        self._rollout.turns.give_up()

    async def _answer(self, request: Request) -> Response:
        while True:
            adapter = self._rollout.lora.version_of(self._adapter)
            ((asked,),) = self._rollout.turns.ask(
                [[replace(request, adapter=adapter, require_version=self.require_version)]]
            )
            try:
                return await asyncio.wrap_future(asked)
            except RolloutError:
                # A push may have replaced the version on the way to the engine, which has then dropped it.
                if adapter is None or self._rollout.adapters.get(self._adapter or "") in (adapter, None):
                    raise
