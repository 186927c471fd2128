"""Training sequences from samples, and advantages onto them."""

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from rl_backend.algorithm import advantages
from rl_backend.algorithm.rewards import kl_in_reward, token_rewards
from rl_backend.contracts import TokenSequence
from rl_backend.data import pack

type Advantage = Literal["grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]


class SampledResponse(Protocol):
    """A prompt with one response, as :class:`~actors.rollout.sample.Sample` is."""

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
    group_size: int,
    *,
    kl_coef: float = 0.0,
) -> list[TokenSequence]:
    """Adds ``advantages``: a sequence field where all tokens of a response have the same, else a token field.

    Args:
        sequences: those of one prompt next to each other.
        rewards: one of each sequence.
        advantage: the estimator.
        group_size: sequences of each prompt.
        kl_coef: weight of the KL that is taken off the rewards of tokens; only for ``reinforce_plus_plus``.
    """
    if advantage not in ("reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        values = advantages.ADVANTAGE_ESTIMATORS[advantage](torch.tensor(rewards), group_size=group_size)
        return [
            sequence.with_fields(sequence_fields={"advantages": value})
            for sequence, value in zip(sequences, values, strict=True)
        ]
    packed = pack(sequences)
    mask, seq_lens = packed.token_fields["loss_mask"], packed.seq_lens
    if advantage == "reinforce_plus_plus":
        of_tokens = rewards_of_tokens(packed.token_fields, seq_lens, rewards, kl_coef)
        values = advantages.reinforce_plus_plus_advantages(of_tokens, mask, seq_lens)
    else:
        values = advantages.reinforce_plus_plus_baseline_advantages(rewards, mask, seq_lens, group_size=group_size)
    return with_outputs(sequences, {"advantages": packed.split(values)})


def rewards_of_tokens(fields: Mapping[str, Tensor], seq_lens: Tensor, rewards: Sequence[float], kl_coef: float) -> Tensor:
    """(T,): each response's reward at its last token, less ``kl_coef`` times the KL to the reference at every token.

    Args:
        fields: packed; ``loss_mask`` and, with ``kl_coef``, ``old_log_probs`` and ``ref_log_probs``.
    """
    mask = fields["loss_mask"]
    of_tokens = token_rewards(torch.tensor(rewards), mask, seq_lens)
    if not kl_coef:
        return of_tokens
    return kl_in_reward(of_tokens, fields["old_log_probs"], fields["ref_log_probs"], mask, kl_coef=kl_coef)
