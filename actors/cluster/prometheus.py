"""Metrics that Prometheus reads from Ray: every node's agent serves those of the processes on it.

Ray puts ``ray_`` before the names, and tags of its own (``NodeAddress``, ``WorkerId``, ``SessionName``) beside ours. A
value that is not finite is not exported; ``rl_backend_run_not_finite_total`` counts those of a run. Without Ray nothing is
exported.
"""

import functools
import math
import re
from typing import Any, Literal, NamedTuple

import ray
from ray.util import metrics

# Seconds, 0.003 to 393: a tenant's push through shared memory to one of large weights over a network.
PUSH_BOUNDARIES = [0.003 * 2**power for power in range(18)]


class Definition(NamedTuple):
    kind: Literal["gauge", "counter", "histogram"]
    description: str
    tags: tuple[str, ...]


METRICS = {
    "rl_backend_run_step": Definition("gauge", "step that the run has finished", ("run",)),
    "rl_backend_run_phase_seconds": Definition("gauge", "seconds of a phase of the last step", ("run", "phase")),
    "rl_backend_run_not_finite_total": Definition("counter", "values that were NaN or infinite", ("run", "metric")),
    "rl_backend_operations_total": Definition("counter", "operations that a rank has done", ("group", "rank", "operation")),
    "rl_backend_operation_seconds_total": Definition("counter", "seconds that they took", ("group", "rank", "operation")),
    "rl_backend_trained_tokens_total": Definition(
        "counter", "tokens that went through forward_backward on a rank, forward-only passes included", ("group", "rank")
    ),
    "rl_backend_rank_weight_version": Definition("gauge", "weight version of a model on a rank", ("group", "rank", "model")),
    "rl_backend_recoveries_total": Definition("counter", "times that all ranks of a group were replaced", ("group",)),
    "rl_backend_reshapes_total": Definition("counter", "times that a group got another layout", ("group",)),
    "rl_backend_engine_weight_version": Definition("gauge", "weight version that an engine serves", ("engine",)),
    "rl_backend_rollout_responses_total": Definition("counter", "responses that an engine has made", ("engine",)),
    "rl_backend_rollout_tokens_total": Definition("counter", "tokens of these responses", ("engine",)),
    "rl_backend_rollout_seconds_total": Definition("counter", "seconds that an engine was sampling", ("engine",)),
    "rl_backend_turn_prompt_tokens_total": Definition("counter", "prompt tokens of these responses", ("engine",)),
    "rl_backend_turn_cached_tokens_total": Definition("counter", "those of them that were not computed again", ("engine",)),
    "rl_backend_engine_events_total": Definition(
        "counter", "engines that were lost (died, hung, dirty) and replaced", ("engine", "kind")
    ),
    "rl_backend_rollout_queue": Definition(
        "gauge", "requests that an engine has been asked and has not answered", ("engine",)
    ),
    "rl_backend_push_seconds": Definition("histogram", "seconds of a phase of a weight push", ("phase", "transport")),
    "rl_backend_pushes_total": Definition("counter", "weight pushes that reached every engine", ("transport",)),
    "rl_backend_push_bytes_total": Definition("counter", "bytes that they sent to each engine", ("transport",)),
    "rl_backend_push_rank_bytes_total": Definition("counter", "bytes of these that a rank sent", ("transport", "rank")),
    "rl_backend_adapter_version": Definition("gauge", "version that a LoRA tenant is served at", ("tenant",)),
}
"""Every metric apart from ``rl_backend_run_<metric>``, a gauge with the tag ``run`` for each metric that a run logs."""


def set_gauge(name: str, value: float, **tags: str) -> None:
    """Sets a gauge of :data:`METRICS`; values that are not finite are left out."""
    if ray.is_initialized() and math.isfinite(value):
        _metric(name).set(value, tags)


def count(name: str, amount: float, **tags: str) -> None:
    if ray.is_initialized() and amount > 0:
        _metric(name).inc(amount, tags)


def observe(name: str, value: float, **tags: str) -> None:
    if ray.is_initialized():
        _metric(name).observe(value, tags)


def export_step(run: str, step: int, values: dict[str, float]) -> None:
    """Exports one step's metrics; ``seconds/<phase>`` become ``rl_backend_run_phase_seconds``."""
    set_gauge("rl_backend_run_step", step, run=run)
    for name, value in values.items():
        if not math.isfinite(value):
            count("rl_backend_run_not_finite_total", 1, run=run, metric=name)
        elif name.startswith("seconds/"):
            set_gauge("rl_backend_run_phase_seconds", value, run=run, phase=name.removeprefix("seconds/"))
        else:
            set_gauge(f"rl_backend_run_{re.sub('[^a-zA-Z0-9_]', '_', name)}", value, run=run)


@functools.cache
def _metric(name: str) -> Any:
    if name not in METRICS:
        return metrics.Gauge(name, f"{name.removeprefix('rl_backend_run_')} of the run's last step", ("run",))
    kind, description, tags = METRICS[name]
    if kind == "histogram":
        return metrics.Histogram(name, description, PUSH_BOUNDARIES, tags)
    # Ray adds the suffix itself.
    return (
        metrics.Counter(name.removesuffix("_total"), description, tags)
        if kind == "counter"
        else metrics.Gauge(name, description, tags)
    )
