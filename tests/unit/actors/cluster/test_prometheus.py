"""Names of the Prometheus metrics; that they are served is shown with Ray, in tests/e2e."""

from __future__ import annotations

import re

import pytest
import ray

from actors.cluster import prometheus
from actors.cluster.prometheus import METRICS, count, export_step, set_gauge
from tests.support.claims import ROOT


def test_the_page_lists_every_metric_as_it_is() -> None:
    text = (ROOT / "docs" / "reading_a_run.md").read_text()
    rows = re.findall(r"^\| `(rl_backend_\w+)` \| (\w+) \| ([^|]*) \| (.*) \|$", text, re.MULTILINE)
    listed = {name: (kind, tuple(re.findall(r"`(\w+)`", tags)), what) for name, kind, tags, what in rows}
    assert listed == {name: (metric.kind, metric.tags, metric.description) for name, metric in METRICS.items()}


def test_names_say_what_kind_of_metric_they_are() -> None:
    for name, metric in METRICS.items():
        assert name.endswith("_total") == (metric.kind == "counter"), name


def test_without_ray_nothing_is_exported_and_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(prometheus, "_metric", lambda name: pytest.fail(f"{name} is exported"))
    set_gauge("rl_backend_engine_weight_version", 3, engine="0")
    count("rl_backend_pushes_total", 1, transport="gloo")
    export_step("run", 1, {"reward": float("nan"), "seconds/train": 1.0, "my/own": 2.0})
