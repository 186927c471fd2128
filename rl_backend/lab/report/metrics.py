"""Metrics of a run: titles, units, and the charts and groups that show them."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

PHASE = "seconds/"


@dataclass(frozen=True)
class Chart:
    """A chart of one or more metrics.

    Attributes:
        names: of the metrics, drawn in this order.
        note: one sentence on what a reader looks for.
        log: logarithmic where the values span decades.
        full_range: from 0 to 1.
    """

    title: str
    unit: str
    names: tuple[str, ...]
    note: str = ""
    log: bool = False
    full_range: bool = False


CHARTS = {
    "Does it learn?": (
        Chart("Reward", "mean per response", ("reward",), "Rises, then levels off."),
        Chart("Held-out accuracy", "share", ("accuracy",), "Falls while the reward rises: overfitting.", full_range=True),
        Chart("Answer probability", "share", ("answer_probability",), "Of exactly the held-out answer.", full_range=True),
        Chart("Response length", "tokens, mean", ("response_tokens",), "At the limit: responses are cut off."),
        Chart("Entropy", "nats per token", ("entropy",), "Near 0: nothing is explored any more."),
        Chart("Negative log-likelihood", "nats per token", ("nll",), "Falls."),
        Chart("Groups without a signal", "left out", ("groups_without_signal",), "Equal rewards teach nothing."),
        Chart("Batches sampled", "for one step", ("batches_sampled",), "Rises as prompts become too easy or too hard."),
    ),
    "Is the update sound?": (
        Chart("Policy loss", "", ("policy_loss",), "Near 0 by construction; its trend says little."),
        Chart("Loss", "", ("loss",)),
        Chart("Gradient norm", "before clipping", ("grad_norm",), "A rise of 10 times: lower the rate.", log=True),
        Chart("KL to the reference", "nats per token", ("kl",), "Grows without end: the policy drifts off."),
        Chart("KL of the update", "nats per token", ("approx_kl",), "Between the policy before and after."),
        Chart("Clipped tokens", "share", ("clip_fraction", "clip_fraction_lower"), "Above 0.3: steps are too large."),
        Chart("Learning rate", "of the next step", ("next_lr",)),
        Chart(
            "Step taken",
            "share of updates",
            ("step_ok",),
            "Below 1: a gradient was not finite, and its update skipped.",
            full_range=True,
        ),
    ),
    "Do trainer and engines agree?": (
        Chart(
            "Log-prob gap",
            "nats per token",
            ("log_prob_gap",),
            "Trainer against engine: about 1e-6 in float32, 1e-2 in bfloat16, and more with stale samples.",
            log=True,
        ),
        Chart("Staleness", "training steps", ("staleness_mean", "staleness_max"), "0: strictly on-policy."),
        Chart("Samples dropped", "too stale", ("samples_dropped",)),
        Chart("Importance weight", "mean", ("importance_weight",), "Near 1."),
        Chart("Importance weight 0", "share of tokens", ("importance_dropped",)),
        Chart("Weight version", "", ("weight_version",), "One more after every optimizer step."),
    ),
    "The critic": (
        Chart("Value loss", "", ("value_loss",), "Falls at first.", log=True),
        Chart("Explained variance", "share", ("explained_variance",), "1: returns foreseen; below 0: of no use."),
        Chart("Value and return", "mean", ("value_mean", "return_mean"), "Close to each other."),
        Chart("Clipped values", "share", ("value_clip_fraction",)),
        Chart("Critic's learning rate", "of the next step", ("critic_next_lr",)),
        Chart("Critic's gradient norm", "before clipping", ("critic_grad_norm",), log=True),
    ),
}
"""Group -> its charts, in the order of the page."""

OTHER = "Other metrics"


def charts_for(names: Iterable[str]) -> dict[str, list[Chart]]:
    """Group -> charts of the metrics that there are; those not known have one each in the last group. No phases."""
    left = [name for name in names if not name.startswith(PHASE)]
    groups: dict[str, list[Chart]] = {}
    for group, charts in CHARTS.items():
        for chart in charts:
            if present := tuple(name for name in chart.names if name in left):
                left = [name for name in left if name not in present]
                groups.setdefault(group, []).append(replace(chart, names=present))
    if left:
        groups[OTHER] = [Chart(name, "", (name,)) for name in left]
    return groups
