"""The gradient of next-token log-probs and entropy, from logits that are computed again tile by tile."""

from typing import NamedTuple

import torch
from torch import Tensor

from rl_backend.primitive.tiles import Tile, Tokens, add_matmul, buffers_for, vocabulary_slices, wide


class NextTokenGradient(NamedTuple):
    """What the backward pass knows of each active token; all (N, 1)."""

    log_prob: Tensor
    entropy: Tensor | None
    entropy_value: Tensor
    log_normalizer: Tensor

    def of_logits(self, chunk: slice, tile: Tile, buffers: list[Tensor]) -> Tensor:
        """Gradient of the loss with respect to a tile's logits before the division by the temperature.

        d log p_y / d x_v = [v = y] - p_v and d H / d x_v = -p_v (log p_v + H).
        """
        log_p = tile.logits(buffers[0]).sub_(self.log_normalizer[chunk])
        grad = self.log_prob[chunk]
        at_label = grad.masked_fill(~tile.inside[:, None], 0.0)
        if self.entropy is None:
            result = log_p.exp_().mul_(-grad)
        else:
            grad_entropy = self.entropy[chunk]
            result = torch.exp(log_p, out=buffers[1][: log_p.numel()].view_as(log_p))
            # A probability of 0 has no entropy gradient, though its logarithm may be -inf.
            log_p.masked_fill_(result == 0, 0.0)
            result.mul_(log_p.mul_(-grad_entropy).sub_(grad + grad_entropy * self.entropy_value[chunk]))
        result.scatter_add_(1, tile.column, at_label)
        return result if tile.temperature is None else result.div_(tile.temperature)


def gradients_of(
    tokens: Tokens,
    weight: Tensor,
    gradient: NextTokenGradient,
    chunk_tokens: int,
    need_hidden: bool,
    need_weight: bool,
    grad_wide: Tensor | None,
    grad_bias: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of hidden states and weight, and that of what an adapter narrows; adds to the last two."""
    dtype = wide(weight.dtype)
    grad_tokens = torch.zeros_like(tokens.hidden, dtype=dtype) if need_hidden else None
    grad_weight = torch.empty_like(weight) if need_weight else None
    grad_narrow = None if tokens.added is None else torch.zeros_like(tokens.added.narrow, dtype=dtype)
    chunks = tokens.chunks(chunk_tokens)
    if not chunks and grad_weight is not None:
        grad_weight.zero_()
    buffers = buffers_for(tokens, weight, chunk_tokens, count=1 if gradient.entropy is None else 2)
    for words in vocabulary_slices(tokens, weight, chunk_tokens) if chunks else ():
        direct = grad_weight is not None and grad_weight.dtype == dtype
        target = grad_weight[words] if direct and grad_weight is not None else None
        if need_weight and not direct:
            target = torch.empty_like(weight[words], dtype=dtype)
        for chunk in chunks:
            tile = Tile.of(tokens, chunk, weight, words)
            exact = gradient.of_logits(chunk, tile, buffers)
            if grad_bias is not None:
                grad_bias[words] += exact.sum(0)
            grad_logits = exact.to(weight.dtype)
            if grad_tokens is not None:
                add_matmul(grad_tokens[chunk], grad_logits, tile.weight, beta=1)
            if target is not None:
                add_matmul(target, grad_logits.t(), tile.hidden, beta=0 if chunk.start == 0 else 1)
            if tile.added is not None and grad_narrow is not None and grad_wide is not None:
                add_matmul(grad_narrow[chunk], grad_logits, tile.added.wide, beta=1)
                add_matmul(grad_wide[words], grad_logits.t(), tile.added.narrow, beta=1)
        if grad_weight is not None and target is not None and not direct:
            grad_weight[words] = target
    return grad_tokens, grad_weight, grad_narrow
