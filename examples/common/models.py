"""A model of a run, with the operations that a training loop starts and waits for later."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from actors import HandleRef, Loss, TrainGroup
from examples.common.router_replay import OLD_POLICY, UPDATE, RouterReplayMode
from rl_backend import TokenSequence
from rl_backend.contracts import Metric, merge_metrics


class Update(NamedTuple):
    """One optimizer step; ``ok`` is False when it was refused because a gradient is not finite."""

    metrics: Mapping[str, Metric]
    ok: bool
    grad_norm: float
    next_lr: float


def update_metrics(updates: Sequence[Update]) -> dict[str, float]:
    """Of a step's updates of one model: means of the metrics, largest gradient norm, share that was taken, next rate.

    The norm is NaN if that of any update is.
    """
    means = {name: metric.mean for name, metric in merge_metrics([update.metrics for update in updates]).items()}
    norms = [update.grad_norm for update in updates]
    return means | {
        "grad_norm": math.nan if any(map(math.isnan, norms)) else max(norms),
        "step_ok": sum(update.ok for update in updates) / len(updates),
        "next_lr": updates[-1].next_lr,
    }


@dataclass(frozen=True)
class Model:
    """A handle and the training group that it lives on.

    Operations on models of one group run one after the other, on models of different groups at the same time.

    Attributes:
        router_replay: in the passes of a policy that is trained; other passes route freely.
    """

    group: TrainGroup
    handle: HandleRef
    router_replay: RouterReplayMode = "off"

    def submit_output(
        self, name: str, sequences: Sequence[TokenSequence], meta: Mapping[str, Any]
    ) -> Callable[[], list[Tensor]]:
        """Starts a forward pass; the result waits and returns an output, one tensor for each sequence."""
        future = self.group.forward.submit(self.handle, sequences, meta=meta)
        return lambda: list(future.result().output(name))

    def submit_old_policy(
        self, sequences: Sequence[TokenSequence], meta: Mapping[str, Any]
    ) -> Callable[[], dict[str, list[Tensor]]]:
        """Starts the forward pass before the updates; the result waits and returns what they need of it, by token field."""
        mode = OLD_POLICY[self.router_replay]
        future = self.group.forward.submit(self.handle, sequences, meta=meta, router_replay=mode)

        def wait() -> dict[str, list[Tensor]]:
            result = future.result()
            recorded = {"routed_experts": list(result.output("routed_experts"))} if mode == "record" else {}
            return {"old_log_probs": list(result.output("log_probs")), **recorded}

        return wait

    def submit_update(self, sequences: Sequence[TokenSequence], loss: Loss, meta: Mapping[str, Any]) -> Callable[[], Update]:
        """Starts an optimizer step on fresh gradients; the result waits for it."""
        cleared = self.group.zero_grad.submit(self.handle)
        gradients = self.group.forward_backward.submit(
            self.handle, sequences, loss, meta=meta, router_replay=UPDATE[self.router_replay]
        )
        step = self.group.optimizer_step.submit(self.handle)
        schedule = self.group.lr_scheduler_step.submit(self.handle)

        def wait() -> Update:
            cleared.result()
            metrics = gradients.result().metrics
            ok, grad_norm, _ = step.result()
            return Update(metrics, ok, grad_norm, schedule.result())

        return wait
