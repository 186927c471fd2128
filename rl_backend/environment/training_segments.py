"""Training segments of an episode: every id that was prompt or was sampled, recorded as it was."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rl_backend.contracts import BatchError
from rl_backend.environment.protocol import Generation, Routes, Segment


@dataclass
class _Open:
    """A segment that may still be extended; see :class:`Segment`."""

    token_ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    routes: list[Routes] = field(default_factory=list)

    def add_prompt(self, token_ids: Sequence[int]) -> None:
        self.token_ids += token_ids
        self.sampled += [False] * len(token_ids)
        self.log_probs += [0.0] * len(token_ids)
        self.versions += [-1] * len(token_ids)
        self.rewards += [0.0] * len(token_ids)

    def add_sampled(self, generation: Generation) -> None:
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
        )


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
    found = {name: len(getattr(generation, name)) for name in expected}
    if not prompt_ids or not tokens or found != expected:
        raise BatchError(
            f"a turn of {tokens} tokens after a prompt of {len(prompt_ids)} has {found}; expected {expected}, and at least "
            "one token of each"
        )
