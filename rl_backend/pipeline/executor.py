"""Executor of one rank's actions of a schedule, and gradients of weights that two of its stages share."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl_backend.parallel.shards import local_tensor
from rl_backend.pipeline.schedule import RECEIVES, SENDS, Action, Kind, Schedule
from rl_backend.primitive.backward import WeightGradients, put_off_weight_gradients

type _Place = tuple[int, int]  # stage and micro-batch


class StageWork(Protocol):
    """The computations of this rank's stages."""

    def forward(self, stage: int, micro_batch: int, hidden: Tensor | None) -> Tensor | None:
        """From what the stage before put out (None for the first) to what the next one takes.

        The last stage returns the loss, or None in a forward-only pass.
        """

    def empty_hidden(self, micro_batch: int) -> Tensor:
        """Uninitialised hidden states between two stages, of the shape and dtype that this micro-batch has."""

    def after_weights(self, stage: int) -> None:
        """Called when gradients of weights that were put off have been added to those of the stage's parameters."""

    def span(self, action: Action) -> AbstractContextManager[object]:
        """Around a computation, for a trace."""


class PipelineExecutor:
    """Runs the actions of one rank of ``group``, which is that of the same number in the schedule.

    Receives are posted in their places and waited for when they are needed. Micro-batches may differ in length.

    Attributes:
        peak_activations: the most activations held at once, as :attr:`Schedule.activation_bound` counts them.
    """

    def __init__(self, schedule: Schedule, group: dist.ProcessGroup, work: StageWork) -> None:
        self._schedule = schedule
        self._group = group
        self._rank = group.rank()
        self._work = work
        # Hidden states and gradients for another stage, by the receive that is, or would be, its end of the transfer.
        self._ready: dict[Action, Tensor] = {}
        # Input and output of each forward pass, until its backward pass.
        self._activations: dict[_Place, tuple[Tensor | None, Tensor]] = {}
        self._put_off: dict[_Place, WeightGradients] = {}
        self._arriving: dict[Action, tuple[dist.Work, Tensor]] = {}
        self._departing: list[tuple[dist.Work, Tensor]] = []
        self.peak_activations = 0

    def run(self) -> None:
        """Runs all actions. A collective over the pipeline's ranks."""
        steps = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD_WEIGHT: self._backward_weight,
            **dict.fromkeys((Kind.BACKWARD, Kind.BACKWARD_INPUT), self._backward),
            **dict.fromkeys(SENDS, self._send),
            **dict.fromkeys(RECEIVES, self._receive),
        }
        # Transfers are posted in the order of one global sequence of events: no rank can wait for another in a circle, even
        # where a backend works a rank's transfers off one after the other.
        for action in self._schedule.actions[self._rank]:
            steps[action.kind](action)
        for work, _ in (*self._departing, *self._arriving.values()):
            work.wait()
        self._departing.clear()
        self._arriving.clear()

    def _forward(self, action: Action) -> None:
        _, stage, micro_batch = action
        hidden = None
        if stage > 0:
            hidden = self._take(action._replace(kind=Kind.RECEIVE_ACTIVATION))
            hidden.requires_grad_(not self._schedule.forward_only)
        with self._work.span(action):
            output = self._work.forward(stage, micro_batch, hidden)
        if not self._schedule.forward_only:
            assert output is not None, "a pass with a backward pass has a loss"
            self._activations[stage, micro_batch] = hidden, output
            self.peak_activations = max(self.peak_activations, len(self._activations) + len(self._put_off))
        if stage + 1 < self._schedule.num_stages:
            assert output is not None, "only the last stage returns nothing"
            # Each stage has its own graph; gradients cross from one to the other as tensors.
            self._ready[Action(Kind.RECEIVE_ACTIVATION, stage + 1, micro_batch)] = output.detach()

    def _backward(self, action: Action) -> None:
        _, stage, micro_batch = action
        gradient = None
        if stage + 1 < self._schedule.num_stages:
            gradient = self._take(action._replace(kind=Kind.RECEIVE_GRADIENT))
        hidden, output = self._activations.pop((stage, micro_batch))
        with self._work.span(action):
            if action.kind is Kind.BACKWARD_INPUT:
                with put_off_weight_gradients() as put_off:
                    torch.autograd.backward([output], [gradient])
                self._put_off[stage, micro_batch] = put_off
            else:
                torch.autograd.backward([output], [gradient])
        if hidden is not None:
            assert hidden.grad is not None, "the output depends on the input"
            self._ready[Action(Kind.RECEIVE_GRADIENT, stage - 1, micro_batch)] = hidden.grad

    def _backward_weight(self, action: Action) -> None:
        with self._work.span(action):
            self._put_off.pop((action.stage, action.micro_batch)).compute()
            self._work.after_weights(action.stage)

    def _send(self, action: Action) -> None:
        tensor = self._ready.pop(action.other_end).contiguous()
        # A tensor must live until its transfer has ended.
        self._departing = [(work, sent) for work, sent in self._departing if not work.is_completed()]
        work = dist.isend(tensor, group=self._group, group_dst=self._schedule.placement[action.other_end.stage])
        assert work is not None, "this rank is in the group"
        self._departing.append((work, tensor))

    def _receive(self, action: Action) -> None:
        tensor = self._work.empty_hidden(action.micro_batch)
        work = dist.irecv(tensor, group=self._group, group_src=self._schedule.placement[action.other_end.stage])
        assert work is not None, "this rank is in the group"
        self._arriving[action] = (work, tensor)

    def _take(self, receive: Action) -> Tensor:
        """What another stage made, on another rank or, where nothing is received, on this one."""
        if receive not in self._arriving:
            return self._ready.pop(receive)
        work, tensor = self._arriving.pop(receive)
        work.wait()
        return tensor


def drop_gradients_of_copies(parameters: Mapping[str, nn.Parameter], copies: Mapping[str, str]) -> None:
    """Before a backward pass: the originals already have what the copies gathered in earlier ones."""
    for copy in copies.keys() & parameters.keys():
        parameters[copy].grad = None


def add_gradients_of_copies(
    parameters: Mapping[str, nn.Parameter], copies: Mapping[str, str], group: dist.ProcessGroup
) -> None:
    """Gives a parameter of the first stage and its copy in the last the sum of their gradients.

    Both are the sum of the same two numbers, so the copies stay equal to the last bit. The original's has those of
    earlier calls, the copy's is of this call alone. ``copies``: parameter of the last stage -> that of the first stage of
    which it is a copy: ``ModelFamily.stage_copies``.
    """
    for copy, original in copies.items():
        if copy in parameters and parameters[copy].requires_grad and parameters[copy].grad is None:
            # A layer that is trained on detached embeddings gives them no gradient.
            parameters[copy].grad = torch.zeros_like(parameters[copy])
        ends = [parameters[name] for name in (original, copy) if name in parameters]
        here = [_local_gradient(parameter) for parameter in ends if parameter.requires_grad]
        if len(here) == 2:
            # Stages in the shape of a V: one rank has both ends.
            here[0].add_(here[1])
            here[1].copy_(here[0])
        elif here:
            here[0].add_(_of_other_end(here[0], group))


def _local_gradient(parameter: nn.Parameter) -> Tensor:
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
