"""What a run shows while it runs and afterwards: one trace of all actors, and metrics that Prometheus can scrape."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from actors import HandleRef, Loss, RolloutGroup, SamplingConfig, TrainGroup, WeightSync
from actors.cluster.prometheus import METRICS
from actors.folder.folder import RunFolder
from actors.watch.metrics import Clock
from actors.watch.trace import TraceCollector
from rl_backend.contracts import BaseConfig, ConfigError, NativeConfig, OptimizerConfig, RuntimeConfig
from rl_backend.trace.recorder import TraceBatch, TraceRecorder, recorder
from tests.support import memory
from tests.support.chrome_trace import check_trace
from tests.support.prometheus import Served, await_served, value, values
from tests.support.rollout import ReferenceTrainer
from tests.support.sft_batches import random_token_sequences

STEPS = 4
PROMPTS = [[5, 6, 7], [9, 10], [100, 90, 80, 70]]


class Options(BaseConfig):
    steps: int = STEPS


@pytest.fixture(scope="module")
def train(ray_cluster: None, tied_model: Path) -> Iterator[TrainGroup]:
    native = NativeConfig(device="cpu", optimizer=OptimizerConfig(lr=1e-3))
    config = RuntimeConfig(hf_path=str(tied_model), max_tokens_per_micro_batch=40, backend_cfg=native)
    with TrainGroup(config, num_ranks=2, name="observed") as group:
        yield group


@pytest.fixture(scope="module")
def policy(train: TrainGroup) -> HandleRef:
    return train.build_model(name="policy")


@pytest.fixture(scope="module")
def run_dir(
    train: TrainGroup,
    policy: HandleRef,
    rollout_pair: RolloutGroup,
    rollout_sync: WeightSync,
    rollout_trainer: ReferenceTrainer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """The folder of a traced run: each step samples, trains on both ranks and pushes."""
    path = tmp_path_factory.mktemp("observed")
    with RunFolder(path, Options(), trace=(train, rollout_pair)) as folder:
        for step in range(1, STEPS + 1):
            clock = Clock()
            samples = rollout_pair.generate(PROMPTS, SamplingConfig(n=2, max_new_tokens=6)) if step > 1 else []
            clock.lap("sample")
            train.zero_grad(policy)
            sequences = random_token_sequences([12, 20, 9, 31], 128, seed=step)
            result = train.forward_backward(policy, sequences, Loss("tests.support.losses:nll_loss"))
            assert train.optimizer_step(policy).ok
            clock.lap("train")
            rollout_trainer.advance()
            rollout_sync.push()
            clock.lap("sync")
            metrics = {"loss": result.loss, "samples": float(len(samples)), "nothing": float("nan")}
            folder.log(step, metrics | clock.seconds)
    return path


@pytest.fixture(scope="module")
def events(run_dir: Path) -> list[dict[str, Any]]:
    return check_trace(run_dir / "trace.json")


def spans(events: list[dict[str, Any]], process: str) -> list[dict[str, Any]]:
    (pid,) = (event["pid"] for event in events if event["name"] == "process_name" and event["args"]["name"] == process)
    return [event for event in events if event["ph"] == "X" and event["pid"] == pid]


def inside(inner: dict[str, Any], outer: dict[str, Any]) -> bool:
    return bool(outer["ts"] - 0.002 <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 0.002)


@pytest.mark.shows("reading a run: one Chrome trace shows driver, training ranks and engines on one clock")
def test_the_trace_has_every_operation_of_every_rank_with_its_micro_batches(events: list[dict[str, Any]]) -> None:
    for rank in ("rank 0", "rank 1"):
        own = spans(events, rank)
        operations = [span for span in own if span["name"] == "forward_backward"]
        assert len(operations) == STEPS
        assert [span["args"]["weight_version"] for span in own if span["name"] == "optimizer_step"] == [1, 2, 3, 4]
        for operation in operations:
            micro_batches = [span for span in own if span["cat"] == "micro_batch" and inside(span, operation)]
            count = operation["args"]["micro_batches"]
            assert [span["name"] for span in micro_batches] == ["forward", "backward"] * count
            assert [span["args"]["micro_batch"] for span in micro_batches[::2]] == list(range(count))
            for name in ("tokens", "sequences"):
                assert sum(span["args"][name] for span in micro_batches[::2]) == operation["args"][name]
    both = [spans(events, rank) for rank in ("rank 0", "rank 1")]
    tokens = [sum(span["args"]["tokens"] for span in own if span["name"] == "forward_backward") for own in both]
    assert sum(tokens) == STEPS * 72
    numbers = [[span["args"]["operation"] for span in own if span["cat"] == "operation"] for own in both]
    assert numbers[0] == numbers[1] == sorted(numbers[0])


def test_a_group_knows_the_memory_of_the_rank_that_held_most(train: TrainGroup, run_dir: Path) -> None:
    def peak_of_rank(context: Any) -> int:
        return memory.peak_memory()

    peaks = train.run_on_ranks(peak_of_rank)
    assert train.peak_memory == pytest.approx(max(peaks), rel=0.02)


def test_phases_of_the_driver_hold_what_the_actors_did_in_them(events: list[dict[str, Any]]) -> None:
    phases = [span for span in spans(events, "driver") if span["cat"] == "phase"]
    assert [span["name"] for span in phases] == ["sample", "train", "sync"] * STEPS
    for process, name, phase in (
        ("rank 0", "forward_backward", "train"),
        ("rank 1", "optimizer_step", "train"),
        ("engine 1", "generate", "sample"),
        ("engine 0", "finish update", "sync"),
    ):
        for span in (span for span in spans(events, process) if span["name"] == name):
            assert any(inside(span, around) for around in phases if around["name"] == phase), (process, span)


def test_arrows_lead_from_each_push_to_the_sampling_that_uses_its_weights(
    events: list[dict[str, Any]], rollout_trainer: ReferenceTrainer
) -> None:
    last = rollout_trainer.source.version
    engine = spans(events, "engine 0")
    sampled = [span for span in engine if span["name"] == "generate"]
    assert [span["args"]["weight_version"] for span in sampled] == [last - 3, last - 2, last - 1]
    assert [span["args"]["response_tokens"] for span in sampled] == [24, 24, 24]
    pushes = [span for span in spans(events, "driver") if span["name"] == "push"]
    assert [span["args"]["weight_version"] for span in pushes] == [last - 3, last - 2, last - 1, last]
    for push, generate in zip(pushes, sampled, strict=False):
        into = [event for event in events if event["ph"] == "f" and event["ts"] == generate["ts"]]
        (arrow,) = [event for event in into if event["pid"] == generate["pid"]]
        (start,) = [event for event in events if event["ph"] == "s" and event["id"] == arrow["id"]]
        (load,) = [span for span in engine if span["name"] == "finish update" and inside(start | {"dur": 0}, span)]
        assert arrow["name"] == f"weights {push['args']['weight_version']}"
        assert inside(load, push)


def test_recording_ends_with_the_run(run_dir: Path, train: TrainGroup, tmp_path: Path) -> None:
    assert not recorder.recording
    with TraceCollector(tmp_path / "trace.json", [train]), pytest.raises(ConfigError, match="records another trace already"):
        TraceCollector(tmp_path / "other.json", [train])
    assert not recorder.recording
    operations = [event for event in check_trace(tmp_path / "trace.json") if event.get("cat") == "operation"]
    assert operations == [], "nothing of before is in a new trace"


def other_host() -> Any:
    """An actor whose class is in here, so that it need not import this file."""

    class OtherHost:
        """Records what it does, on a clock that is 5 seconds ahead, as on another host."""

        AHEAD = 5_000_000_000

        def __init__(self) -> None:
            self._recorder = TraceRecorder()

        def work(self) -> None:
            with self._recorder.span("work", "operation"):
                time.sleep(0.02)

        def take_trace(self, stop: bool = False) -> TraceBatch:
            batch = self._recorder.take_batch(stop=stop)
            events = [event._replace(start=event.start + self.AHEAD) for event in batch.events]
            return TraceBatch("another host", batch.now + self.AHEAD, events, batch.dropped)

    return ray.remote(OtherHost).remote()


class OneActor:
    def __init__(self) -> None:
        self.actor: Any = other_host()

    def trace_actors(self) -> dict[str, Any]:
        return {"rank 0": self.actor}


def test_the_clock_of_another_host_is_found_by_round_trips(ray_cluster: None, tmp_path: Path) -> None:
    source = OneActor()
    with TraceCollector(tmp_path / "trace.json", [source]) as trace:
        for step in range(3):
            started = time.monotonic_ns()
            ray.get(source.actor.work.remote())
            trace.step(step, started, time.monotonic_ns())
        trace.collect()
    events = check_trace(tmp_path / "trace.json")
    (note,) = [event for event in events if event["name"] == "clocks of other hosts"]
    error = 1000 * note["args"]["error_ms"]
    assert 0 < error < 20_000
    steps, work = ([event for event in events if event["name"].startswith(name)] for name in ("step", "work"))
    for step, span in zip(steps, work, strict=True):
        assert step["ts"] - error <= span["ts"] <= step["ts"] + step["dur"] - span["dur"] + error
    ray.kill(source.actor)


def test_a_traced_actor_that_dies_is_named_and_its_successor_is_found(ray_cluster: None, tmp_path: Path) -> None:
    source = OneActor()
    with TraceCollector(tmp_path / "trace.json", [source, OneActor()]) as trace:
        ray.kill(source.actor)
        trace.collect()
        source.actor = other_host()
        trace.collect()
        ray.get(source.actor.take_trace.remote())
        ray.get(source.actor.work.remote())
    events = check_trace(tmp_path / "trace.json")
    assert {"rank 0", "rank 0 of group 2"} <= {event["args"].get("name") for event in events if event["ph"] == "M"}
    assert [event["name"] for event in events if event["ph"] == "i" and event["pid"] == 2][-1] == "another process"
    assert [event["pid"] for event in events if event["name"] == "work"] == [2]


@pytest.mark.shows("reading a run: Ray's endpoint serves its metrics to Prometheus")
def test_prometheus_finds_the_metrics_of_run_ranks_and_engines(
    run_dir: Path, train: TrainGroup, policy: HandleRef, rollout_trainer: ReferenceTrainer
) -> None:
    run, group = str(run_dir), policy.group_id[:8]

    def check(found: Served) -> None:
        # Only a push of an adapter sets the first (tests/e2e/test_adapter_sync.py), and only deaths the others.
        events = {"rl_backend_engine_events_total", "rl_backend_recoveries_total", "rl_backend_reshapes_total"}
        elsewhere = {"rl_backend_adapter_version", *events}
        expected = {name for name, metric in METRICS.items() if metric.kind != "histogram"} - elsewhere
        assert expected <= set(found)
        assert {"rl_backend_run_loss", "rl_backend_push_seconds_bucket"} <= set(found)
        assert value(found, "rl_backend_run_step", run=run) == STEPS
        assert value(found, "rl_backend_run_samples", run=run) == 6
        assert value(found, "rl_backend_run_not_finite_total", run=run, metric="nothing") == STEPS
        assert value(found, "rl_backend_run_phase_seconds", run=run, phase="train") > 0
        assert "rl_backend_run_nothing" not in found
        for rank in ("0", "1"):
            tags = {"group": group, "rank": rank}
            assert value(found, "rl_backend_rank_weight_version", model="policy", **tags) == STEPS
            assert value(found, "rl_backend_operations_total", operation="optimizer_step", **tags) == STEPS
            assert value(found, "rl_backend_operation_seconds_total", operation="forward_backward", **tags) > 0
        tokens = [value(found, "rl_backend_trained_tokens_total", group=group, rank=rank) for rank in ("0", "1")]
        assert sum(tokens) == STEPS * 72
        for engine in ("0", "1"):
            # Engines of other groups of this test session have the same numbers.
            assert rollout_trainer.source.version in values(found, "rl_backend_engine_weight_version", engine=engine)
            assert max(values(found, "rl_backend_rollout_tokens_total", engine=engine)) >= 18

    await_served(check)
