"""Advantages per token from a critic's values.

Everything is aligned as :mod:`rl_backend.contracts.batch` defines. At position t the state is the sequence up to and with
token t, the action is the choice of token t+1, and ``values[t]``, which belongs to token t, is the value of that state. So
entry t of ``values``, ``token_rewards``, ``loss_mask``, advantages, returns and ``log_probs`` is about one and the same
action: a critic's ``values`` are used as they come, without a shift.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_backend.algorithm.sequences import check_finite, check_packed
from rl_backend.contracts import ConfigError


@torch.no_grad()
def gae_advantages(
    token_rewards: Tensor,
    values: Tensor,
    loss_mask: Tensor,
    seq_lens: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation: ``A_t = delta_t + gamma lam A_next``, ``delta_t = r_t + gamma V_next - V_t``.

    ``next`` is the next *selected* token of the same sequence: tokens that the policy did not choose, such as a tool's
    answer inside a response, are stepped over without discount. After the last selected token the episode is over: both are
    0. The arithmetic is done in float64.

    Sources: GAE, https://arxiv.org/abs/1506.02438, equation 16; verl's ``compute_gae_advantage_return``, which whitens the
    advantages too: :func:`~rl_backend.algorithm.whitening.masked_whiten` does that here.

    Args:
        token_rewards: (T,) floating, see :func:`~rl_backend.algorithm.rewards.token_rewards`.
        values: (T,) floating, of the critic that saw the batch before its update.
        loss_mask: (T,); selects where it is not 0; the others are not read elsewhere.
        seq_lens: (B,) int64 on the CPU.
        gamma: discount, within [0, 1].
        lam: within [0, 1]; 1 gives the return less the value, 0 the temporal difference.

    Returns:
        Advantages and returns (``advantages + values``, what the critic learns), (T,) each, in the dtype of ``values``,
        without gradient, 0 where ``loss_mask`` is 0.

    Raises:
        BatchError: shapes, or a reward or value of a selected token that is not finite.
        ConfigError: ``gamma`` or ``lam``.
    """
    for name, option in (("gamma", gamma), ("lam", lam)):
        if not 0 <= option <= 1:
            raise ConfigError.of(name, option, "must be within [0, 1]")
    check_packed(seq_lens, token_rewards=token_rewards, values=values, loss_mask=loss_mask)
    check_finite(loss_mask, token_rewards=token_rewards, values=values)

    selected = loss_mask != 0
    counts = [int(part.sum()) for part in torch.split(selected, seq_lens.tolist())]
    rewards = _one_row_per_sequence(token_rewards[selected], counts)
    state_values = _one_row_per_sequence(values[selected], counts)
    next_values = torch.nn.functional.pad(state_values[:, 1:], (0, 1))
    deltas = rewards + gamma * next_values - state_values

    rows = torch.zeros_like(deltas)
    following = deltas.new_zeros(len(counts))
    for column in reversed(range(deltas.shape[1])):
        following = deltas[:, column] + gamma * lam * following
        rows[:, column] = following
    real = torch.arange(deltas.shape[1], device=deltas.device) < torch.tensor(counts, device=deltas.device)[:, None]
    zeros = torch.zeros_like(values)
    advantages = zeros.masked_scatter(selected, rows[real].to(values.dtype))
    returns = zeros.masked_scatter(selected, (rows + state_values)[real].to(values.dtype))
    return advantages, returns


def explained_variance(values: Tensor, returns: Tensor, loss_mask: Tensor) -> float:
    """``1 - Var(returns - values) / Var(returns)`` over the selected tokens: 1 for a perfect critic, 0 for a constant one.

    NaN when the returns are all equal: there is no variance to explain.

    Args:
        values, returns, loss_mask: (T,).
    """
    selected = loss_mask != 0
    chosen = returns[selected].to(torch.float64)
    if chosen.numel() == 0 or bool((chosen == chosen[0]).all()):
        return float("nan")
    error = chosen - values[selected].to(torch.float64)
    return 1.0 - (error.var(correction=0) / chosen.var(correction=0)).item()


def _one_row_per_sequence(selected: Tensor, counts: list[int]) -> Tensor:
    """(B, largest count) float64 with zeros at the end of each row."""
    parts = torch.split(selected.to(torch.float64), counts)
    return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)
