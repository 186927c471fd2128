"""A model of a run: a handle with its group, and the operations that a loop starts and waits for later."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from torch import Tensor

from actors.train.context import HandleRef
from actors.train.group import TrainGroup
from actors.train.loss import Loss
from rl_backend.checkpoint.hf_reader import read_hf_config
from rl_backend.contracts import TOKENS_COMPUTED, ConfigError, Metric, TokenSequence, merge_metrics, text_config
from rl_backend.runtime import RouterReplay

type RouterReplayMode = Literal["off", "R2", "R3"]
"""``R2``: the pass for the old log-probs records routes, updates replay them. ``R3``: both replay vLLM's."""

BEFORE_UPDATES: dict[RouterReplayMode, RouterReplay] = {"off": "off", "R2": "record", "R3": "replay"}
UPDATE: dict[RouterReplayMode, RouterReplay] = {"off": "off", "R2": "replay", "R3": "replay"}

_NUMBER_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


class Update(NamedTuple):
    """One optimizer step; ``ok`` is False when it was refused because a gradient is not finite."""

    metrics: Mapping[str, Metric]
    ok: bool
    grad_norm: float
    next_lr: float


def update_metrics(updates: Sequence[Update]) -> dict[str, float]:
    merged = merge_metrics([update.metrics for update in updates])
    means = {name: metric.mean for name, metric in merged.items()}
    if TOKENS_COMPUTED in merged:
        means |= {TOKENS_COMPUTED: merged[TOKENS_COMPUTED].sum, "tokens_trained": merged[TOKENS_COMPUTED].weight}
    norms = [update.grad_norm for update in updates]
    # max() may pass over a NaN.
    return means | {
        "grad_norm": math.nan if any(map(math.isnan, norms)) else max(norms),
        "step_ok": sum(update.ok for update in updates) / len(updates),
        "next_lr": updates[-1].next_lr,
    }


class TokenCount:
    """Tokens of a model's passes whose results have come; an update counts once."""

    def __init__(self) -> None:
        self._tokens = 0

    def add(self, sequences: Sequence[TokenSequence]) -> None:
        self._tokens += sum(map(len, sequences))

    def take(self) -> int:
        tokens, self._tokens = self._tokens, 0
        return tokens


@dataclass(eq=False)
class GroupModel:
    """The reference to a model of a run: a handle, and the training group that it lives on.

    Operations on models of one group run one after the other, on models of different groups at the same time.

    Attributes:
        router_replay: in the passes of a policy that is trained; other passes route freely.
        base: the frozen model below a LoRA tenant; None for a model of its own.
        hf_path: directory of the weights that it began with; empty where nobody asks.
    """

    group: TrainGroup
    handle: HandleRef
    router_replay: RouterReplayMode = "off"
    base: HandleRef | None = None
    hf_path: str = ""
    tokens: TokenCount = field(default_factory=TokenCount, repr=False)

    def to(self, device: Literal["cpu", "device"], *, model: bool = True) -> None:
        """Moves all of it to host memory or back, or, without ``model``, gradients and optimizer alone.

        The frozen model below a LoRA tenant goes with it.
        """
        self.group.to(self.handle, device, model=model)
        if self.base is not None and model:
            self.group.to(self.base, device)

    def submit_outputs(
        self,
        fields: Mapping[str, str],
        sequences: Sequence[TokenSequence],
        meta: Mapping[str, Any],
        *,
        before_updates: bool = False,
    ) -> Callable[[], dict[str, list[Tensor]]]:
        """Starts a forward pass; the result waits and returns outputs, by the token field that each becomes.

        Args:
            fields: token field -> output, as in ``{"old_log_probs": "log_probs"}``.
            before_updates: the pass of a policy that is updated next. It records or replays routes, as ``router_replay``
                says; recorded ones become the field ``routed_experts``, and the entropy ``old_entropy``.
        """
        mode = BEFORE_UPDATES[self.router_replay] if before_updates else "off"
        wanted = {**fields, "routed_experts": "routed_experts"} if mode == "record" else fields
        meta = {**meta, "calculate_entropy": before_updates or "entropy" in fields.values()}
        future = self.group.forward.submit(self.handle, sequences, meta=meta, router_replay=mode)

        def wait() -> dict[str, list[Tensor]]:
            result = future.result()
            self.tokens.add(sequences)
            found = {field: list(result.output(name)) for field, name in wanted.items()}
            # Policy losses make a metric of it, and need no gradient for that. A plugin's runtime need not know it.
            if before_updates and "entropy" in result.outputs:
                found["old_entropy"] = list(result.output("entropy"))
            return found

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
            self.tokens.add(sequences)
            return Update(metrics, ok, grad_norm, schedule.result())

        return wait

    def outputs(
        self,
        fields: Mapping[str, str],
        sequences: Sequence[TokenSequence],
        meta: Mapping[str, Any],
        *,
        before_updates: bool = False,
    ) -> dict[str, list[Tensor]]:
        return self.submit_outputs(fields, sequences, meta, before_updates=before_updates)()

    def update(self, sequences: Sequence[TokenSequence], loss: Loss, meta: Mapping[str, Any] | None = None) -> Update:
        return self.submit_update(sequences, loss, meta or {})()


def require_experts(option: str, mode: RouterReplayMode, model: str) -> None:
    """Refuses replay for a dense model, whose ``config.json`` names no experts."""
    if mode == "off":
        return
    config = text_config(read_hf_config(model))
    if not any(config.get(name) for name in _NUMBER_OF_EXPERTS):
        raise ConfigError.of(
            option,
            mode,
            f"{model} is a dense model (its config.json has none of {', '.join(_NUMBER_OF_EXPERTS)}); use off",
        )


def require_known_end(option: str, model: str, tokenizer: Any) -> None:
    """Refuses a tokenizer that ends a text with a token that the model does not have."""
    vocab_size = text_config(read_hf_config(model)).get("vocab_size")
    if isinstance(vocab_size, int) and tokenizer.eos_token_id >= vocab_size:
        raise ConfigError.of(
            option,
            model,
            f"its tokenizer ends a text with token {tokenizer.eos_token_id} ({tokenizer.eos_token}), and the model has "
            f"{vocab_size} tokens, 0 to {vocab_size - 1}; give the tokenizer that belongs to it",
        )
