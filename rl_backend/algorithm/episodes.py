"""Training sequences from episodes of many turns, and advantages over them.

An episode is one sequence where each prompt begins with all that came before, and several where its history began anew.
Sequences of an episode stand next to each other, in the order of time.
"""

from collections.abc import Collection, Sequence
from itertools import groupby, pairwise
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from rl_backend.contracts import EPISODE_SHARE, BatchError, ConfigError, TokenSequence, route_fields

type Truncated = Literal["keep", "zero", "mask"]
"""What becomes of an episode that was cut off: trained on as it is, with a reward of 0, or not at all. Its reward, 0 with
``zero``, counts in the mean of its group in any case; one that is not trained on counts in no loss."""

EPISODE = "episode"
"""Sequence field, 0-d int64: place of the sequence's episode in the list that :func:`episode_sequences` was given."""

CUT = "episode_cut"
"""Sequence field, 0-d bool: the episode was cut off, and its last state has a value."""

IN_ORDER = "episode_in_order"
"""Sequence field, 0-d bool: sequence after sequence, the episode's tokens are in the order in which they were sampled. They
are not where it came back to a history that it had left."""

TOKEN_REWARDS = "token_rewards"

CUTS: frozenset[str] = frozenset({"turns", "tokens", "context", "length", "tool_calls", "timeout", "cancelled"})
"""Reasons of :data:`~rl_backend.environment.protocol.Stop` that come from outside of the task: it might have continued."""

_FAILURES = frozenset({"timeout", "cancelled"})
"""Cuts that are failures too: where such an episode is trained on, it counts as zero, and nothing is expected behind it."""


class SampledSegment(Protocol):
    """As :class:`~rl_backend.environment.Segment` is. A token that two segments share is ``sampled`` in the first alone."""

    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def sampled(self) -> Sequence[bool]: ...
    @property
    def log_probs(self) -> Sequence[float]: ...
    @property
    def rewards(self) -> Sequence[float]: ...
    @property
    def routes(self) -> Any: ...


class SampledTurn(Protocol):
    """As :class:`~rl_backend.environment.Turn` is."""

    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def trained(self) -> bool: ...


class PlayedEpisode(Protocol):
    """As :class:`~rl_backend.environment.Episode` is; without ``turns``, segments are in the order of time."""

    @property
    def turns(self) -> Sequence[SampledTurn]: ...
    @property
    def segments(self) -> Sequence[SampledSegment]: ...
    @property
    def reward(self) -> float: ...
    @property
    def stop(self) -> str: ...


def is_cut(episode: PlayedEpisode) -> bool:
    """Whether it was cut off before its end."""
    return episode.stop in CUTS


def episode_rewards(episodes: Sequence[PlayedEpisode], truncated: Truncated = "keep") -> list[float]:
    """One reward for each episode: its own, or 0 for one that was cut off, with ``zero``."""
    return [0.0 if truncated == "zero" and is_cut(episode) else episode.reward for episode in episodes]


def episode_sequences(
    episodes: Sequence[PlayedEpisode], *, truncated: Truncated = "keep", routes: bool = False
) -> list[TokenSequence]:
    """A sequence for each segment of each episode; an episode without a sampled token has none.

    Token fields: ``loss_mask`` on the predictions of sampled tokens, ``rollout_log_probs``, and ``token_rewards``, float64,
    at the prediction of a turn's last token. Sequence fields: ``episode``, ``episode_cut`` and ``episode_share``, the part
    of the episode's sampled tokens that the sequence has, with which ``seq-mean-*`` losses count an episode once.

    Args:
        truncated: what becomes of episodes that were cut off.
        routes: with the experts that the engine chose, for router replay.

    Raises:
        ConfigError: ``truncated``.
        BatchError: a segment whose parts differ in length, whose first token is sampled, or that lacks routes.
    """
    if truncated not in ("keep", "zero", "mask"):
        raise ConfigError.of("truncated", truncated, "must be keep, zero or mask")
    found: list[TokenSequence] = []
    for index, episode in enumerate(episodes):
        where = f"episode {index}"
        segments = [segment for segment in episode.segments if any(segment.sampled)]
        counts = [sum(map(bool, segment.sampled)) for segment in segments]
        cut = is_cut(episode)
        rewards, in_order = _at_sampled_tokens(segments), _in_order(segments, episode.turns)
        for segment, count, own in zip(segments, counts, rewards, strict=True):
            fields = _token_fields(segment, own, where)
            if cut and truncated != "keep":
                fields[TOKEN_REWARDS] = torch.zeros_like(fields[TOKEN_REWARDS])
            if cut and truncated == "mask":
                fields["loss_mask"] = torch.zeros_like(fields["loss_mask"])
            if routes:
                fields |= _route_fields(segment, where)
            of_episode = {
                EPISODE: torch.tensor(index),
                # With a reward of 0 the cut is the end: nothing is expected behind it.
                CUT: torch.tensor(cut and truncated == "keep" and episode.stop not in _FAILURES),
                IN_ORDER: torch.tensor(in_order),
                EPISODE_SHARE: torch.tensor(count / sum(counts), dtype=torch.float64),
            }
            found.append(TokenSequence(torch.tensor(segment.token_ids, dtype=torch.int64), fields, of_episode))
    return found


def episode_lengths(sequences: Sequence[TokenSequence], episodes: int | None = None) -> Tensor:
    """(N,) int64: tokens of all sequences of each episode, as if they were one sequence.

    Functions that take ``seq_lens`` of packed tensors, such as :func:`~rl_backend.algorithm.gae_advantages`, step with these
    from the last sampled token of a sequence to the first of the next one of the same episode.

    Args:
        sequences: of :func:`episode_sequences`; those of an episode next to each other.
        episodes: their number, with those that have no sequences, which have length 0; None counts those that have.

    Raises:
        BatchError: sequences without the field ``episode``, or in another order; or an episode that came back to a history
            that it had left, whose tokens are not in the order of time.
    """
    order = [_episode_of(sequence, index) for index, sequence in enumerate(sequences)]
    runs = [number for number, _ in groupby(order)]
    if runs != sorted(set(order)):
        raise BatchError(
            f"sequences are of episodes {order}; those of an episode must stand next to each other, in the order in which "
            "episode_sequences made them",
            name=EPISODE,
        )
    for number, sequence in zip(order, sequences, strict=True):
        if not bool(sequence.sequence_fields[IN_ORDER]):
            raise BatchError(
                f"episode {number} came back to a history that it had left, so its sequences are not in the order of time, "
                "which estimates over tokens (gae, reinforce_plus_plus) need; use grpo, dr_grpo or rloo, or begin a new "
                "history in place of an earlier one",
                name=IN_ORDER,
            )
    lengths = dict.fromkeys(runs if episodes is None else range(episodes), 0)
    for number, sequence in zip(order, sequences, strict=True):
        if number not in lengths:
            raise BatchError(f"a sequence is of episode {number}; there are {episodes} episodes", name=EPISODE)
        lengths[number] += len(sequence)
    return torch.tensor(list(lengths.values()), dtype=torch.int64)


def final_values(sequences: Sequence[TokenSequence], values: Sequence[Tensor]) -> Tensor:
    """(N,): the critic's value of the state that each episode was cut off in, 0 where it ended.

    Args:
        sequences: of N episodes.
        values: of each sequence, (L,).
    """
    last = {_episode_of(sequence, index): index for index, sequence in enumerate(sequences)}
    return torch.stack(
        [values[index][-1] * sequences[index].sequence_fields[CUT].to(values[index]) for index in last.values()]
    )


def episode_parts(
    sequences: Sequence[TokenSequence], groups: Sequence[int], parts: int, least: int = 1
) -> list[list[TokenSequence]]:
    """What each update of a step trains on: at most ``parts``, each of whole groups of episodes.

    Sequences that are masked as a whole are left out, so that no part is without a trained token.

    Args:
        groups: of each episode, masked ones too, the number of its group; episodes of a group stand next to each other.
        least: sequences of each of several parts: the data-parallel ranks.

    Raises:
        BatchError: no sequence with a trained token.
    """
    left = [sequence for sequence in sequences if bool(sequence.token_fields["loss_mask"].any())]
    if not left:
        raise BatchError(f"none of the {len(sequences)} sequences that are left of a step has a token to train on")
    of_groups = [
        list(members) for _, members in groupby(left, key=lambda sequence: groups[int(sequence.sequence_fields[EPISODE])])
    ]
    for count in range(min(parts, len(of_groups)), 1, -1):
        bounds = [len(of_groups) * index // count for index in range(count + 1)]
        found = [[each for members in of_groups[start:stop] for each in members] for start, stop in pairwise(bounds)]
        if all(len(part) >= least for part in found):
            return found
    return [left]


def truncated_share(episodes: Collection[PlayedEpisode]) -> float:
    """The share of episodes that were cut off."""
    return sum(map(is_cut, episodes)) / len(episodes)


def _episode_of(sequence: TokenSequence, index: int) -> int:
    if EPISODE not in sequence.sequence_fields:
        raise BatchError(f"sequence {index} has no sequence field {EPISODE!r}; make it with episode_sequences", name=EPISODE)
    return int(sequence.sequence_fields[EPISODE])


def _in_order(segments: Sequence[SampledSegment], turns: Sequence[SampledTurn]) -> bool:
    """Whether the segments' sampled tokens are those of the turns that are trained, one after the other."""
    flat = [
        token for segment in segments for token, sampled in zip(segment.token_ids, segment.sampled, strict=True) if sampled
    ]
    return not turns or flat == [token for turn in turns if turn.trained for token in turn.token_ids]


def _at_sampled_tokens(segments: Sequence[SampledSegment]) -> list[list[float]]:
    """Rewards of each segment's tokens; that of a turn which is not trained goes to the last trained token before it, or to
    the first of the episode, so that no estimator loses it."""
    places = [
        (row, place) for row, segment in enumerate(segments) for place, sampled in enumerate(segment.sampled) if sampled
    ]
    moved = [[0.0] * len(segment.token_ids) for segment in segments]
    earlier = -1
    for row, segment in enumerate(segments):
        for place, reward in enumerate(segment.rewards):
            while earlier + 1 < len(places) and places[earlier + 1] <= (row, place):
                earlier += 1
            if reward:
                to_row, to_place = places[max(earlier, 0)]
                moved[to_row][to_place] += reward
    return moved


def _token_fields(segment: SampledSegment, rewards: Sequence[float], where: str) -> dict[str, Tensor]:
    """Values of tokens, each at the position that predicts its token."""
    length = len(segment.token_ids)
    given = {"sampled": segment.sampled, "log_probs": segment.log_probs, "rewards": segment.rewards}
    for name, values in given.items():
        if len(values) != length:
            raise BatchError(f"{where}: a segment of {length} tokens has {len(values)} {name}", name=name)
    if segment.sampled[0]:
        raise BatchError(f"{where}: the first token of a segment is sampled; a turn needs at least one token before it")
    placed = {"loss_mask": segment.sampled, "rollout_log_probs": segment.log_probs}
    fields = {name: torch.tensor([*values[1:], 0], dtype=torch.float32) for name, values in placed.items()}
    return fields | {TOKEN_REWARDS: torch.tensor([*rewards[1:], 0], dtype=torch.float64)}


def _route_fields(segment: SampledSegment, where: str) -> dict[str, Tensor]:
    """Each row comes from the pass that sampled the next token, so its weights are those of that token."""
    if segment.routes is None:
        raise BatchError(f"{where}: a segment has no routes; ask for them with RolloutConfig(return_routed_experts=True)")
    # The array may lie in Ray's object store, which nobody may write to and torch knows no read-only tensors.
    return route_fields(torch.from_numpy(segment.routes.copy()), len(segment.token_ids))
