"""Training sequences from samples and episodes, their advantages, and what each update of a step trains on.

An episode is one sequence where each prompt begins with all that came before, and several where its history began anew.
Sequences of an episode stand next to each other, in the order of time.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from rl_backend.algorithm import advantages
from rl_backend.algorithm.advantages import kl_in_reward, token_rewards
from rl_backend.algorithm.critic import gae_advantages, masked_whiten
from rl_backend.algorithm.loss_aggregation import masked_sum, sum_by_sequence, zero_masked
from rl_backend.algorithm.policy import kl_penalty
from rl_backend.contracts import (
    EPISODE_SHARE,
    SAMPLING_MASK,
    TARGET_IDS,
    BatchError,
    ConfigError,
    SamplingMask,
    TokenSequence,
    route_fields,
)
from rl_backend.data import pack

type Truncated = Literal["keep", "zero", "mask"]
"""What becomes of an episode that was cut off: trained on as it is, with a reward of 0, or not at all. Its reward counts in
the mean of its group in any case."""

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
    @property
    def sampling_mask(self) -> SamplingMask | None: ...


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
    return episode.stop in CUTS


def episode_rewards(episodes: Sequence[PlayedEpisode], truncated: Truncated = "keep") -> list[float]:
    return [0.0 if truncated == "zero" and is_cut(episode) else episode.reward for episode in episodes]


def episode_sequences(
    episodes: Sequence[PlayedEpisode], *, truncated: Truncated = "keep", routes: bool = False
) -> list[TokenSequence]:
    """A sequence for each segment of each episode; an episode without a sampled token has none.

    Token fields: ``loss_mask`` on the predictions of sampled tokens, ``rollout_log_probs``, and ``token_rewards``, float64,
    at the prediction of a turn's last token. Sequence fields: ``episode``, ``episode_cut`` and ``episode_share``, the part
    of the episode's sampled tokens that the sequence has, with which ``seq-mean-*`` losses count an episode once. With
    ``routes`` those of the engine too, and ``sampling_mask`` where engines return masks.

    Raises:
        BatchError: a segment whose parts differ in length, whose first token is sampled, or that lacks routes; masks of some
            segments alone.
    """
    if truncated not in ("keep", "zero", "mask"):
        raise ConfigError.of("truncated", truncated, "must be keep, zero or mask")
    found, masks = list[TokenSequence](), list[SamplingMask | None]()
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
            sequence = TokenSequence(torch.tensor(segment.token_ids, dtype=torch.int64), fields, of_episode)
            found.append(_of_trained_tokens(sequence))
            masks.append(segment.sampling_mask)
    return _with_masks(found, masks)


def episode_lengths(sequences: Sequence[TokenSequence], episodes: int | None = None, *, in_order: bool = True) -> Tensor:
    """(N,) int64: tokens of all sequences of each episode, as if they were one sequence: the ``seq_lens`` of estimators.

    ``episodes`` is their number, with those that have no sequences; None counts those that have. Raises :class:`BatchError`
    for sequences in another order, or, if they must be ``in_order`` of time, an episode that came back to a history that it
    had left.
    """
    order = [int(sequence.sequence_fields[EPISODE]) for sequence in sequences]
    runs = [number for number, _ in groupby(order)]
    if runs != sorted(set(order)):
        raise BatchError(
            f"sequences are of episodes {order}; those of an episode must stand next to each other, in the order in which "
            "episode_sequences made them",
            name=EPISODE,
        )
    for number, sequence in zip(order, sequences, strict=True):
        if in_order and not bool(sequence.sequence_fields[IN_ORDER]):
            raise BatchError(
                f"episode {number} came back to a history that it had left, so its sequences are not in the order of time, "
                "which estimates over tokens (gae, reinforce_plus_plus) need; use grpo, dr_grpo, rloo or "
                "reinforce_plus_plus_baseline, or begin a new history in place of an earlier one",
                name=IN_ORDER,
            )
    lengths = dict.fromkeys(runs if episodes is None else range(episodes), 0)
    for number, sequence in zip(order, sequences, strict=True):
        lengths[number] += len(sequence)
    return torch.tensor(list(lengths.values()), dtype=torch.int64)


def final_values(sequences: Sequence[TokenSequence], values: Sequence[Tensor]) -> Tensor:
    """(N,): of ``values``, (L,) of each sequence, that of the state that each episode was cut off in; 0 where it ended."""
    last = {int(sequence.sequence_fields[EPISODE]): index for index, sequence in enumerate(sequences)}
    return torch.stack(
        [values[index][-1] * sequences[index].sequence_fields[CUT].to(values[index]) for index in last.values()]
    )


def episode_parts(
    sequences: Sequence[TokenSequence], groups: Sequence[int], parts: int, least: int = 1
) -> list[list[TokenSequence]]:
    """What each update of a step trains on: at most ``parts``, each of whole groups of episodes.

    Args:
        groups: of each episode, masked ones too, the number of its group; episodes of a group stand next to each other.
        least: sequences of each of several parts: the data-parallel ranks.
    """
    # Sequences that are masked as a whole are left out, so that no part is without a trained token.
    left = [sequence for sequence in sequences if bool(sequence.token_fields["loss_mask"].any())]
    if not left:
        raise BatchError(f"none of the {len(sequences)} sequences that are left of a step has a token to train on")
    of_groups = [
        list(members) for _, members in groupby(left, key=lambda sequence: groups[int(sequence.sequence_fields[EPISODE])])
    ]
    # As many updates as still give every rank a sequence in each.
    for count in range(min(parts, len(of_groups)), 1, -1):
        bounds = [len(of_groups) * index // count for index in range(count + 1)]
        found = [[each for members in of_groups[start:stop] for each in members] for start, stop in pairwise(bounds)]
        if all(len(part) >= least for part in found):
            return found
    return [left]


def truncated_share(episodes: Collection[PlayedEpisode]) -> float:
    return sum(map(is_cut, episodes)) / len(episodes)


def _in_order(segments: Sequence[SampledSegment], turns: Sequence[SampledTurn]) -> bool:
    flat = [
        token for segment in segments for token, sampled in zip(segment.token_ids, segment.sampled, strict=True) if sampled
    ]
    return not turns or flat == [token for turn in turns if turn.trained for token in turn.token_ids]


def _at_sampled_tokens(segments: Sequence[SampledSegment]) -> list[list[float]]:
    # The reward of a turn that is not trained goes to the last trained token before it, or to the first of the episode, so
    # that no estimator loses it.
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
    if segment.sampled[0]:
        raise BatchError(f"{where}: the first token of a segment is sampled; a turn needs at least one token before it")
    # Each value goes to the position that predicts its token.
    placed = {"loss_mask": segment.sampled, "rollout_log_probs": segment.log_probs}
    fields = {name: torch.tensor([*values[1:], 0], dtype=torch.float32) for name, values in placed.items()}
    return fields | {TOKEN_REWARDS: torch.tensor([*rewards[1:], 0], dtype=torch.float64)}


def _route_fields(segment: SampledSegment, where: str) -> dict[str, Tensor]:
    # Each row comes from the pass that sampled the next token, so its weights are those of that token.
    if segment.routes is None:
        raise BatchError(f"{where}: a segment has no routes; ask for them with RolloutConfig(return_routed_experts=True)")
    # The array may lie in Ray's object store, which nobody may write to and torch knows no read-only tensors.
    return route_fields(torch.from_numpy(segment.routes.copy()), len(segment.token_ids))


type Advantage = Literal["grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]


class SampledResponse(Protocol):
    """A prompt with one response, as :class:`~actors.rollout.messages.Sample` is."""

    @property
    def prompt_ids(self) -> Sequence[int]: ...
    @property
    def response_ids(self) -> Sequence[int]: ...
    @property
    def log_probs(self) -> Sequence[float]: ...
    @property
    def sampling_mask(self) -> SamplingMask | None: ...

    def with_routes(self, sequence: TokenSequence) -> TokenSequence: ...


def to_sequences(samples: Sequence[SampledResponse], *, routes: bool = False) -> list[TokenSequence]:
    """Prompt and response of each sample, with ``loss_mask`` and ``rollout_log_probs``; with ``routes`` the engine's too.

    Where engines return masks they are ``sampling_mask``. Log-probs and entropy are computed for response tokens alone.

    Raises:
        BatchError: a sample that lacks routes; masks of some samples alone.
    """
    sequences = [
        _of_trained_tokens(
            TokenSequence.from_prompt_and_response(
                sample.prompt_ids, sample.response_ids, response_fields={"rollout_log_probs": sample.log_probs}
            )
        )
        for sample in samples
    ]
    sequences = _with_masks(sequences, [sample.sampling_mask for sample in samples])
    if not routes:
        return sequences
    return [sample.with_routes(sequence) for sample, sequence in zip(samples, sequences, strict=True)]


def _of_trained_tokens(sequence: TokenSequence) -> TokenSequence:
    # Nobody reads log-probs of prompts, and each costs a product with the whole vocabulary.
    following = sequence.input_ids.roll(-1).where(sequence.token_fields["loss_mask"] != 0, -100)
    return sequence.with_fields({TARGET_IDS: following})


def _with_masks(sequences: list[TokenSequence], masks: Sequence[SamplingMask | None]) -> list[TokenSequence]:
    """With the masks of the last tokens of each, as many as it has rows: all of one width, at the positions before them."""
    given = [mask for mask in masks if mask is not None]
    if not given:
        return sequences
    if len(given) != len(masks):
        raise BatchError(
            f"{len(given)} of {len(masks)} samples have a mask: take all from engines with return_sampling_mask, or none",
            name=SAMPLING_MASK,
        )
    width, found = max(mask.shape[1] for mask in given), list[TokenSequence]()
    for sequence, mask in zip(sequences, given, strict=True):
        placed = torch.full((len(sequence), width), -1, dtype=torch.int32)
        # Nothing predicts the first token. A copy: the array may lie in Ray's object store.
        rows = torch.from_numpy(mask[-(len(sequence) - 1) :].copy())
        placed[len(sequence) - 1 - len(rows) : -1, : rows.shape[1]] = rows
        found.append(sequence.with_fields({SAMPLING_MASK: placed}))
    return found


def with_outputs(sequences: Sequence[TokenSequence], outputs: Mapping[str, Sequence[Tensor]]) -> list[TokenSequence]:
    return [
        sequence.with_fields({name: values[index] for name, values in outputs.items()})
        for index, sequence in enumerate(sequences)
    ]


def with_advantages(
    sequences: Sequence[TokenSequence],
    rewards: Sequence[float],
    advantage: Advantage,
    group_size: int | None = None,
    *,
    group_ids: Sequence[int] | None = None,
    kl_coef: float = 0.0,
) -> list[TokenSequence]:
    """Adds ``advantages``, float32: a sequence field where all tokens of a response have the same, else a token field.

    Episodes are compared with each other, whatever number of sequences they have; all sequences of one get its advantage.

    Args:
        sequences: those of one prompt next to each other; or those of :func:`episode_sequences`.
        rewards: one of each sequence, or of each episode, with those that have no sequences.
        group_size: sequences, or episodes, of each prompt.
        group_ids: in its place, of each sequence or episode the number of its group.
        kl_coef: weight of the KL that is taken off the rewards of tokens; only for ``reinforce_plus_plus``.
    """
    played = bool(sequences) and EPISODE in sequences[0].sequence_fields
    if advantage not in ("reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        values = advantages.ADVANTAGE_ESTIMATORS[advantage](rewards, group_size=group_size, group_ids=group_ids)
        owners = [int(each.sequence_fields[EPISODE]) for each in sequences] if played else range(len(rewards))
        return [
            sequence.with_fields(sequence_fields={"advantages": values[owner]})
            for sequence, owner in zip(sequences, owners, strict=True)
        ]
    packed = pack(sequences)
    by_time = advantage == "reinforce_plus_plus"
    lengths = episode_lengths(sequences, len(rewards), in_order=by_time) if played else packed.seq_lens
    mask = packed.token_fields["loss_mask"]
    if advantage == "reinforce_plus_plus":
        of_tokens = rewards_of_tokens(packed.token_fields, lengths, rewards, kl_coef)
        values = advantages.reinforce_plus_plus_advantages(of_tokens, mask, lengths)
    else:
        values = advantages.reinforce_plus_plus_baseline_advantages(
            rewards, mask, lengths, group_size=group_size, group_ids=group_ids
        )
    return with_outputs(sequences, {"advantages": packed.split(values.to(torch.float32))})


def with_episode_gae(
    sequences: Sequence[TokenSequence],
    rewards: Sequence[float],
    *,
    gamma: float,
    lam: float,
    kl_coef: float = 0.0,
) -> list[TokenSequence]:
    """Adds ``advantages``, whitened, and ``returns`` of episodes, float32: PPO over turns.

    The estimate continues from one sequence of an episode to the next, and from an episode that was cut off to the value of
    the state that it was cut off in. ``sequences`` are all of a step, with ``old_values``; other arguments as of
    :func:`with_advantages`.
    """
    packed = pack(sequences)
    fields, mask, lengths = packed.token_fields, packed.token_fields["loss_mask"], episode_lengths(sequences, len(rewards))
    # Episodes without sequences have length 0 and no value.
    behind = torch.zeros(len(rewards), dtype=fields["old_values"].dtype)
    behind[lengths > 0] = final_values(sequences, [each.token_fields["old_values"] for each in sequences])
    of_tokens = rewards_of_tokens(fields, lengths, rewards, kl_coef)
    estimates = gae_advantages(of_tokens, fields["old_values"], mask, lengths, gamma, lam, final_values=behind)
    added = {"advantages": masked_whiten(estimates[0], mask), "returns": estimates[1]}
    return with_outputs(sequences, {name: packed.split(value.to(torch.float32)) for name, value in added.items()})


def rewards_of_tokens(fields: Mapping[str, Tensor], seq_lens: Tensor, rewards: Sequence[float], kl_coef: float) -> Tensor:
    """(T,) float64: each response's reward at its last token, less ``kl_coef`` times the KL to the reference at every token.

    Args:
        fields: packed; ``loss_mask`` and, with ``kl_coef``, ``old_log_probs`` and ``ref_log_probs``. Of episodes also
            ``token_rewards``, which stay where they are; the last token gets what is left of the episode's reward.
        seq_lens: of sequences, or of episodes (:func:`episode_lengths`).
    """
    mask = fields["loss_mask"]
    given = torch.tensor(rewards, dtype=torch.float64)
    if TOKEN_REWARDS in fields:
        of_turns = zero_masked(fields[TOKEN_REWARDS], mask)
        # What rewards of turns do not add up to, such as a group's score, is the last token's.
        left = given - sum_by_sequence(of_turns, seq_lens)
        of_tokens = of_turns + token_rewards(left, mask, seq_lens)
    else:
        of_tokens = token_rewards(given, mask, seq_lens)
    if not kl_coef:
        return of_tokens
    return kl_in_reward(of_tokens, fields["old_log_probs"], fields["ref_log_probs"], mask, kl_coef=kl_coef)


def kl_metrics(sequences: Sequence[TokenSequence]) -> dict[str, float]:
    """``kl``, of the old policy to the reference, in nats per response token: for runs whose loss has no KL that says it."""
    fields = pack(sequences).token_fields
    mask = fields["loss_mask"]
    old, reference = (zero_masked(fields[name], mask) for name in ("old_log_probs", "ref_log_probs"))
    return {"kl": float(masked_sum(kl_penalty(old, reference, "k3"), mask) / mask.sum())}


def update_parts[T](sequences: Sequence[T], group_size: int, updates: int, num_ranks: int) -> Iterator[Sequence[T]]:
    """What each update of a step trains on: whole groups, as many as in the others or one more.

    There are fewer updates than ``updates``, at least one, where they would leave one of ``num_ranks`` data-parallel ranks
    without a sequence.
    """
    groups = len(sequences) // group_size
    if not groups:
        raise BatchError(f"{len(sequences)} responses are left of a step; an update needs a group of {group_size}")
    # A group is never cut: its advantages are relative to each other.
    updates = max(1, min(updates, groups // math.ceil(num_ranks / group_size)))
    for index in range(updates):
        yield sequences[groups * index // updates * group_size : groups * (index + 1) // updates * group_size]
