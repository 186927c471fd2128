"""Training sequences from samples, advantages onto them and onto episodes, and what each update of a step trains on."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from rl_backend.algorithm import advantages
from rl_backend.algorithm.episodes import EPISODE, TOKEN_REWARDS, episode_lengths, final_values
from rl_backend.algorithm.loss_aggregation import masked_sum, sum_by_sequence, zero_masked
from rl_backend.algorithm.policy import kl_penalty
from rl_backend.algorithm.rewards import kl_in_reward, token_rewards
from rl_backend.algorithm.value import gae_advantages, masked_whiten
from rl_backend.contracts import BatchError, TokenSequence
from rl_backend.data import pack

type Advantage = Literal["grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]


class SampledResponse(Protocol):
    """A prompt with one response, as :class:`~actors.rollout.messages.Sample` is."""

    @property
    def prompt_ids(self) -> Sequence[int]: ...
    @property
    def response_ids(self) -> Sequence[int]: ...
    @property
    def log_probs(self) -> Sequence[float]: ...

    def with_routes(self, sequence: TokenSequence) -> TokenSequence:
        """Adds the experts that the engine chose."""
        ...


def to_sequences(samples: Sequence[SampledResponse], *, routes: bool = False) -> list[TokenSequence]:
    """Prompt and response of each sample, with ``loss_mask`` and ``rollout_log_probs``; with ``routes`` the engine's too."""
    sequences = [
        TokenSequence.from_prompt_and_response(
            sample.prompt_ids, sample.response_ids, response_fields={"rollout_log_probs": sample.log_probs}
        )
        for sample in samples
    ]
    if not routes:
        return sequences
    return [sample.with_routes(sequence) for sample, sequence in zip(samples, sequences, strict=True)]


def with_outputs(sequences: Sequence[TokenSequence], outputs: Mapping[str, Sequence[Tensor]]) -> list[TokenSequence]:
    """Adds token fields, each given as one (L, ...) tensor for each sequence."""
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

    They are computed of the rewards in float64.

    Episodes are compared with each other, whatever number of sequences they have; all sequences of one get its advantage.

    Args:
        sequences: those of one prompt next to each other; or those of :func:`~rl_backend.algorithm.episode_sequences`.
        rewards: one of each sequence, or of each episode, with those that have no sequences.
        advantage: the estimator.
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
    lengths = episode_lengths(sequences, len(rewards)) if played else packed.seq_lens
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

    A step's reward is at the last sampled token of its turn. The estimate goes on from one sequence of an episode to the
    next, and from an episode that was cut off to the value of the state that it was cut off in.

    Args:
        sequences: all of a step, of :func:`~rl_backend.algorithm.episode_sequences`, with ``old_values``.
        rewards: of each episode, with those that have no sequences. What ``token_rewards`` does not add up to is at the
            episode's last token.
        gamma, lam: see :func:`~rl_backend.algorithm.gae_advantages`.
        kl_coef: weight of the KL that is taken off the rewards of tokens.
    """
    packed = pack(sequences)
    fields, mask, lengths = packed.token_fields, packed.token_fields["loss_mask"], episode_lengths(sequences, len(rewards))
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
        seq_lens: of sequences, or of episodes (:func:`~rl_backend.algorithm.episode_lengths`).
    """
    mask = fields["loss_mask"]
    given = torch.tensor(rewards, dtype=torch.float64)
    if TOKEN_REWARDS in fields:
        of_turns = zero_masked(fields[TOKEN_REWARDS], mask)
        left = given - sum_by_sequence(of_turns, seq_lens)
        of_tokens = of_turns + token_rewards(left, mask, seq_lens)
    else:
        of_tokens = token_rewards(given, mask, seq_lens)
    if not kl_coef:
        return of_tokens
    return kl_in_reward(of_tokens, fields["old_log_probs"], fields["ref_log_probs"], mask, kl_coef=kl_coef)


def kl_metrics(sequences: Sequence[TokenSequence]) -> dict[str, float]:
    """``kl``, of the old policy to the reference, in nats per response token: for runs whose loss has no KL that says it.

    Args:
        sequences: with ``old_log_probs`` and ``ref_log_probs``.
    """
    fields = pack(sequences).token_fields
    mask = fields["loss_mask"]
    old, reference = (zero_masked(fields[name], mask) for name in ("old_log_probs", "ref_log_probs"))
    return {"kl": float(masked_sum(kl_penalty(old, reference, "k3"), mask) / mask.sum())}


def update_parts[T](sequences: Sequence[T], group_size: int, updates: int, num_ranks: int) -> Iterator[Sequence[T]]:
    """What each update of a step trains on: whole groups, as many as in the others or one more.

    Of a step that reward functions have left too little of, there are fewer updates, at least one.

    Args:
        group_size: sequences of each prompt, which stand next to each other.
        updates: of a whole step.
        num_ranks: data-parallel ranks; several updates give each of them a sequence.

    Raises:
        BatchError: no whole group.
    """
    groups = len(sequences) // group_size
    if not groups:
        raise BatchError(f"{len(sequences)} responses are left of a step; an update needs a group of {group_size}")
    updates = max(1, min(updates, groups // math.ceil(num_ranks / group_size)))
    for index in range(updates):
        yield sequences[groups * index // updates * group_size : groups * (index + 1) // updates * group_size]
