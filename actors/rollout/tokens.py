"""Engines as the source of an episode's tokens: every turn goes to one engine, that of the episode's turns before."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence

import numpy as np
import xxhash

from actors.rollout.config import SamplingConfig
from actors.rollout.group.group import RolloutGroup
from actors.rollout.messages import AdapterVersion, Request, TurnAnswer
from rl_backend.contracts import ConfigError, EngineDeadError, EngineDirtyError, RolloutError
from rl_backend.environment.protocol import Generation


class RolloutTokens:
    """A :class:`~rl_backend.environment.protocol.TokenSource` over a group of engines, for any number of episodes at once.

    A prompt that begins with an earlier prompt and its answer goes to the engine that gave it, which has their keys and
    values in its prefix cache; any other goes to the engine with the fewest turns in flight. Results do not depend on the
    choice.

    When an engine dies, or a push leaves it dirty, its turns in flight are asked again of another one, where the same prompt
    and seed give the same tokens, as long as both serve the same weights; the versions say so. The engine stays lost until
    ``RolloutGroup.restart``.

    Args:
        rollout: the engines.
        sampling: temperature, ``top_p``, ``top_k``, ``min_p``, stop strings, and stop tokens beside those of each turn; the
            rest comes with each turn.
        adapter: the LoRA tenant that samples; None for the weights alone.
        require_version: refuse weights, or versions of the adapter, that are older. May be changed between turns.
        retries: how often a turn is asked again of another engine when its engine is lost. After that, and when no engine
            is left, it raises the :class:`~rl_backend.contracts.EngineDeadError` or
            :class:`~rl_backend.contracts.EngineDirtyError`.

    Raises:
        ConfigError: ``sampling.max_new_tokens``, which turns bring themselves; stop strings and engines without tokenizer.

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
        retries: int = 1,
    ) -> None:
        self._rollout = rollout
        self._sampling = sampling or SamplingConfig()
        self._adapter = adapter
        self.require_version = require_version
        self._retries = retries
        self._affinity = PrefixAffinity()
        self.prompt_tokens = self.cached_tokens = 0
        _check(self._sampling, rollout, retries)

    @property
    def context_tokens(self) -> int:
        """The engines' ``max_model_len``."""
        return next(iter(self._rollout.infos.values())).max_model_len

    @property
    def vocab_size(self) -> int:
        """Of the engines' model."""
        return next(iter(self._rollout.infos.values())).vocab_size

    @property
    def cached_share(self) -> float:
        """Of all prompt tokens so far, those that no engine computed again."""
        return self.cached_tokens / max(self.prompt_tokens, 1)

    async def generate(
        self, token_ids: Sequence[int], *, seed: int, stop_token_ids: Sequence[int], max_tokens: int
    ) -> Generation:
        """See the protocol.

        Raises:
            BatchError: a prompt that no engine can answer; other turns are not concerned.
            EngineDeadError, EngineDirtyError: the engines that were asked are lost.
            RolloutError: engines without weights, an adapter that has not been pushed, or a group that is closed.
            WeightVersionError: the weights are older than ``require_version``.
        """
        request = Request(list(token_ids), 1, seed)
        stops = tuple(dict.fromkeys([*stop_token_ids, *self._sampling.stop_token_ids]))
        sampling = self._sampling.replace(max_new_tokens=max_tokens, stop_token_ids=stops)
        lost: set[int] = set()
        while True:
            engine = self._choose(request.prompt_ids, lost)
            try:
                return await self._ask(engine, request, sampling)
            except (EngineDeadError, EngineDirtyError):
                lost.add(engine)
                if len(lost) > self._retries or lost >= set(self._rollout.engines):
                    raise

    def give_up(self) -> None:
        """Ends every turn in flight of these engines: each returns ``finish="abort"`` and what it had sampled."""
        self._rollout.turns.give_up()

    def _choose(self, prompt: Sequence[int], lost: Collection[int]) -> int:
        in_flight = {engine: turns for engine, turns in self._rollout.turns.in_flight.items() if engine not in lost}
        engine = self._affinity.find(prompt, in_flight)
        if engine is not None:
            return engine
        return min(in_flight, key=lambda each: (in_flight[each], each), default=0)

    async def _ask(self, engine: int, request: Request, sampling: SamplingConfig) -> Generation:
        answer = await self._answer(engine, request, sampling)
        self.prompt_tokens += len(request.prompt_ids)
        self.cached_tokens += answer.cached_tokens
        self._affinity.remember([*request.prompt_ids, *answer.token_ids], engine)
        return Generation(
            token_ids=answer.token_ids,
            log_probs=answer.log_probs,
            finish=answer.finish,
            versions=[span.version for span in answer.spans for _ in range(span.tokens)],
            routes=answer.routes,
            cached_tokens=answer.cached_tokens,
        )

    async def _answer(self, engine: int, request: Request, sampling: SamplingConfig) -> TurnAnswer:
        while True:
            adapter = self._rollout.lora.version_of(self._adapter)
            asked = self._rollout.turns.ask(engine, request, sampling, adapter=adapter, require_version=self.require_version)
            try:
                return await asyncio.wrap_future(asked)
            except RolloutError:
                # A push may have replaced the version on the way to the engine, which has then dropped it.
                if adapter is None or self._served_now() in (adapter, None):
                    raise

    def _served_now(self) -> AdapterVersion | None:
        return self._rollout.adapters.get(self._adapter or "")


class PrefixAffinity:
    """Which engine has the keys and values of a sequence. Sequences that were not asked for longest are forgotten.

    Args:
        most: sequences that are remembered.
    """

    def __init__(self, most: int = 65536) -> None:
        self._most = most
        self._engines: OrderedDict[tuple[int, int], int] = OrderedDict()
        self._lengths: Counter[int] = Counter()
        self._lock = threading.Lock()

    def remember(self, token_ids: Sequence[int], engine: int) -> None:
        """The whole sequence is there."""
        key = len(token_ids), _digests(token_ids, [len(token_ids)])[0]
        with self._lock:
            if key not in self._engines:
                self._lengths[key[0]] += 1
            self._engines[key] = engine
            self._engines.move_to_end(key)
            if len(self._engines) > self._most:
                (length, _), _ = self._engines.popitem(last=False)
                self._lengths[length] -= 1
                self._lengths += Counter()  # drops lengths that none has

    def find(self, token_ids: Sequence[int], engines: Collection[int]) -> int | None:
        """The one of ``engines`` that has most of what a prompt begins with; None where none is known to have any."""
        with self._lock:
            lengths = sorted(length for length in self._lengths if length <= len(token_ids))
        for key in reversed(list(zip(lengths, _digests(token_ids, lengths), strict=True))):
            with self._lock:
                engine = self._engines.get(key)
            if engine in engines:
                return engine
        return None


def _digests(token_ids: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """Of the beginnings of a sequence with these lengths, which ascend."""
    ids, digest, start, digests = np.asarray(token_ids, dtype=np.int64), xxhash.xxh3_64(), 0, []
    for length in lengths:
        digest.update(ids[start:length].tobytes())
        digests.append(int(digest.intdigest()))
        start = length
    return digests


def _check(sampling: SamplingConfig, rollout: RolloutGroup, retries: int) -> None:
    if sampling.is_set("max_new_tokens"):
        problem = "every turn of an episode brings its own; unset it"
        raise ConfigError.of("SamplingConfig.max_new_tokens", sampling.max_new_tokens, problem)
    if sampling.n != 1:
        raise ConfigError.of("SamplingConfig.n", sampling.n, "a turn is one response; use n=1")
    if not sampling.log_probs:
        raise ConfigError.of("SamplingConfig.log_probs", False, "the record of an episode needs them; unset it")
    if sampling.stop_strings and not rollout.config.load_tokenizer:
        raise ConfigError.of(
            "SamplingConfig.stop_strings",
            sampling.stop_strings,
            "engines find them in text and have no tokenizer; set RolloutConfig.load_tokenizer",
        )
    if retries < 0:
        raise ConfigError.of("retries", retries, "expected 0 or more")
