"""What the metrics of a run are called, measured in and shown beside."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

PHASE = "seconds/"


@dataclass(frozen=True)
class Chart:
    """A chart of one or more metrics.

    Attributes:
        names: of the metrics, drawn in this order.
        log: logarithmic where the values span decades.
        full_range: from 0 to 1.
        note: one sentence on what a reader looks for.
    """

    group: str
    title: str
    unit: str
    names: tuple[str, ...]
    log: bool = False
    note: str = ""
    full_range: bool = False


LEARNING, UPDATE, AGREEMENT, CRITIC, OTHER = (
    "Does it learn?",
    "Is the update sound?",
    "Do trainer and engines agree?",
    "The critic",
    "Other metrics",
)

CHARTS = (
    Chart(LEARNING, "Reward", "mean per response", ("reward",), note="Rises, then levels off."),
    Chart(
        LEARNING,
        "Held-out accuracy",
        "share",
        ("accuracy",),
        note="Falls while the reward rises: overfitting.",
        full_range=True,
    ),
    Chart(
        LEARNING,
        "Answer probability",
        "share",
        ("answer_probability",),
        note="Of exactly the held-out answer.",
        full_range=True,
    ),
    Chart(LEARNING, "Response length", "tokens, mean", ("response_tokens",), note="At the limit: responses are cut off."),
    Chart(LEARNING, "Entropy", "nats per token", ("entropy",), note="Near 0: nothing is explored any more."),
    Chart(LEARNING, "Negative log-likelihood", "nats per token", ("nll",), note="Falls."),
    Chart(LEARNING, "Groups without a signal", "left out", ("groups_without_signal",), note="Equal rewards teach nothing."),
    Chart(
        LEARNING,
        "Batches sampled",
        "for one step",
        ("batches_sampled",),
        note="Rises as prompts become too easy or too hard.",
    ),
    Chart(UPDATE, "Policy loss", "", ("policy_loss",), note="Near 0 by construction; its trend says little."),
    Chart(UPDATE, "Loss", "", ("loss",)),
    Chart(UPDATE, "Gradient norm", "before clipping", ("grad_norm",), log=True, note="A rise of 10 times: lower the rate."),
    Chart(UPDATE, "KL to the reference", "nats per token", ("kl",), note="Grows without end: the policy drifts off."),
    Chart(UPDATE, "KL of the update", "nats per token", ("approx_kl",), note="Between the policy before and after."),
    Chart(
        UPDATE, "Clipped tokens", "share", ("clip_fraction", "clip_fraction_lower"), note="Above 0.3: steps are too large."
    ),
    Chart(UPDATE, "Learning rate", "of the next step", ("next_lr",)),
    Chart(
        UPDATE,
        "Step taken",
        "share of updates",
        ("step_ok",),
        note="Below 1: a gradient was not finite, and its update skipped.",
        full_range=True,
    ),
    Chart(
        AGREEMENT,
        "Log-prob gap",
        "nats per token",
        ("log_prob_gap",),
        log=True,
        note="Trainer against engine: about 1e-6 in float32, 1e-2 in bfloat16, and more with stale samples.",
    ),
    Chart(AGREEMENT, "Staleness", "training steps", ("staleness_mean", "staleness_max"), note="0: strictly on-policy."),
    Chart(AGREEMENT, "Samples dropped", "too stale", ("samples_dropped",)),
    Chart(AGREEMENT, "Importance weight", "mean", ("importance_weight",), note="Near 1."),
    Chart(AGREEMENT, "Importance weight 0", "share of tokens", ("importance_dropped",)),
    Chart(AGREEMENT, "Weight version", "", ("weight_version",), note="One more after every optimizer step."),
    Chart(CRITIC, "Value loss", "", ("value_loss",), log=True, note="Falls at first."),
    Chart(CRITIC, "Explained variance", "share", ("explained_variance",), note="1: returns foreseen; below 0: of no use."),
    Chart(CRITIC, "Value and return", "mean", ("value_mean", "return_mean"), note="Close to each other."),
    Chart(CRITIC, "Clipped values", "share", ("value_clip_fraction",)),
    Chart(CRITIC, "Critic's learning rate", "of the next step", ("critic_next_lr",)),
    Chart(CRITIC, "Critic's gradient norm", "before clipping", ("critic_grad_norm",), log=True),
)


def charts_for(names: Iterable[str]) -> dict[str, list[Chart]]:
    """Group -> charts of the metrics that there are; those not known have one each in the last group. No phases."""
    left = [name for name in names if not name.startswith(PHASE)]
    groups: dict[str, list[Chart]] = {}
    for chart in CHARTS:
        present = tuple(name for name in chart.names if name in left)
        if present:
            left = [name for name in left if name not in present]
            groups.setdefault(chart.group, []).append(replace(chart, names=present))
    for name in left:
        groups.setdefault(OTHER, []).append(Chart(OTHER, name, "", (name,)))
    return groups
