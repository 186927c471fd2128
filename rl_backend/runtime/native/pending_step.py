"""Optimizer post-validation: a step that is taken before the norm of all ranks' gradients is known.

Qi et al., arXiv 2401.10241, section 4: a rank whose own gradients call for neither clipping nor a skip steps at once and
goes on with the next pass; when the global norm says otherwise, the step is taken back and taken again. Theirs is undone by
arithmetic, this one from a copy, to the last bit.
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
    """

    def __init__(self, optimizer: NativeOptimizer, handle_name: str, group: dist.ProcessGroup) -> None:
        optimizer.require_gradients(handle_name)
        self._optimizer = optimizer
        self._handle_name = handle_name
        self._result: StepResult | None = None
        self._gradients: Gradients = {parameter: parameter.grad for parameter in optimizer.parameters.values()}
        self._rates = _rates(optimizer)
        self._backup: list[Tensor] | None = None
        mine = optimizer.statistics().cpu()
        self._rows = mine.new_empty(group.size(), mine.numel())
        self._mine = mine
        self._arriving: dist.Work = all_gather_into(self._rows, mine, group=group, async_op=True)
        # Squares only add up: what one rank's norm alone exceeds, the norm of all does.
        own = optimizer.judge(mine.view(1, -1))
        if own.ok and not optimizer.clips(own):
            self._backup = [tensor.clone() for tensor in self._changed()]
            optimizer.apply(own, handle_name)
        else:
            self.settle()

    def settle(self) -> StepResult:
        """Waits for the global norm, and if it calls for it takes the step back and again. Changes this rank only."""
        if self._result is None:
            self._arriving.wait()
            result = self._optimizer.judge(self._rows)
            if self._backup is None:
                self._optimizer.apply(result, self._handle_name)
            elif not result.ok or self._optimizer.clips(result):
                torch._foreach_copy_(self._changed(), self._backup)
                with self._as_it_was():
                    self._optimizer.apply(result, self._handle_name)
            self._result = result
            self._backup = None
            self._gradients.clear()
        return self._result

    @property
    def amended(self) -> bool:
        """Whether a rank that stepped at once had to take its step back. Known when it is settled; the same on all ranks."""
        result = self.settle()
        return not result.ok or self._optimizer.clips(result)

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
