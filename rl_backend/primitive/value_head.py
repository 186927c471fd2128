"""The head of a critic."""

import torch
from torch import Tensor, nn


class ValueHead(nn.Linear):
    """``hidden @ weight.T + bias``, one number per token; (T, hidden_size) -> (T,) float32 (float64 for float64).

    Computed in float32 or better whatever the dtype of hidden states and weights: bfloat16 would leave a value three
    significant digits. There is no dropout.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        # A sum of its own, not a view of a product: FSDP's hook would be lost when a loss changes a view in place.
        return torch.mv(hidden.to(dtype), self.weight[0].to(dtype)) + self.bias.to(dtype)
