"""Engines that die or fail in the middle of an update, and what the others do."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from actors.rollout import placement as rollout_placement
from actors.rollout.config import RolloutConfig, SamplingConfig
from actors.rollout.group.engines import EngineSet
from actors.rollout.group.group import RolloutGroup
from actors.sync.gpu_transports import StreamingTransport
from actors.sync.push import WeightSync
from actors.sync.source import SourceRanks
from actors.sync.staged_transports import PushPlan, SharedMemoryTransport
from actors.wire.segment import Segment
from rl_backend.contracts import EngineDeadError, EngineDirtyError, RolloutError, TensorInfo, UnsupportedError
from tests.e2e.conftest import CLUSTER_CPUS
from tests.support.engines import GroupWithoutModel
from tests.support.rollout import ReferenceTrainer

PROMPTS = [[5, 6, 7, 8], list(range(10, 60)), [9, 8, 7], [44]]
SAMPLING = SamplingConfig(max_new_tokens=6)
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def trainer(rollout_trainer: ReferenceTrainer) -> ReferenceTrainer:
    return rollout_trainer


@pytest.fixture(scope="module")
def sync(rollout_sync: WeightSync) -> WeightSync:
    return rollout_sync


@pytest.fixture(scope="module")
def not_healed(rollout_pair: RolloutGroup) -> Iterator[RolloutGroup]:
    """As with ``max_restarts=0``; all of its engines are alive before and afterwards."""
    healing, engines = rollout_pair.healing, rollout_pair.engine_set
    limit, healing._limit, engines.heals = healing._limit, 0, False
    yield rollout_pair
    for engine in list(rollout_pair.lost_engines):
        rollout_pair.restart(engine)
    healing._limit, engines.heals = limit, True


@pytest.fixture
def group(not_healed: RolloutGroup, trainer: ReferenceTrainer, sync: WeightSync) -> RolloutGroup:
    """Two engines that serve the trainer's weights, whatever an earlier test did to them."""
    for engine in list(not_healed.lost_engines):
        not_healed.restart(engine)
    trainer.advance()
    sync.push()
    return not_healed


def assert_serves(group: RolloutGroup, trainer: ReferenceTrainer, version: int, engines: set[int]) -> None:
    samples = group.generate(PROMPTS, SAMPLING)
    assert {sample.engine for sample in samples} == engines
    assert {v for sample in samples for v in sample.weight_versions} == {version}
    assert trainer.mean_gap(samples) <= TOLERANCE


def kill(group: RolloutGroup, engine: int) -> None:
    os.kill(group.infos[engine].pid, signal.SIGKILL)


@pytest.mark.long
@pytest.mark.shows(
    "weight sync: a dead engine is named within seconds; a restarted one has the weights that were pushed last, or waits "
    "for the next push"
)
def test_an_engine_that_dies_while_sampling_is_named_within_seconds_and_restarts_with_the_weights_of_the_others(
    group: RolloutGroup, trainer: ReferenceTrainer, sync: WeightSync
) -> None:
    pending = group.submit(PROMPTS * 8, SamplingConfig(max_new_tokens=200))
    kill(group, 1)
    started = time.monotonic()
    with pytest.raises(EngineDeadError, match="engine 1 is dead"):
        pending.result()
    assert time.monotonic() - started < 15
    assert group.engines == (0,)
    assert_serves(group, trainer, trainer.source.version, {0})

    trainer.advance()
    report = sync.push()
    assert (report.engines, report.skipped) == ((0,), (1,))
    assert_serves(group, trainer, report.version, {0})

    group.restart(1)
    assert_serves(group, trainer, trainer.source.version, {0, 1})
    sync._staged = None  # as with every other transport
    group.restart(1)
    assert_serves(group, trainer, trainer.source.version, {0, 1})
    sync._staged = None
    trainer.advance()
    group.restart(1)
    assert {sample.engine for sample in group.generate(PROMPTS, SAMPLING)} == {0}
    assert sync.push().engines == (0, 1)
    assert_serves(group, trainer, trainer.source.version, {0, 1})


def test_an_engine_that_samples_answers_other_calls_at_once(group: RolloutGroup, trainer: ReferenceTrainer) -> None:
    pending = group.submit(PROMPTS * 16, SamplingConfig(max_new_tokens=200))
    assert not pending.done()
    infos = group.engine_set.call("describe", timeout=5.0)
    assert not pending.done()
    assert [infos[engine].version for engine in (0, 1)] == [trainer.source.version] * 2
    assert len(pending.result()) == len(PROMPTS) * 16


class StreamedTransport(StreamingTransport):
    """Streams through shared memory, so that it runs on a CPU; the trainer fails at will."""

    name = "streamed"

    def __init__(self) -> None:
        self._staging = SharedMemoryTransport()
        self._segment: Segment | None = None
        self.failure: Exception | None = None

    def problem_of_gpus(self, plan: PushPlan, rollout: EngineSet) -> str:
        return ""

    def problem(self, plan: PushPlan, rollout: EngineSet) -> str:
        return self._staging.problem(plan, rollout)

    def connect(self, plan: PushPlan, train: SourceRanks, rollout: EngineSet) -> None:
        self._staged = self._staging.stage(plan, train, rollout)
        segment = self._staged.segments[rollout.engines[0]]
        if segment != self._segment:  # else an update that is open would lose its receiver, and could not be mended
            self._segment = segment
            rollout.call("init_transfer", {"kind": "staged", "path": segment.path, "nbytes": segment.nbytes})

    def reconnect(self) -> None:
        """Nothing to do: every push connects."""

    def send(self, plan: PushPlan, train: SourceRanks, rollout: EngineSet) -> dict[str, Any]:
        if self.failure is not None:
            raise self.failure
        return {"manifest": self._staged.manifest.model_dump_json()}

    def close(self, train: SourceRanks, rollout: EngineSet) -> None:
        self._staging.close(train, rollout)


def mend(group: RolloutGroup, *engines: int) -> None:
    """Brings the updates that these engines are lost for to an end, in place of restarts."""
    for engine in engines:
        del group.engine_set._lost[engine]
    assert group.engine_set.call("mend") == dict.fromkeys(engines)


def test_no_engine_whose_streamed_update_began_serves_after_another_could_not_begin(
    group: RolloutGroup, trainer: ReferenceTrainer
) -> None:
    with WeightSync(trainer.source, group) as streamed:
        streamed._transport, streamed._requested = StreamedTransport(), "streamed"
        trainer.advance()
        streamed.push()
        assert_serves(group, trainer, trainer.source.version, {0, 1})
        # Another driver left an update open in engine 1, so that a second one cannot begin there.
        ray.get(group.engine_set.actors()[1].begin_update.remote())
        with pytest.raises(EngineDirtyError, match="engine 1: a weight update failed"):
            streamed.push()
    assert "another engine could not begin" in str(group.lost_engines[0])
    assert set(group.lost_engines) == {0, 1}
    mend(group, 0, 1)


def test_engines_are_dirty_when_the_trainer_fails_in_the_middle_of_a_stream_and_say_why(
    group: RolloutGroup, trainer: ReferenceTrainer
) -> None:
    actors = group.engine_set.actors()
    streamed = WeightSync(trainer.source, group)
    transport = StreamedTransport()
    transport.failure = ValueError("no more weights")
    streamed._transport, streamed._requested = transport, "streamed"
    with pytest.raises(ValueError, match="no more weights"):
        streamed.push()
    assert set(group.lost_engines) == {0, 1}
    for actor in actors:
        told = ray.get(actor.pulse.remote())
        assert isinstance(told, EngineDirtyError) and "the trainer failed: ValueError: no more weights" in str(told)
    mend(group, 0, 1)


@pytest.mark.long
def test_an_engine_found_dead_by_a_push_leaves_the_others_on_the_old_weights(
    group: RolloutGroup, trainer: ReferenceTrainer, sync: WeightSync
) -> None:
    samples = group.generate(PROMPTS, SamplingConfig(temperature=0, max_new_tokens=4))
    kill(group, 0)
    before = trainer.source.version
    trainer.advance()
    with pytest.raises(EngineDeadError, match="engine 0 is dead"):
        sync.push()
    served = group.generate(PROMPTS, SamplingConfig(temperature=0, max_new_tokens=4))
    assert {v for sample in served for v in sample.weight_versions} == {before}
    assert [s.response_ids for s in served] == [s.response_ids for s in samples]
    assert sync.push().engines == (1,)
    assert_serves(group, trainer, trainer.source.version, {1})


@pytest.mark.long
@pytest.mark.shows("weight sync: an engine whose update failed half way serves nothing until it is rebuilt")
def test_an_engine_that_fails_after_the_first_load_is_dirty_until_it_is_rebuilt(
    group: RolloutGroup, trainer: ReferenceTrainer, sync: WeightSync
) -> None:
    # Another driver left an update open in engine 1, so that loading fails there after every check has passed.
    ray.get(group.engine_set.actors()[1].begin_update.remote())
    trainer.advance()
    with pytest.raises(EngineDirtyError, match="engine 1: a weight update failed after it had begun"):
        sync.push()
    assert_serves(group, trainer, trainer.source.version, {0})
    assert set(group.lost_engines) == {1}
    group.restart(1)
    sync.push()
    assert_serves(group, trainer, trainer.source.version, {0, 1})


@pytest.mark.long
def test_a_wrong_shape_that_reaches_the_loader_makes_the_engine_dirty(
    group: RolloutGroup, trainer: ReferenceTrainer, sync: WeightSync
) -> None:
    staged = SharedMemoryTransport().stage(sync._plan(), trainer.source, group.engine_set)
    tensors = list(staged.manifest.tensors)
    last = next(index for index, info in enumerate(tensors) if info.name == "model.layers.1.mlp.down_proj.weight")
    rows, columns = tensors[last].shape
    tensors[last] = TensorInfo(**{**tensors[last].model_dump(), "shape": (columns, rows)})
    broken = staged.manifest.replace(tensors=tuple(tensors))
    group.engine_set.call("verify", staged.manifest, each=lambda engine: (staged.segments[engine],))
    engine = group.engine_set.actors()[0]
    ray.get(engine.begin_update.remote())
    with pytest.raises(EngineDirtyError) as first:
        ray.get(engine.update.remote({"manifest": broken.model_dump_json()}))
    cause = str(first.value).partition("begun (")[2].splitlines()[0][:60]
    assert cause
    for attempt in ("update", "pulse"):
        arguments = ({"manifest": staged.manifest.model_dump_json()},) if attempt == "update" else ()
        with pytest.raises(EngineDirtyError) as later:
            ray.get(getattr(engine, attempt).remote(*arguments))
        assert "engine 0 is dirty" in str(later.value) and cause in str(later.value)
    with pytest.raises(EngineDirtyError, match="engine 0 is dirty"):
        sync.push()
    assert sync.push().engines == (1,)
    assert_serves(group, trainer, trainer.source.version, {1})


def ended(pid: int) -> bool:
    deadline = time.monotonic() + 30
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


@pytest.mark.long
def test_threads_that_restart_one_engine_leave_one_process_of_it(ray_cluster: None, untied_model: Path) -> None:
    with GroupWithoutModel(RolloutConfig(model_path=str(untied_model), device="cpu")) as group:
        pids = {group.infos[0].pid}
        with ThreadPoolExecutor(3) as threads:
            pids |= {info.pid for info in threads.map(group.restart, [0, 0, 0])}
        assert group.engines == (0,)
        assert len(pids) == 4
        assert all(ended(pid) for pid in pids - {group.infos[0].pid})
        assert not group.lost_engines


@pytest.mark.long
def test_an_engine_that_restarts_while_the_group_is_closed_is_ended(ray_cluster: None, untied_model: Path) -> None:
    group = GroupWithoutModel(RolloutConfig(model_path=str(untied_model), device="cpu"))
    with ThreadPoolExecutor(1) as threads:
        restart = threads.submit(group.restart, 0)
        while not group.lost_engines:
            time.sleep(0.01)
        group.close()
        with pytest.raises(RolloutError, match="the rollout group was closed while engine 0 started"):
            restart.result()
    assert group.engines == ()


@pytest.mark.long
def test_what_vllm_refuses_is_a_sentence_and_its_traceback_a_detail(ray_cluster: None, untied_model: Path) -> None:
    config = RolloutConfig(
        model_path=str(untied_model), device="cpu", kv_cache_gib=0.25, engine_args={"kv_cache_dtype": "int3"}
    )
    with pytest.raises(RolloutError, match=rf"^vLLM does not start with {untied_model}: .*cache_dtype") as refused:
        RolloutGroup(config)
    assert "\n" not in str(refused.value)
    assert "Traceback" in refused.value.details["traceback"]


def test_more_gpus_than_are_free_are_refused_at_once_with_both_numbers(
    ray_cluster: None, untied_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The cluster has no GPU, which is otherwise refused even before Ray is asked.
    monkeypatch.setattr(rollout_placement, "resolve_device", lambda config: "cuda")
    config = RolloutConfig(model_path=str(untied_model), num_engines=2, device="cuda", placement_timeout=1.0)
    with pytest.raises(
        UnsupportedError,
        match=rf"2 engines with 0 CPU and 1 GPU each, .* 2 GPU; after 1 s .* in 1 node of {CLUSTER_CPUS} CPU and 0 GPU",
    ):
        RolloutGroup(config)


@pytest.mark.long
def test_an_engine_without_a_model_does_not_start_and_says_why(
    ray_cluster: None, untied_model: Path, tmp_path: Path
) -> None:
    config = RolloutConfig(model_path=str(untied_model), device="cpu", engine_args={"no_such_argument": 1})
    with pytest.raises(RolloutError, match=r"vLLM does not start with .*unexpected keyword argument 'no_such_argument'"):
        RolloutGroup(config)
