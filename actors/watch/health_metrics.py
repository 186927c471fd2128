"""Health of a run: warnings in words when its metrics show that it learns nothing, or are beyond a limit of sense."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from actors.options.config import HealthLimits

STEPS = 5
"""Steps in a row that something must have lasted before it is warned of."""

ZERO_GRADIENT = 1e-9
COLLAPSED_ENTROPY = 0.01
"""Nats per token: of choices between two tokens with probabilities of 0.9987 and 0.0013."""

ALL_CUT_OFF = 0.95

UNKNOWN = "are ids that the tokenizer has no token for: they decode to nothing, so nobody who reads the text sees them"
KNOWN = "give the model the tokenizer that it was made with, or leave its vocabulary no other ids (resize_token_embeddings)"


@dataclass(frozen=True)
class Cause:
    """Why a run learns nothing, or not what it should.

    Attributes:
        shows: whether a step's metrics show it; None where they do not say.
        sentence: fields are metrics of the last step, and ``steps``, for how many it has lasted.
        explained_by: causes of which this one follows; it is not told beside them.
        steps: in a row that it must have lasted before it is told.
    """

    shows: Callable[[Mapping[str, float]], bool | None]
    sentence: str
    explained_by: tuple[str, ...] = ()
    steps: int = STEPS


def _where(name: str, shows: Callable[[float], bool]) -> Callable[[Mapping[str, float]], bool | None]:
    return lambda metrics: shows(metrics[name]) if name in metrics else None


def _without_advantages(name: str, value: float) -> Callable[[Mapping[str, float]], bool | None]:
    # Advantages that do not compare the responses to one prompt, or rewards that a loop has shaped, may still differ.
    return lambda metrics: metrics[name] == value and metrics.get("zero_advantages", 1.0) == 1 if name in metrics else None


CAUSES: Mapping[str, Cause] = {
    "skipped_updates": Cause(
        _where("step_ok", lambda taken: taken == 0),
        "every update of the last {steps} steps was skipped because its gradient is not finite; continue from an earlier "
        "checkpoint with a lower lr, and look at the first step in which grad_norm jumps",
    ),
    "one_reward": Cause(
        _without_advantages("reward_std", 0),
        "in each of the last {steps} steps all responses had the same reward ({reward:.3g} in this one), which teaches "
        "nothing; read samples.jsonl, then take prompts that are neither too hard nor solved, or a reward with more levels",
    ),
    "equal_groups": Cause(
        _without_advantages("equal_groups", 1),
        "in the last {steps} steps all responses to each prompt had equal rewards (mean {reward:.3g} in this one), so every "
        "advantage is 0 and nothing is learned; read samples.jsonl, then take prompts that are neither too hard nor solved, "
        "more samples_per_prompt, or a reward with more levels",
        explained_by=("one_reward",),
    ),
    "zero_gradient": Cause(
        _where("grad_norm", lambda norm: norm < ZERO_GRADIENT),
        "the gradient of the last {steps} steps was 0, so nothing is learned; see whether loss_mask selects any token, and "
        "whether clipping or importance weights (clip_fraction, importance_dropped) leave any",
        explained_by=("one_reward", "equal_groups"),
    ),
    "collapsed_entropy": Cause(
        _where("entropy", lambda entropy: entropy < COLLAPSED_ENTROPY),
        f"the entropy of the last {{steps}} steps was below {COLLAPSED_ENTROPY:g} nats per token ({{entropy:.2g}} in this "
        "one), so the policy explores nothing; continue from an earlier checkpoint with a lower lr, a higher temperature, "
        "an entropy_coef or a larger loss.clip_ratio_high",
    ),
    "all_cut_off": Cause(
        _where("responses_cut_off", lambda share: share >= ALL_CUT_OFF),
        f"in each of the last {{steps}} steps at least {ALL_CUT_OFF:.0%} of the responses were cut off by "
        "max_response_tokens ({responses_cut_off:.0%} in this one), so rewards judge unfinished text; raise "
        "max_response_tokens, or see in samples.jsonl whether the model ever writes its end token",
    ),
    "unknown_tokens": Cause(
        _where("unknown_tokens", lambda count: count > 0),
        f"{{unknown_tokens:.0f}} of the sampled tokens {UNKNOWN}, and they are trained on; {KNOWN}",
        steps=1,
    ),
}
"""By name; one that explains another comes before it."""


_METRICS_OF: Mapping[str, tuple[tuple[str, ...], str]] = {
    "log_prob_gap": (("log_prob_gap",), "only runs that sample from engines have it"),
    "kl": (("kl",), "kl_coef above 0 makes one"),
    "skipped_updates": (("step_ok",), "the loop is to log it"),
    "failed_rewards": (("rewards_failed", "episodes_failed"), "on_reward_failure=stop ends the run at the first failure"),
    "free_disk_gib": (("free_disk_gib",), "the file system does not say it"),
}
"""Limit -> the metrics that it watches, and why there may be none."""


def limit_causes(limits: HealthLimits) -> dict[str, Cause]:
    """The causes of the limits that are set."""

    def beyond(limit: float) -> Callable[[float], bool]:
        return lambda value: not value <= limit  # also of NaN

    def below(limit: float) -> Callable[[float], bool]:
        return lambda value: value < limit

    found: dict[str, Cause] = {}
    if limits.skipped_updates is not None:
        found["skipped_updates"] = replace(CAUSES["skipped_updates"], steps=limits.skipped_updates)
    if (most := limits.log_prob_gap) is not None:
        found["log_prob_gap"] = Cause(
            _where("log_prob_gap", beyond(most)),
            f"log-probs of trainer and engine differ by {{log_prob_gap:.3g}} nats per token (health.log_prob_gap={most:g}), "
            "so the run learns from samples of another model; find the step in which log_prob_gap rises, see whether it is "
            "the dtype, the staleness or a push, and continue from a checkpoint before it",
            steps=1,
        )
    if (most := limits.kl) is not None:
        found["kl"] = Cause(
            _where("kl", beyond(most)),
            f"the policy is {{kl:.3g}} nats per token away from the reference (health.kl={most:g}); continue from an "
            "earlier checkpoint with a lower lr or a larger kl_coef",
            steps=1,
        )
    if (most := limits.failed_rewards) is not None:
        for metric, what in ("rewards_failed", "rewards"), ("episodes_failed", "episodes"):
            found[metric] = Cause(
                _where(metric, beyond(most)),
                f"{{{metric}:.0%}} of the step's {what} failed (health.failed_rewards={most:g}); their messages are in "
                "samples.jsonl",
                steps=1,
            )
    if (least := limits.free_disk_gib) is not None:
        found["free_disk"] = Cause(
            _where("free_disk_gib", below(least)),
            f"{{free_disk_gib:.2f}} GiB are free where the run folder is (health.free_disk_gib={least:g}); make room before "
            "the next checkpoint",
            steps=1,
        )
    return found


class HealthWarnings:
    """Watches the metrics of a run's steps, and says in words when it learns nothing, or when a limit is passed.

    Attributes:
        stop: why the run is to end after this step; empty where it may continue.
    """

    def __init__(self, earlier: Mapping[str, Any] | None = None, limits: HealthLimits | None = None) -> None:
        earlier, limits = earlier or {}, limits or HealthLimits()
        watched = limit_causes(limits)
        unwatched = {"skipped_updates"} - watched.keys()
        self._causes = {name: each for name, each in {**CAUSES, **watched}.items() if name not in unwatched}
        self._asked = [name for name in _METRICS_OF if limits.is_set(name) and getattr(limits, name) is not None]
        self._stopping = frozenset(watched) if limits.on_limit == "stop" else frozenset[str]()
        self.stop = ""
        self._lasted: dict[str, int] = dict(earlier.get("lasted", {}))
        self._told: set[str] = set(earlier.get("told", ())) - self._stopping

    @property
    def state(self) -> dict[str, Any]:
        return {"lasted": dict(self._lasted), "told": sorted(self._told)}

    def warnings(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """A sentence for each cause that has lasted its steps and was not told before in the run, and for each limit that
        is set and watches nothing.
        """
        found = []
        for name in self._asked:
            watched, why = _METRICS_OF[name]
            if f"no {name}" not in self._told and not metrics.keys() & set(watched):
                self._told.add(f"no {name}")
                found.append(f"step {step}: health.{name} is set, and this step has no metric {' or '.join(watched)}; {why}")
        for name, cause in self._causes.items():
            shown = cause.shows(metrics)
            if shown is None:
                continue
            self._lasted[name] = self._lasted.get(name, 0) + 1 if shown else 0
            explained = any(self._lasted.get(other) for other in cause.explained_by)
            if self._lasted[name] >= cause.steps and name not in self._told and not explained:
                self._told.add(name)
                # A loop of one's own may log a metric without those that go with it here.
                said = defaultdict(lambda: math.nan, metrics, steps=self._lasted[name])
                found.append(f"step {step}: {cause.sentence.format_map(said)}")
                if name in self._stopping:
                    self.stop = found[-1]
        return found
