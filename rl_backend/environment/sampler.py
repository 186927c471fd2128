"""The sampler of one episode: checks what is asked of the engines, enforces limits, keeps the record."""

import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import xxhash

from rl_backend.contracts import BatchError, EpisodeEndError, RolloutError, SamplingMask
from rl_backend.environment.protocol import Generation, Limits, Message, Routes, Segment, Stop, TokenSource, ToolCall, Turn


@dataclass
class _Open:
    """A segment that may still be extended; see :class:`Segment`."""

    token_ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    routes: list[Routes] = field(default_factory=list)
    masks: list[tuple[int, SamplingMask]] = field(default_factory=list)

    def add_prompt(self, token_ids: Sequence[int]) -> None:
        self.token_ids += token_ids
        self.sampled += [False] * len(token_ids)
        self.log_probs += [0.0] * len(token_ids)
        self.versions += [-1] * len(token_ids)
        self.rewards += [0.0] * len(token_ids)

    def add_sampled(self, generation: Generation) -> None:
        if generation.sampling_mask is not None:
            self.masks.append((len(self.token_ids), generation.sampling_mask))
        self.token_ids += generation.token_ids
        self.sampled += [True] * len(generation.token_ids)
        self.log_probs += generation.log_probs
        self.versions += generation.versions
        self.rewards += [0.0] * len(generation.token_ids)

    def add_routes(self, routes: Routes) -> None:
        # A row stays the one of the pass that predicted the token behind it.
        known = sum(len(rows) for rows in self.routes)
        # A copy, because the engine's array holds the rows of the whole prompt.
        self.routes.append(routes[known:].copy())

    def close(self) -> Segment:
        routes = np.concatenate(self.routes) if self.routes else None
        return Segment(
            tuple(self.token_ids),
            tuple(self.sampled),
            tuple(self.log_probs),
            tuple(self.versions),
            tuple(self.rewards),
            routes,
            self._mask(),
        )

    def _mask(self) -> SamplingMask | None:
        if not self.masks:
            return None
        width = max(rows.shape[1] for _, rows in self.masks)
        mask = np.full((len(self.token_ids), width), -1, dtype=np.int32)
        for start, rows in self.masks:
            mask[start : start + len(rows), : rows.shape[1]] = rows
        return mask


@dataclass(frozen=True)
class _Place:
    segment: _Open
    start: int
    end: int


class EpisodeRecord:
    """Builds the segments of one episode.

    A prompt that begins with all ids of a segment extends it: what is new is masked. Any other prompt begins a new segment,
    with everything before its turn masked. So each sampled token is trained once, after the ids that it was sampled after.
    """

    def __init__(self) -> None:
        self._segments: list[_Open] = []
        self._turns: list[_Place] = []

    def add(self, prompt_ids: Sequence[int], generation: Generation) -> None:
        """Adds a turn; raises :class:`BatchError` for lengths that differ, or routes that only some turns have."""
        _check(prompt_ids, generation)
        prompt = list(prompt_ids)
        # The newest of those that fit is the one that the episode continued.
        found = next((each for each in reversed(self._segments) if prompt[: len(each.token_ids)] == each.token_ids), None)
        if found is not None and bool(found.routes) != (generation.routes is not None):
            raise BatchError("some turns of an episode have expert routes and others have none; record all or none")
        segment = found or _Open()
        if found is None:
            self._segments.append(segment)
        segment.add_prompt(prompt[len(segment.token_ids) :])
        start = len(segment.token_ids)
        segment.add_sampled(generation)
        if generation.routes is not None:
            segment.add_routes(generation.routes)
        self._turns.append(_Place(segment, start, len(segment.token_ids)))

    def reward(self, value: float, turn: int = -1) -> None:
        """Adds a finite number to the reward of a turn, at its last token; raises :class:`BatchError` for others."""
        place = self._place(turn)
        if not np.isfinite(value):
            raise BatchError(f"a reward of {value}: rewards must be finite numbers")
        place.segment.rewards[place.end - 1] += float(value)

    def leave_out(self, turn: int = -1) -> None:
        """Takes a turn out of training: its tokens stay, as if they had been prompt."""
        place = self._place(turn)
        segment, tokens = place.segment, place.end - place.start
        segment.sampled[place.start : place.end] = [False] * tokens
        segment.log_probs[place.start : place.end] = [0.0] * tokens
        segment.versions[place.start : place.end] = [-1] * tokens

    def segments(self) -> tuple[Segment, ...]:
        return tuple(segment.close() for segment in self._segments)

    def _place(self, turn: int) -> _Place:
        if not self._turns:
            raise BatchError("the episode has no turn yet; sample one before giving it a reward or leaving it out")
        return self._turns[turn]


def _check(prompt_ids: Sequence[int], generation: Generation) -> None:
    tokens = len(generation.token_ids)
    # No forward pass has seen the last token.
    rows = len(prompt_ids) + tokens - 1
    expected = {"log_probs": tokens, "versions": tokens} | ({} if generation.routes is None else {"routes": rows})
    expected |= {} if generation.sampling_mask is None else {"sampling_mask": tokens}
    found = {name: len(getattr(generation, name)) for name in expected}
    if not prompt_ids or not tokens or found != expected:
        raise BatchError(
            f"a turn of {tokens} tokens after a prompt of {len(prompt_ids)} has {found}; expected {expected}, and at least "
            "one token of each"
        )


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
