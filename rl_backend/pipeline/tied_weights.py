"""Tied weights of a pipeline: the last stage has copies of parameters of the first, and both take the same steps.

So it is with embeddings that are the head too, and with any other parameter of ``ModelFamily.stage_copies``.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl_backend.parallel.shards import local_tensor


def drop_gradients_of_copies(parameters: Mapping[str, nn.Parameter], copies: Mapping[str, str]) -> None:
    """Before a backward pass: the originals already have what the copies gathered in earlier ones.

    Args:
        parameters, copies: see :func:`add_gradients_of_copies`.
    """
    for copy in copies.keys() & parameters.keys():
        parameters[copy].grad = None


def add_gradients_of_copies(
    parameters: Mapping[str, nn.Parameter], copies: Mapping[str, str], group: dist.ProcessGroup
) -> None:
    """Gives a parameter of the first stage and its copy in the last the sum of their gradients.

    Both are the sum of the same two numbers, so the copies stay equal to the last bit. The original's has those of earlier
    calls, the copy's is of this call alone.

    Args:
        parameters: of this rank, by name.
        copies: parameter of the last stage -> parameter of the first stage that it is a copy of.
        group: the ranks of the pipeline.
    """
    for copy, original in copies.items():
        if copy in parameters and parameters[copy].requires_grad and parameters[copy].grad is None:
            # A layer that is trained on detached embeddings gives them no gradient.
            parameters[copy].grad = torch.zeros_like(parameters[copy])
        ends = [parameters[name] for name in (original, copy) if name in parameters]
        here = [_gradient(parameter) for parameter in ends if parameter.requires_grad]
        if len(here) == 2:
            # Stages in the shape of a V: one rank has both ends.
            here[0].add_(here[1])
            here[1].copy_(here[0])
        elif here:
            here[0].add_(_of_other_end(here[0], group))


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None, "every stage ran backward"
    return local_tensor(parameter.grad)


def _of_other_end(mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    """What the last rank of the pipeline has for the first, and the first for the last."""
    other = group.size() - 1 - group.rank()
    theirs = torch.empty_like(mine)
    exchange = [
        dist.P2POp(dist.isend, mine, group=group, group_peer=other),
        dist.P2POp(dist.irecv, theirs, group=group, group_peer=other),
    ]
    for work in dist.batch_isend_irecv(exchange):
        work.wait()
    return theirs
