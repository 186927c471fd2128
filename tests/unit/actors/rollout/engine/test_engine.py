"""An engine from its start to its sleep, with stand-ins for vLLM and Ray."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.cluster.processes import Process
from actors.rollout.config import RolloutConfig, SamplingConfig
from actors.rollout.engine import engine as engine_module
from actors.rollout.engine import in_process
from actors.rollout.engine import stepper as stepper_module
from actors.rollout.engine.engine import RolloutEngine
from actors.rollout.engine.in_process import ServingState
from actors.rollout.messages import AdapterVersion, EngineInfo, Request, Response, VersionSpan
from actors.rollout.placement import NodePlace
from actors.rollout.vllm.expected import EngineParameters
from actors.wire.segment import host_identity
from rl_backend.contracts import (
    UNVERSIONED,
    ConfigError,
    EngineDirtyError,
    RLBackendError,
    RolloutError,
    UnsupportedError,
    WeightVersionError,
)
from rl_backend.trace.recorder import recorder
from tests.support.answering import AnsweringStepper, Llm, serve

POET, CLERK = AdapterVersion("poet", 5, 1, 8), AdapterVersion("clerk", 7, 2, 8)
SAMPLING = SamplingConfig(n=2)


class Made:
    """An engine that serves, its stand-in for vLLM, and what it counted."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine, self.llm, self.stepper = engine, Llm(), AnsweringStepper()
        engine._vllm.llm = self.llm
        engine._vllm.loop.start(engine, lambda: self.stepper)
        self.counted: list[tuple[Any, ...]] = []


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Made]]:
    engines: list[Made] = []
    monkeypatch.setattr("actors.rollout.engine.adapters.lora_request", lambda adapter: adapter.name)

    def of(*, device: str = "cpu", require_push: bool = False, **settings: Any) -> Made:
        config = RolloutConfig(model_path="x", num_engines=4, max_adapters=2, **settings)
        made = Made(RolloutEngine(config, 3, device, require_push))
        engines.append(made)

        def count(name: str, amount: float, **tags: str) -> None:
            made.counted.append((name.removeprefix("rl_backend_rollout_"), amount, tags))

        monkeypatch.setattr("actors.cluster.prometheus.count", count)
        return made

    yield of
    for made in engines:
        made.engine._vllm.loop.stop()


def keep(made: Made, *adapters: AdapterVersion) -> None:
    for adapter in adapters:
        made.engine._adapters._kept[adapter.number] = adapter


def of_call(count: int) -> list[Request]:
    return [replace(request, waits=False) for request in REQUESTS[:count]]


REQUESTS = [
    Request([1, 2], SAMPLING, None),
    Request([3], SAMPLING, 11),
    Request([4, 4, 4], SAMPLING, 20),
    Request([5], SAMPLING, 31),
    Request([6], SAMPLING, None),
]


def of(adapters: Sequence[AdapterVersion | None], require_version: int | None = None) -> list[Request]:
    """The first requests, each with one of the adapters."""
    chosen = zip(REQUESTS, adapters, strict=False)
    return [replace(request, adapter=adapter, require_version=require_version) for request, adapter in chosen]


def generate(made: Made, requests: Sequence[Request]) -> list[Response]:
    """The answers in the order of the requests; raises the first error."""
    made.engine.start_turns(list(enumerate(requests)))
    answers: dict[int, Response | RLBackendError] = {}
    while len(answers) < len(requests):
        answers |= dict(made.engine.take_turns(10.0))
    found = [answers[number] for number in range(len(requests))]
    for answer in found:
        if isinstance(answer, RLBackendError):
            raise answer
    return [answer for answer in found if isinstance(answer, Response)]


def versions(found: Sequence[Response]) -> list[int]:
    return [span.version for response in found for span in response.spans]


def test_requests_begin_in_their_order_and_each_is_answered_with_its_own_adapter(make: Callable[..., Made]) -> None:
    made = make()
    keep(made, POET, CLERK)
    serve(made.engine._vllm.serving, 4)
    found = generate(made, of([POET, None, CLERK, POET, None]))
    assert versions(found) == [5, 4, 7, 5, 4]
    assert [len(each.token_ids) for each in found] == [2, 1, 3, 1, 1]
    assert found[1] == Response([11], [-11 / 8], "stop", (VersionSpan(4, 1),))
    assert found[2] == Response([20, 21, 22], [-20 / 8, -21 / 8, -22 / 8], "length", (VersionSpan(7, 3),), 2)
    assert {each.engine for each in found} == {3}
    assert [job.prompt_ids[0] for job in made.stepper.jobs] == [1, 3, 4, 5, 6]
    assert all(job.sampling is SAMPLING and not job.pausable for job in made.stepper.jobs)


def test_what_an_engine_samples_is_counted_and_traced_with_its_newest_version(make: Callable[..., Made]) -> None:
    made = make()
    keep(made, POET)
    serve(made.engine._vllm.serving, 4)
    recorder.start()
    generate(made, of([POET, None, None]))
    made.engine._vllm.loop.call(lambda: None)
    generate(made, of([None]))
    made.engine._vllm.loop.call(lambda: None)
    batch = made.engine.take_trace()
    assert recorder.recording
    assert made.engine.take_trace(stop=True).events == [] and not recorder.recording
    first, second = [event.arguments for event in batch.events if event.name == "generate"]
    assert first == {"weight_version": 5, "responses": 3, "prompt_tokens": 6, "response_tokens": 6}
    assert second == {"weight_version": 4, "responses": 1, "prompt_tokens": 2, "response_tokens": 2}
    totals: dict[str, float] = {}
    for name, amount, tags in made.counted:
        assert tags == {"engine": "3"}
        totals[name] = totals.get(name, 0) + amount
    assert 0 < totals.pop("seconds_total") < 60
    assert totals == {
        "responses_total": 4,
        "tokens_total": 8,
        "rl_backend_turn_prompt_tokens_total": 8,
        "rl_backend_turn_cached_tokens_total": 4,
    }


def test_routes_are_of_the_layers_with_experts_alone(make: Callable[..., Made]) -> None:
    made = make(return_routed_experts=True)
    made.engine._vllm.moe_layers = (0, 2)
    for response, rows in zip(generate(made, [REQUESTS[2], REQUESTS[0]]), (5, 3), strict=True):
        assert response.routes is not None and response.routes.shape == (rows, 2, 1)
        assert response.routes[:, :, 0].tolist() == [[10 * row, 10 * row + 2] for row in range(rows)]


@pytest.mark.parametrize(
    ("state", "enter", "match"),
    [
        ("paused", ServingState.pause, "engine 3 cannot sample now: a weight update is in progress"),
        ("asleep", ServingState.sleep, r"engine 3 cannot sample now: it is asleep; call wake_up\(\) first"),
    ],
)
def test_an_engine_that_does_not_serve_says_why(
    make: Callable[..., Made], state: str, enter: Callable[[ServingState], None], match: str
) -> None:
    made = make()
    enter(made.engine._vllm.serving)
    with pytest.raises(RolloutError, match=match) as refused:
        generate(made, of_call(1))
    assert refused.value.details == {"engine": "engine 3", "state": state}
    assert made.engine.probe_adapter(of([None, POET])[1]) is None and not made.stepper.jobs


def test_an_engine_without_weights_or_with_a_failed_update_samples_nothing(make: Callable[..., Made]) -> None:
    made = make(require_push=True)
    assert made.engine._vllm.serving.version == UNVERSIONED
    with pytest.raises(RolloutError, match=r"engine 3 has no weights of the trainer yet \(UNVERSIONED\): push before"):
        generate(made, of_call(1))
    assert made.engine.probe_adapter(of([None, POET])[1]) is None
    serve(made.engine._vllm.serving, 0)
    assert versions(generate(made, of_call(1))) == [0]
    made.engine.abandon_update("the trainer failed")
    for call in (lambda: generate(made, of_call(1)), made.engine.forget_weights):
        with pytest.raises(EngineDirtyError, match=r"begun \(the trainer failed\)"):
            call()


def test_each_of_the_versions_that_sample_must_be_new_enough(make: Callable[..., Made]) -> None:
    made = make()
    keep(made, POET, CLERK)
    serve(made.engine._vllm.serving, 9)
    assert versions(generate(made, of([CLERK, POET], 5))) == [7, 5]
    with pytest.raises(WeightVersionError, match="engine 3 serves 'poet' at version 5, version 6 is required"):
        generate(made, of([CLERK, POET], 6))
    with pytest.raises(WeightVersionError, match="engine 3 serves weights of version 9, version 10 is required"):
        generate(made, of([None, None], 10))
    assert [job.adapter for job in made.stepper.jobs] == [CLERK, POET, CLERK]


def test_a_probe_samples_without_and_with_the_adapter(make: Callable[..., Made]) -> None:
    made = make()
    keep(made, CLERK)
    serve(made.engine._vllm.serving, 2)
    found = made.engine.probe_adapter(of([None, CLERK])[1])
    assert found is not None and versions(found) == [2, 7]
    assert [job.adapter for job in made.stepper.jobs] == [None, CLERK]
    assert [each.token_ids for each in found] == [[11], [11]]


def test_an_engine_prepares_for_another_model_whose_version_may_be_any(make: Callable[..., Made]) -> None:
    made = make()
    serve(made.engine._vllm.serving, 8)
    made.engine.require_push()
    assert versions(generate(made, of_call(1))) == [8], "it has weights that were pushed"
    made.engine.forget_weights()
    assert made.engine._vllm.serving.version == UNVERSIONED
    with pytest.raises(RolloutError, match="has no weights of the trainer yet"):
        generate(made, of_call(1))


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_sleeps_without_its_adapters_and_samples_when_it_has_weights(
    make: Callable[..., Made], level: int
) -> None:
    made = make(device="cuda", sleep_mode=True)
    keep(made, POET)
    serve(made.engine._vllm.serving, 3)
    made.engine._adapters.load(POET)
    made.llm.told.clear()
    made.engine.sleep(level)
    assert made.llm.told == [("remove_lora", 1), ("sleep", {"level": level, "mode": "keep"})]
    serving = made.engine._vllm.serving
    assert serving.state == "asleep" and serving.version == (3 if level == 1 else UNVERSIONED)
    with pytest.raises(RolloutError, match=r"engine 3 cannot take weights now: it is asleep; call wake_up\(\) first"):
        made.engine.begin_update()
    made.engine.wake_up()
    assert made.llm.told[2:] == [("wake_up",)]
    if level == 2:
        with pytest.raises(RolloutError, match="has no weights of the trainer yet"):
            generate(made, of_call(1))
        made.engine.begin_update()
        made.engine.finish_update(4)
        made.engine.resume()
    assert versions(generate(made, of([POET]))) == [5], "it is loaded again"


@pytest.mark.shows("rollout: weights wake before keys and values, and are pushed in between")
def test_an_engine_on_gpus_that_train_takes_a_push_between_its_weights_and_its_keys(make: Callable[..., Made]) -> None:
    made = make(device="cuda", sleep_mode=True)
    serve(made.engine._vllm.serving, 3)
    made.engine.sleep(2)
    made.llm.told.clear()
    made.engine.wake_up("weights")
    made.engine.begin_update()
    made.engine.finish_update(4)
    made.engine.resume()
    with pytest.raises(RolloutError, match="cannot sample now: it is asleep"):
        generate(made, of_call(1))
    made.engine.wake_up("kv_cache")
    woken = [told for told in made.llm.told if told[0] == "wake_up"]
    assert woken == [("wake_up", {"tags": ["weights"]}), ("wake_up", {"tags": ["kv_cache"]})]
    assert made.llm.told.index(woken[1]) == len(made.llm.told) - 1
    assert versions(generate(made, of_call(1))) == [4]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_only_engines_that_were_told_so_sleep(make: Callable[..., Made], device: str) -> None:
    made = make(device=device)
    for call in (lambda: made.engine.sleep(1), made.engine.wake_up):
        with pytest.raises(UnsupportedError, match=r"engine 3 was started with sleep_mode=False: sleep\(\)"):
            call()
    assert not made.llm.told and made.engine._vllm.serving.state == "serving"


def test_on_a_cpu_keys_and_values_are_freed_and_taken_again(make: Callable[..., Made], monkeypatch: Any) -> None:
    made, asked = make(device="cpu", sleep_mode=True), list[str]()
    monkeypatch.setattr(made.engine._vllm, "ask_workers", asked.append)
    made.engine.sleep(1)
    made.engine.wake_up("weights")
    assert asked == ["free_cache"]
    made.engine.wake_up("kv_cache")
    assert asked == ["free_cache", "take_cache"] and versions(generate(made, of_call(1)))


def test_an_engine_is_not_woken_and_does_not_sleep_in_the_middle_of_an_update(make: Callable[..., Made]) -> None:
    made = make(device="cuda", sleep_mode=True)
    made.engine.begin_update()
    told = len(made.llm.told)
    for doing, call in (("wake up", made.engine.wake_up), ("sleep", lambda: made.engine.sleep(1))):
        with pytest.raises(RolloutError, match=f"engine 3 cannot {doing} now: a weight update is in progress"):
            call()
    assert len(made.llm.told) == told and made.engine._vllm.serving.state == "paused"
    made.engine.finish_update(1)
    made.engine.resume()


def test_a_dirty_engine_is_not_woken(make: Callable[..., Made]) -> None:
    made = make(device="cuda", sleep_mode=True)
    made.engine.sleep(1)
    made.engine.abandon_update("gone")
    with pytest.raises(EngineDirtyError, match="gone"):
        made.engine.wake_up()
    with pytest.raises(EngineDirtyError, match="gone"):
        generate(made, of_call(1))
    assert ("wake_up",) not in made.llm.told


def test_a_dirty_engine_does_not_sleep(make: Callable[..., Made]) -> None:
    made = make(device="cuda", sleep_mode=True)
    made.engine.abandon_update("gone")
    with pytest.raises(EngineDirtyError):
        made.engine.sleep(1)
    assert not made.llm.told


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What starting an engine does, in order; Ray and vLLM are stand-ins."""
    done: Any = []
    llm = Llm()
    llm.answers = {
        "moe_layers": [[1, 3]],
        "process": [Process(os.getpid(), "1"), Process(os.getppid(), "2")],
        "describe_parameters": [EngineParameters({"a": "float32"}, {}, {}), "of worker 1"],
    }

    def start(config: RolloutConfig, device: str) -> Llm:
        done.append(("start", device))
        return llm

    def expected(path: str, dtype: str, describe: Any) -> Any:
        done.append(("expect", path, dtype, describe(["tensor"]).dtypes))
        return "expected"

    context = SimpleNamespace(get_node_id=lambda: "node 7")
    address = SimpleNamespace(get_node_ip_address=lambda: "10.0.0.7")
    monkeypatch.setattr(engine_module, "ray", SimpleNamespace(get_runtime_context=lambda: context, util=address))
    monkeypatch.setattr(engine_module, "remove_stale_segments", lambda: done.append("remove"))
    monkeypatch.setattr(engine_module, "drop_names", lambda pids: done.append(("drop", *pids)))
    monkeypatch.setattr(in_process, "choose_cores", lambda config, *where: done.append(where) or (4, 5))
    monkeypatch.setattr(in_process, "prepare_process", lambda *of: done.append(("prepare", *of)))
    monkeypatch.setattr(in_process, "start_vllm", start)
    monkeypatch.setattr(in_process, "expected_weights", expected)
    monkeypatch.setattr(stepper_module, "VllmStepper", lambda given: done.append(given is llm) or AnsweringStepper())
    return done


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("routed", [False, True])
def test_an_engine_starts_on_cores_of_its_own_and_says_what_it_is(
    started: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, routed: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"GPU-{index}"))
    (tmp_path / "config.json").write_text("{}")
    config = RolloutConfig(model_path=str(tmp_path), dtype="float16", tensor_parallel=2, return_routed_experts=routed)
    engine, place = RolloutEngine(config, 6, device, False), NodePlace(1, 3)
    try:
        info = engine.start(place)
    finally:
        engine._vllm.loop.stop()
    cores = (4, 5) if device == "cpu" else ()
    chosen: list[Any] = [(6, place)] if device == "cpu" else []
    expect = ("expect", str(tmp_path), "float16", {"a": "float32"})
    drop = ("drop", os.getpid(), os.getpid(), os.getppid())
    assert started == ["remove", *chosen, ("prepare", device, cores, 2), ("start", device), True, expect, drop]
    assert engine._vllm.llm.told == [
        ("describe_parameters", ["tensor"]),
        *([("moe_layers",)] if routed else []),
        ("process",),
    ]
    assert engine._vllm.workers._processes == [Process(os.getppid(), "2")], "apart from this one"
    assert info == EngineInfo(
        name="engine 6",
        pid=os.getpid(),
        node_id="node 7",
        node_ip="10.0.0.7",
        host=host_identity(),
        cores=cores,
        device=device,
        dtype="float16",
        workers=2,
        device_ids=() if device == "cpu" else ("GPU-0", "GPU-1"),
        vocab_size=50,
        max_model_len=16,
        version=UNVERSIONED,
        state="serving",
        moe_layers=(1, 3) if routed else (),
        started=Process.of(os.getpid()).started,
        room=100,
    )
    serve(engine._vllm.serving, 4)
    engine._vllm.serving.sleep()
    assert (engine.describe().version, engine.describe().state) == (4, "asleep")


def test_a_model_that_is_not_on_the_node_is_refused_with_the_node(started: list[Any], tmp_path: Path) -> None:
    engine = RolloutEngine(RolloutConfig(model_path=str(tmp_path)), 2, "cpu", False)
    with pytest.raises(
        ConfigError, match=r"is not a Hugging Face directory on node 10\.0\.0\.7 \(Ray node node 7\).*engine 2"
    ):
        engine.start(NodePlace())
    assert not started


def test_an_engine_that_is_closed_leaves_no_segment() -> None:
    engine = RolloutEngine(RolloutConfig(model_path="x"), 0, "cpu", False)
    segment = engine.make_segment(100)
    assert Path(segment.path).exists()
    engine.close()
    engine.close()
    assert not Path(segment.path).exists()
