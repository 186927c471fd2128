"""Metrics of a run: titles, units, and the charts and groups that show them."""

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from rl_backend.lab.picture import template_text

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
    names: Sequence[str]
    note: str = ""
    log: bool = False
    full_range: bool = False


CHARTS = {
    group: [Chart(**chart) for chart in charts] for group, charts in tomllib.loads(template_text("charts.toml")).items()
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
