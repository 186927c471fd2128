"""Names of the Prometheus metrics; that they are served is shown with Ray, in tests/e2e."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.util import metrics

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


def test_a_step_is_exported_value_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[Any, ...]] = []

    def metric(name: str) -> Any:
        return SimpleNamespace(
            set=lambda value, tags: told.append(("set", name, value, tags)),
            inc=lambda value, tags: told.append(("inc", name, value, tags)),
            observe=lambda value, tags: told.append(("observe", name, value, tags)),
        )

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(prometheus, "_metric", metric)
    prometheus.export_step("r", 7, {"a/b.c": 0.0, "seconds/train": 2.0, "bad": math.inf, "seconds/bad": math.nan})
    prefix, run = "rl_backend_run_", {"run": "r"}
    assert told == [
        ("set", f"{prefix}step", 7, run),
        ("set", f"{prefix}a_b_c", 0.0, run),
        ("set", f"{prefix}phase_seconds", 2.0, {**run, "phase": "train"}),
        ("inc", f"{prefix}not_finite_total", 1, {**run, "metric": "bad"}),
        ("inc", f"{prefix}not_finite_total", 1, {**run, "metric": "seconds/bad"}),
    ]
    told.clear()
    prometheus.set_gauge("g", math.nan, a="1")
    prometheus.count("c", 0, a="1")
    prometheus.count("c", -1, a="1")
    assert told == []
    prometheus.count("c", 2.5, a="1")
    prometheus.observe("h", 0.5, b="2")
    assert told == [("inc", "c", 2.5, {"a": "1"}), ("observe", "h", 0.5, {"b": "2"})]


def test_each_metric_is_made_of_its_kind_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Any, ...]] = []

    def maker(kind: str) -> Any:
        def make(*given: Any) -> object:
            made.append((kind, *given))
            return object()

        return make

    for kind in ("Gauge", "Counter", "Histogram"):
        monkeypatch.setattr(metrics, kind, maker(kind))
    prometheus._metric.cache_clear()
    try:
        found = [
            prometheus._metric(f"rl_backend_{name}") for name in ("run_step", "pushes_total", "push_seconds", "run_my_own")
        ]
        assert prometheus._metric("rl_backend_run_step") is found[0]
    finally:
        prometheus._metric.cache_clear()
    assert made == [
        ("Gauge", "rl_backend_run_step", "step that the run has finished", ("run",)),
        ("Counter", "rl_backend_pushes", "weight pushes that reached every engine", ("transport",)),
        ("Histogram", "rl_backend_push_seconds", "seconds of a phase of a weight push", prometheus.PUSH_BOUNDARIES,
         ("phase", "transport")),
        ("Gauge", "rl_backend_run_my_own", "my_own of the run's last step", ("run",)),
    ]  # fmt: skip
    assert len(prometheus.PUSH_BOUNDARIES) == 18 and prometheus.PUSH_BOUNDARIES[-1] == pytest.approx(393.2, abs=0.1)


def test_nothing_is_observed_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(prometheus, "_metric", lambda name: pytest.fail(f"{name} is exported"))
    prometheus.observe("rl_backend_push_seconds", 1.0, phase="load")
    assert prometheus.PUSH_BOUNDARIES[:3] == [0.003, 0.006, 0.012]
