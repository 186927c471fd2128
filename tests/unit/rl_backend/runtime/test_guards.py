"""What atoms refuse, restore and count, on a runtime whose engine is a stand-in."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rl_backend.contracts import (
    AdamParams,
    BatchError,
    ConfigError,
    HandleError,
    NativeConfig,
    OptimizerConfig,
    PackedBatch,
    RoutedLayers,
    RuntimeConfig,
    StepResult,
    UnsupportedError,
)
from rl_backend.contracts.lora import LoRAConfig
from rl_backend.runtime import guarded
from rl_backend.runtime.guarded import GuardedRuntime
from rl_backend.runtime.interface import Runtime
from tests.support.offloads import parts_away
from tests.support.standing_runtime import CPU, StandingEngine, StandingHandle, StandingRuntime


@pytest.fixture
def closed() -> list[Any]:
    return []


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch, closed: list[Any]) -> Iterator[StandingRuntime]:
    monkeypatch.setattr(guarded, "require_float_weights", lambda hf_path: None)
    optimizer = OptimizerConfig(lr=0.1)
    made = StandingRuntime(
        RuntimeConfig(hf_path="there", backend_cfg=NativeConfig(device="cpu", optimizer=optimizer)), closed
    )
    yield made
    made.close()


def test_a_model_is_built_with_what_was_asked_and_the_rest_of_the_configuration(runtime: StandingRuntime) -> None:
    other = OptimizerConfig(lr=0.7)
    runtime.build_model()
    runtime.build_model(name="policy", optimizer=other, hf_path=Path("elsewhere"), head="values")
    runtime.build_model(forward_only=True)
    runtime.build_model(trainable=False, hf_path="third")
    runtime.build_model(forward_only=True, trainable=False)
    found = [(config.hf_path, config.backend_cfg.optimizer.lr, *rest) for config, *rest in runtime.engine.built]
    assert found == [
        ("there", 0.1, "model-1", "log_probs", False, False),
        ("elsewhere", 0.7, "policy", "values", False, False),
        ("there", 0.1, "model-3", "log_probs", True, False),
        ("third", 0.1, "model-4", "log_probs", True, True),
        ("there", 0.1, "model-5", "log_probs", True, False),
    ]
    assert runtime.config.hf_path == "there" and runtime.config.backend_cfg.optimizer.lr == 0.1
    with pytest.raises(ConfigError, match=r"head='logits': expected one of 'log_probs', 'values'"):
        runtime.build_model(head="logits")  # type: ignore[arg-type]
    for options in ({"forward_only": True}, {"trainable": False}):
        with pytest.raises(ConfigError, match=r"optimizer=.*a model that is not trained has none; leave it out"):
            runtime.build_model(optimizer=other, **options)  # type: ignore[arg-type]
    assert len(runtime.engine.built) == 5


def test_what_is_kept_is_said_once_where_a_model_is_trained(
    runtime: StandingRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    runtime.engine.kept = {"tower.weight": (2,)}
    with caplog.at_level(logging.WARNING):
        runtime.build_model(forward_only=True)
        assert not caplog.records
        runtime.build_model(hf_path="towered")
        assert len(caplog.records) == 1 and "tower" in caplog.text and "of towered are kept" in caplog.text
        runtime.engine.groups.world_group = SimpleNamespace(rank=lambda: 1)
        runtime.build_model()
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("device", "dtype", "rank", "said"),
    [
        ("cuda:1", "float32", 0, True),
        ("cuda:1", "float32", 1, False),
        ("cuda:1", "bfloat16", 0, False),
        ("cpu", "float32", 0, False),
    ],
)
def test_float32_on_a_gpu_is_remarked_on_once(
    closed: list[Any], caplog: pytest.LogCaptureFixture, device: str, dtype: Any, rank: int, said: bool
) -> None:
    engine = StandingEngine(closed)
    engine.groups.device = torch.device(device)
    engine.groups.world_group = SimpleNamespace(rank=lambda: rank, size=lambda: 2)
    with caplog.at_level(logging.WARNING):
        GuardedRuntime(RuntimeConfig(hf_path="there", backend_cfg=NativeConfig(param_dtype=dtype)), engine)
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["param_dtype='float32' on cuda"] * said


def test_a_place_is_that_of_the_groups(runtime: StandingRuntime) -> None:
    place = runtime.place
    assert (place.device, place.data_parallel_rank, place.data_parallel_size) == (CPU, 1, 3)
    assert place.data_parallel_group is runtime.engine.groups.dp_group and place.is_source is True
    assert runtime.is_mp_src_rank_with_outputs(runtime.build_model()) is True


def test_lists_of_handles_are_checked_before_any_is_changed(runtime: StandingRuntime) -> None:
    first, second, reference = runtime.build_model(), runtime.build_model(), runtime.build_model(forward_only=True)
    assert runtime.lr_scheduler_step(first) == 0.25 and runtime.lr_scheduler_step([first, second]) == [0.125, 0.25]
    assert runtime.lr_scheduler_step((second,)) == [0.125]
    first.broken = second.broken = "a pass failed"
    with pytest.raises(HandleError, match="zero_grad on 'model-3', which is forward-only"):
        runtime.zero_grad([first, second, reference])
    with pytest.raises(HandleError, match=r"lr_scheduler_step on 'model-3'.*build_model\(forward_only=False\)"):
        runtime.lr_scheduler_step([first, reference])
    assert first.optimizer is not None and first.events == [] and first.optimizer.learning_rate == 0.125
    runtime.zero_grad([first, second])
    assert first.events == second.events == ["drop"] and first.broken == second.broken == ""
    runtime.zero_grad(first)
    assert first.events == ["drop", "drop"] and runtime.engine.inside == 0


def test_versions_count_steps_that_were_taken(runtime: StandingRuntime) -> None:
    handle = runtime.build_model()
    assert runtime.optimizer_step(handle) is handle.answer and handle.weight_version == 8
    adam = AdamParams(lr=0.5)
    runtime.optimizer_step(handle, adam=adam)
    assert handle.events == [None, adam] and handle.weight_version == 9
    handle.answer = StepResult(False, float("nan"), None)
    runtime.optimizer_step(handle)
    assert handle.weight_version == 9
    with pytest.raises(HandleError, match=r"optimizer_step of \[\] with None for adam; give each tenant once"):
        runtime.optimizer_step([])
    with pytest.raises(HandleError, match="'model-1' is no LoRA tenant; take a handle of create"):
        runtime.optimizer_step([handle])


def test_parts_are_moved_by_themselves_and_those_that_a_model_lacks_are_nothing_to_move(runtime: StandingRuntime) -> None:
    handle, reference = runtime.build_model(), runtime.build_model(forward_only=True)

    def away(each: StandingHandle) -> list[str]:
        return parts_away(each.offload)

    runtime.to(handle, "cpu", model=False, grad=False)
    assert away(handle) == ["optimizer"]
    runtime.to(handle, "cpu", optimizer=False)
    assert away(handle) == ["model", "optimizer", "grad"]
    runtime.to(handle, "device", optimizer=False, model=False)
    assert away(handle) == ["model", "optimizer"] and handle.held["grad"][0].tolist() == [2.0] * 3
    runtime.to(handle, "device")
    assert away(handle) == [] and handle.held["model"][0].tolist() == [1.0, 1.0]
    runtime.to(reference, "cpu")
    assert away(reference) == ["model"]
    for place in ("cuda", ""):
        with pytest.raises(HandleError, match=rf"to\(device='{place}'\): expected 'cpu' or 'device'"):
            runtime.to(handle, place)  # type: ignore[arg-type]


BATCHES = [PackedBatch(torch.arange(3), torch.tensor([3]))]


def test_a_pass_is_asked_for_as_it_was_given(runtime: StandingRuntime) -> None:
    handle = runtime.build_model()

    def loss(model_output: Any, data: Any, dp_group: Any = None) -> Any: ...

    answer: Any = runtime.forward_backward(handle, BATCHES, loss)
    assert answer == "passed"
    handle.routed = RoutedLayers(4, 1, (True,))
    runtime.forward_backward(handle, BATCHES, None, forward_only=True, router_replay="record")
    found = [(each.data is BATCHES, each.loss_fn, each.forward_only, each.router_replay) for each in runtime.engine.passes]
    assert found == [(True, loss, False, "off"), (True, None, True, "record")]
    refused: Sequence[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (None, {}, BatchError, "forward_backward without loss_fn; pass one, or forward_only=True"),
        ({"a": loss}, {}, BatchError, "several losses for 'model-1' without sequences of LoRA tenants; pass one"),
        (loss, {"router_replay": "again"}, BatchError, "router_replay='again'; expected one of off, record, replay"),
    ]
    for given, options, kind, message in refused:
        with pytest.raises(kind, match=message):
            runtime.forward_backward(handle, BATCHES, given, **options)
    for routed in (None, RoutedLayers(4, 1, (False,))):
        handle.routed = routed
        with pytest.raises(UnsupportedError, match="router_replay='replay': model-1 has no routers to record or replay"):
            runtime.forward_backward(handle, BATCHES, loss, router_replay="replay")
    assert len(runtime.engine.passes) == 2 and runtime.engine.inside == 0


def test_a_pass_of_another_runtimes_model_is_refused_as_every_atom_is(runtime: StandingRuntime) -> None:
    for foreign in (SimpleNamespace(name="theirs"), None):
        with pytest.raises(HandleError, match=r"handle '?(theirs|None)'? is closed or belongs to another runtime"):
            runtime.forward_backward(foreign, BATCHES, None, forward_only=True)  # type: ignore[arg-type]
    assert not runtime.engine.passes


def test_modes_of_all_roots_come_back_as_each_module_had_them(runtime: StandingRuntime) -> None:
    handle = runtime.build_model()
    first, second = handle.parts
    assert isinstance(second, nn.Sequential)
    second[0].eval()
    with runtime.eval_mode(handle):
        assert [module.training for module in (first, second, *second)] == [False] * 4
        with runtime.train_mode(handle):
            assert [module.training for module in (first, second, *second)] == [True] * 4
        assert [module.training for module in (first, second, *second)] == [False] * 4
    assert [module.training for module in (first, second, *second)] == [True, True, False, True]


def test_weights_are_announced_in_the_dtype_asked_for_and_no_less_where_float32_is_computed_with(
    runtime: StandingRuntime,
) -> None:
    handle = runtime.build_model()
    assert runtime.weight_infos(handle) == handle.weights
    half = [(info.name, info.shape, info.dtype) for info in runtime.weight_infos(handle, dtype=torch.bfloat16)]
    assert half == [("plain", (2,), "bfloat16"), ("exact", (2,), "float32")]
    double = [info.dtype for info in runtime.weight_infos(handle, dtype=torch.float64)]
    assert double == ["float64", "float64"]


def test_a_close_releases_and_goes_on_after_an_error(runtime: StandingRuntime, closed: list[Any]) -> None:
    handles = [runtime.build_model() for _ in range(3)]
    released = handles[1].release

    def fails() -> None:
        released()
        raise ValueError("a stream was lost")

    handles[1].release = fails  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="a stream was lost"):
        runtime.close()
    assert [each.events for each in handles] == [["release"]] * 3
    assert all(each.owner is None and each.optimizer is None for each in handles)
    assert closed == [runtime.engine.groups]
    runtime.close()
    assert closed == [runtime.engine.groups]
    with pytest.raises(HandleError, match="this runtime is closed; create another one"):
        runtime.zero_grad(handles[0])


def test_what_no_runtime_of_ones_own_offers_names_the_operation_and_its_class(runtime: StandingRuntime) -> None:
    class Bare:
        config = runtime.config

    bare: Any = Bare()
    calls: dict[str, Any] = {
        "place": lambda: Runtime.place.__get__(bare),
        "export_shards": lambda: Runtime.export_shards(bare, None),
        "export_gradients": lambda: Runtime.export_gradients(bare, None),
        "activations": lambda: Runtime.activations(bare, None, []),
    }
    for operation, call in calls.items():
        with pytest.raises(UnsupportedError) as caught:
            call()
        assert str(caught.value) == f"the runtime 'native' does not offer {operation}; implement it in Bare"
        assert caught.value.details == {"backend": "native", "operation": operation}
    given = {"create_lora_adapter": (None, LoRAConfig()), "import_lora_adapter": (None, {})}
    tenants = [
        name
        for name in vars(Runtime)
        if "lora" in name or name in ("get_backend_info", "get_optimizer_state", "list_optimizer_states")
    ]
    assert len(tenants) == 9
    for name in tenants:
        with pytest.raises(UnsupportedError, match=rf"^the runtime 'native' does not offer {name}; implement it in Bare"):
            getattr(Runtime, name)(bare, *given.get(name, (None,)))


def test_a_step_drops_gradients_where_it_is_asked_to_and_whether_it_was_taken_or_not(runtime: StandingRuntime) -> None:
    handle = runtime.build_model()
    for answer in (StepResult(True, 1.0, None), StepResult(False, float("nan"), None)):
        handle.events.clear()
        handle.answer = answer
        assert runtime.optimizer_step(handle) is answer and handle.events == [None]
        adam = AdamParams(lr=0.5)
        assert runtime.optimizer_step(handle, adam=adam, zero_grad=True) is answer
        assert handle.events == [None, adam, "drop"]
    assert handle.weight_version == 9


def test_activations_are_recorded_forward_in_evaluation_and_modes_come_back(runtime: StandingRuntime) -> None:
    handle = runtime.build_model()
    handle.parts[0].eval()
    assert runtime.activations(handle, BATCHES) == [{}]
    assert [part.training for part in handle.parts] == [False, True]
    (request,) = runtime.engine.passes
    assert request.data is BATCHES and request.loss_fn is None and request.forward_only and request.adapters is None


class Saves:
    """In the place of a writer: what it was told, in order."""

    def __init__(self, error: Exception | None = None) -> None:
        self.told: list[Any] = []
        self.error = error

    def __getattr__(self, name: str) -> Any:
        def note(*arguments: Any, **options: Any) -> None:
            self.told.append((name, arguments, options))
            if name == "close" and self.error is not None:
                raise self.error

        return note


def test_a_loaded_model_has_no_gradients_and_is_known_by_its_checkpoint(runtime: StandingRuntime) -> None:
    trained, reference = runtime.build_model(), runtime.build_model(forward_only=True)
    writer: Any = Saves()
    runtime._writer = writer

    def load(handle: Any, source: Any) -> Any:
        writer.told.append(("load", source))
        assert handle.events == [], "dropped once it is loaded"
        return SimpleNamespace(digest="digest of it", extra={"step": 4})

    runtime.engine.load_training_state = load  # type: ignore[method-assign]
    for handle in (trained, reference):
        writer.told.clear()
        assert runtime.load_checkpoint(handle, "saved") == {"step": 4} and handle.loaded == "digest of it"
        assert writer.told == [("settle", (), {}), ("wait", (handle,), {}), ("load", Path("saved"))]
    assert trained.events == ["drop"] and reference.events == []


def test_exports_and_saves_ask_the_engine_for_what_was_asked_of_them(runtime: StandingRuntime) -> None:
    handle, writer, asked = runtime.build_model(), Saves(), list[Any]()
    runtime._writer = writer  # type: ignore[assignment]
    for name in ("gather_weights", "gather_gradients", "shards", "parts", "shard_infos", "training_state"):
        setattr(runtime.engine, name, lambda *arguments, name=name: asked.append((name, *arguments)) or f"{name} of it")
    runtime.engine.stream = lambda weights: f"stream of {weights}"  # type: ignore[assignment, method-assign, return-value]
    dtype = torch.bfloat16
    found: list[Any] = [
        runtime.export_weights(handle),
        runtime.export_weights(handle, dtype=dtype, byte_budget=7, names=["plain"]),
        runtime.export_gradients(handle, names=["exact"]),
        runtime.export_shards(handle, dtype=dtype),
        runtime.export_shards(handle, held=True),
        runtime.shard_infos(handle, dtype=dtype),
    ]
    assert found == [
        *["stream of gather_weights of it"] * 2,
        "stream of gather_gradients of it",
        "shards of it",
        "parts of it",
        "shard_infos of it",
    ]
    assert asked == [
        ("gather_weights", handle, None, None, None),
        ("gather_weights", handle, dtype, 7, ["plain"]),
        ("gather_gradients", handle, ["exact"]),
        ("shards", handle, dtype),
        ("parts", handle, None),
        ("shard_infos", handle, dtype),
    ]
    asked.clear()
    runtime.save_checkpoint(handle, "there", extra={"a": 1}, asynchronous=True)
    runtime.save_checkpoint(handle, Path("hf"), hf=True)
    for (name, (of, path, source), options), expected in zip(
        writer.told,
        (
            ("save_training_state", Path("there"), {"asynchronous": True, "extra": {"a": 1}}),
            ("save_hf", Path("hf"), {"asynchronous": False, "extra": None}),
        ),
        strict=True,
    ):
        assert (name, path, options) == expected and of is handle
        source()
    assert asked == [("training_state", handle), ("gather_weights", handle, None, None, None)]


def test_a_close_after_a_failed_save_releases_everything_and_raises_its_error(
    runtime: StandingRuntime, closed: list[Any]
) -> None:
    handle = runtime.build_model()
    assert runtime._writer._timeout == runtime.engine.groups.timeout
    runtime._writer = Saves(OSError("disk full"))  # type: ignore[assignment]
    with pytest.raises(OSError, match="disk full"):
        runtime.close()
    assert handle.events == ["release"] and handle.owner is None and closed == [runtime.engine.groups]
    runtime.close()
