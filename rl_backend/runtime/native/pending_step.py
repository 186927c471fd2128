"""Optimizer post-validation: a step that is taken before the norm of all ranks' gradients is known.

Qi et al., arXiv 2401.10241, section 4: a rank whose own gradients call for neither clipping nor a skip steps at once and
continues with the next pass; when the global norm calls for another, the step is taken back and taken again. Theirs is
undone by arithmetic, this one from a copy, to the last bit.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl_backend.contracts import StepResult
from rl_backend.parallel.collectives import all_gather_into
from rl_backend.parallel.shards import local_tensor
from rl_backend.runtime.native.optimizer import NativeOptimizer

type Gradients = dict[nn.Parameter, Tensor | None]
type Rates = list[tuple[float, float]]
"""Learning rate and weight decay of each parameter group."""


class PendingStep:
    """One optimizer step; making it is a collective over ``group`` that waits for nobody.

    Args:
        optimizer: with gradients, which the step keeps: the caller may drop them, and set other learning rates.
        group: all ranks, for collectives on the CPU.

    Attributes:
        result: None until the step is settled.
        is_taken: whether this rank has stepped at once. Otherwise its own gradients call for clipping or a skip.
    """

    def __init__(self, optimizer: NativeOptimizer, handle_name: str, group: dist.ProcessGroup) -> None:
        optimizer.require_gradients(handle_name)
        self.result: StepResult | None = None
        self._optimizer = optimizer
        self._handle_name = handle_name
        self._gradients: Gradients = {parameter: parameter.grad for parameter in optimizer.parameters.values()}
        self._rates = _rates(optimizer)
        self._backup: list[Tensor] = []
        self._mine = optimizer.statistics().cpu()
        self._rows = self._mine.new_empty(group.size(), self._mine.shape[1])
        self._arriving: dist.Work = all_gather_into(self._rows, self._mine, group=group, async_op=True)
        # Squares only add up: what one rank's norm alone exceeds, the norm of all does.
        own = optimizer.judge(self._mine)
        self.is_taken = self._is_plain(own)
        if self.is_taken:
            self._backup = [tensor.clone() for tensor in self._changed()]
            optimizer.apply(own, handle_name)

    def settle(self) -> StepResult:
        """Waits for the global norm, and if it calls for it takes the step back and again. Changes this rank only."""
        if self.result is None:
            self._arriving.wait()
            self.result = self._optimizer.judge(self._rows)
            if not (self.is_taken and self._is_plain(self.result)):
                with self._as_it_was():
                    if self.is_taken:
                        torch._foreach_copy_(self._changed(), self._backup)
                    self._optimizer.apply(self.result, self._handle_name)
            self._backup.clear()
            self._gradients.clear()
        return self.result

    @property
    def was_plain(self) -> bool:
        """Whether no rank had to take its step back: gradients were finite and not clipped. The same on all ranks."""
        return self._is_plain(self.settle())

    def _is_plain(self, result: StepResult) -> bool:
        return result.ok and not self._optimizer.clips(result)

    def _changed(self) -> list[Tensor]:
        """What a step changes on this rank."""
        stepped = [parameter for parameter, gradient in self._gradients.items() if gradient is not None]
        state = self._optimizer.adamw.state
        return [
            local_tensor(tensor)
            for parameter in stepped
            for tensor in (parameter, *(state[parameter][key] for key in ("exp_avg", "exp_avg_sq", "step")))
        ]

    @contextmanager
    def _as_it_was(self) -> Generator[None]:
        """The gradients and learning rates of the step."""
        now = {parameter: parameter.grad for parameter in self._gradients}, _rates(self._optimizer)
        self._set(self._gradients, self._rates)
        try:
            yield
        finally:
            self._set(*now)

    def _set(self, gradients: Gradients, rates: Rates) -> None:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        for group, (learning_rate, weight_decay) in zip(self._optimizer.adamw.param_groups, rates, strict=True):
            group["lr"], group["weight_decay"] = learning_rate, weight_decay


def _rates(optimizer: NativeOptimizer) -> Rates:
    return [(group["lr"], group["weight_decay"]) for group in optimizer.adamw.param_groups]
