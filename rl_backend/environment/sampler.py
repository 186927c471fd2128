"""The sampler of one episode: checks what is asked of the engines, enforces limits, keeps the record."""

import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import xxhash

from rl_backend.contracts import BatchError, EpisodeEndError, RolloutError
from rl_backend.environment.protocol import Generation, Limits, Message, Segment, Stop, TokenSource, ToolCall, Turn
from rl_backend.environment.training_segments import EpisodeRecord


class RecordingSampler:
    """A :class:`~rl_backend.environment.protocol.Sampler` over engines.

    Args:
        sampling_seed: of the first turn; with it a single-turn sample and an episode of one turn are the same.
        seed: for the environment; see :class:`~rl_backend.environment.protocol.Sampler`.
        limits: of turns and tokens; those of time and concurrency are for whoever plays.
    """

    def __init__(self, source: TokenSource, *, sampling_seed: int, seed: int, limits: Limits) -> None:
        self._source = source
        self._sampling_seed = sampling_seed
        self._seed = seed
        self._limits = limits
        self._record = EpisodeRecord()
        self._turns: list[Turn] = []
        self._asked = 0
        self._ended: EpisodeEndError | None = None
        self.engine_seconds = 0.0

    @property
    def seed(self) -> int:
        return self._seed

    @property
    def sampling_seed(self) -> int:
        return self._sampling_seed

    @property
    def turns(self) -> tuple[Turn, ...]:
        return tuple(self._turns)

    @property
    def segments(self) -> tuple[Segment, ...]:
        return self._record.segments()

    @property
    def calls(self) -> int:
        return sum(len(turn.calls) for turn in self._turns)

    async def sample(
        self, token_ids: Sequence[int], *, stop_token_ids: Sequence[int] = (), max_tokens: int | None = None
    ) -> Turn:
        self._check_ids("token_ids", token_ids)
        self._check_ids("stop_token_ids", stop_token_ids)
        room = self._room(len(token_ids), max_tokens)
        # By the number of turns asked for, not of those that came: a retry samples anew.
        seed = turn_seed(self._sampling_seed, self._asked)
        self._asked += 1
        begun = time.monotonic()
        try:
            generation = await self._source.generate(token_ids, seed=seed, stop_token_ids=stop_token_ids, max_tokens=room)
        finally:
            self.engine_seconds += time.monotonic() - begun
        if generation.finish == "abort":
            raise self.end("cancelled", "the engine gave up a turn of the episode")
        if len(generation.token_ids) > room:
            raise RolloutError(f"the engine sampled {len(generation.token_ids)} tokens; at most {room} were asked for")
        self._record.add(token_ids, generation)
        turn = _turn(generation, len(token_ids))
        # Routes are large, and the record has them.
        self._turns.append(replace(turn, routes=None))
        return turn

    def reward(self, value: float) -> None:
        self._record.reward(value)
        self._turns[-1] = replace(self._turns[-1], reward=self._turns[-1].reward + float(value))

    def leave_out(self) -> None:
        self._record.leave_out()
        self._turns[-1] = replace(self._turns[-1], trained=False)

    def describe(self, message: Message | None, calls: Sequence[ToolCall] = (), given: Sequence[Message] = ()) -> None:
        self._turns[-1] = replace(self._turns[-1], message=message, calls=tuple(calls), given=tuple(given))

    def end(self, stop: Stop, message: str) -> EpisodeEndError:
        """The episode is over: whoever asks for another turn gets this error, which is returned to be raised."""
        self._ended = EpisodeEndError(message, stop=stop)
        return self._ended

    def metrics(self) -> Mapping[str, float]:
        sampled = sum(len(turn.token_ids) for turn in self._turns)
        calls = [call for turn in self._turns for call in turn.calls]
        return {
            "turns": len(self._turns),
            "segments": len(self._record.segments()),
            "sampled_tokens": sampled,
            "prompt_tokens": sum(turn.prompt_tokens for turn in self._turns),
            "cached_tokens": sum(turn.cached_tokens for turn in self._turns),
            "tool_calls": len(calls),
            "failed_tool_calls": sum(call.status != "ok" for call in calls),
            "engine_seconds": self.engine_seconds,
        }

    def _check_ids(self, name: str, token_ids: Sequence[int]) -> None:
        if not token_ids and name == "stop_token_ids":
            return
        if not token_ids or not 0 <= min(token_ids) <= max(token_ids) < self._source.vocab_size:
            found = f"ids from {min(token_ids)} to {max(token_ids)}" if token_ids else "no ids, and a turn needs a prompt"
            raise BatchError(
                f"{name} has {found}; expected 0 to {self._source.vocab_size - 1}: the environment or its tokenizer is of "
                "another model"
            )

    def _room(self, prompt_tokens: int, asked: int | None) -> int:
        """Most tokens that the turn may have; raises :class:`EpisodeEndError` where none are left."""
        if self._ended is not None:
            raise self._ended
        limits, context = self._limits, self._source.context_tokens
        if limits.turns is not None and self._asked >= limits.turns:
            raise self.end("turns", f"limits.turns={limits.turns}")
        room = {f"the context of {context} tokens": context - prompt_tokens}
        if limits.episode_tokens is not None:
            room[f"limits.episode_tokens={limits.episode_tokens}"] = limits.episode_tokens - prompt_tokens
        least = min(room, key=room.__getitem__)
        if room[least] < 1:
            stop: Stop = "tokens" if least.startswith("limits") else "context"
            raise self.end(stop, f"a prompt of {prompt_tokens} tokens leaves no room in {least}")
        tokens = room[least]
        if limits.sampled_tokens is not None:
            left = limits.sampled_tokens - sum(len(turn.token_ids) for turn in self._turns)
            if left < 1:
                raise self.end("tokens", f"limits.sampled_tokens={limits.sampled_tokens}")
            tokens = min(tokens, left)
        if asked is not None and asked < 1:
            raise BatchError(f"max_tokens={asked}: a turn has at least 1 token")
        return min(each for each in (tokens, limits.turn_tokens, asked) if each is not None)


def turn_seed(sampling_seed: int, turn: int) -> int:
    """Seed of a turn, in [0, 2^63): the episode's own for the first, then xxh3-64 of seed and turn."""
    if turn == 0:
        return sampling_seed
    return int(xxhash.xxh3_64_intdigest(struct.pack("<Qq", sampling_seed, turn))) >> 1


def _turn(generation: Generation, prompt_tokens: int) -> Turn:
    return Turn(
        message=None,
        token_ids=tuple(generation.token_ids),
        log_probs=tuple(generation.log_probs),
        finish=generation.finish,
        versions=tuple(generation.versions),
        routes=generation.routes,
        prompt_tokens=prompt_tokens,
        cached_tokens=generation.cached_tokens,
    )
