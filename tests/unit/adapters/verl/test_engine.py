"""What each call of verl's becomes on a runtime, without ranks: the runtime and the model are stand-ins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adapters.verl import engine as module
from adapters.verl.engine import LanguageModelEngine, ValueModelEngine
from rl_backend.contracts import ForwardResult
from rl_backend.runtime import RankPlace
from tests.support.verl_batches import make_batch, rows

TENANT, BASE = SimpleNamespace(name="tenant", optimizer="adam"), SimpleNamespace(name="base", roots=lambda: iter(["root"]))


class Checkpoints:
    def __init__(self, calls: list[Any], weights: Path | None = None) -> None:
        self.calls, self.weights = calls, weights

    def __getattr__(self, name: str) -> Any:
        return lambda runtime, handle, *given, **more: self.calls.append((name, handle.name, *given, *more.items()))

    def weights_directory(self, local_path: str, hdfs_path: str | None) -> Path | None:
        self.calls.append(("look", local_path, hdfs_path))
        return self.weights


class Runtime:
    def __init__(self, calls: list[Any], *, is_source: bool = True) -> None:
        self.calls = calls
        self.place = RankPlace(torch.device("cpu"), 2, 3, "dp", is_source)  # type: ignore[arg-type]

    def forward_backward(self, model: Any, packed: Any, loss: Any, **options: Any) -> ForwardResult:
        self.calls.append(("run", model.name, len(packed), loss is not None, *options.items()))
        log_probs = [torch.zeros(int(length)) for each in packed for length in each.seq_lens]
        return ForwardResult(losses=(1.0,), outputs={"log_probs": log_probs})

    def optimizer_step(self, handle: Any) -> Any:
        return SimpleNamespace(grad_norm=torch.tensor(1.5))

    def lr_scheduler_step(self, handle: Any) -> Any:
        return torch.tensor(0.25)

    def zero_grad(self, handle: Any) -> None:
        self.calls.append(("zero", handle.name))

    @contextmanager
    def train_mode(self, handle: Any) -> Iterator[None]:
        self.calls.append(("train", handle.name))
        yield

    @contextmanager
    def eval_mode(self, handle: Any) -> Iterator[None]:
        self.calls.append(("eval", handle.name))
        yield

    def close(self) -> None:
        self.calls.append("close")


class Model:
    trained, base = TENANT, BASE
    micro_batch_multiple = 1

    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls
        self.at_work: Any = SimpleNamespace(
            name="tenant", micro_batch_multiple=1, routed_layers=SimpleNamespace(sparse=(True, False))
        )

    def move(self, where: str, **parts: bool) -> None:
        self.calls.append((where, *(name for name, moves in parts.items() if moves)))

    def for_rollout(self, dtype: torch.dtype, *, base_sync_done: bool | None) -> Any:
        return ("rollout", dtype, base_sync_done)

    def shards(self, dtype: torch.dtype) -> Any:
        self.calls.append(("shards", dtype))
        return iter(())

    def renew_tenant(self, path: str) -> None:
        self.calls.append(("renew", path))


def made(kind: Any = LanguageModelEngine, weights: Path | None = None, *, is_source: bool = True, **settings: Any) -> Any:
    """An engine and the calls that it makes."""
    calls: list[Any] = []
    engine: Any = object.__new__(kind)
    given: dict[str, Any] = {
        "param_offload": True,
        "optimizer_offload": False,
        "forward_only": False,
        "router_replay": "disabled",
        "use_prefix_grouper": False,
        "lora": "lora",
        "runtime": SimpleNamespace(backend_cfg=SimpleNamespace(parallel=SimpleNamespace(cp=1))),
    }
    engine.settings = SimpleNamespace(**{**given, **settings})
    engine.mode, engine.calls = None, calls
    engine._checkpoints, engine._runtime, engine._model = (
        Checkpoints(calls, weights),
        Runtime(calls, is_source=is_source),
        Model(calls),
    )
    engine._export_dtype, engine._delta_shard_snap = torch.bfloat16, {}
    engine._optimizer_config = "optim"
    return engine


def test_what_verl_asks_of_a_rank_and_its_model_is_answered() -> None:
    engine = made(optimizer_offload=True, param_offload=False)
    assert (engine.get_data_parallel_rank(), engine.get_data_parallel_size(), engine.get_data_parallel_group()) == (
        2,
        3,
        "dp",
    )
    assert engine.is_mp_src_rank_with_outputs() is True and made(is_source=False).is_mp_src_rank_with_outputs() is False
    assert engine.handle is TENANT and engine.optimizer == "adam" and engine.module == ["root"]
    assert (engine.is_param_offload_enabled, engine.is_optimizer_offload_enabled) == (False, True)
    assert engine.optimizer_step() == 1.5 and engine.lr_scheduler_step() == 0.25
    engine.optimizer_zero_grad()
    for mode in ("train", "eval"):
        with engine.runtime_mode(mode):
            pass
    assert engine.calls == [("zero", "tenant"), ("train", "tenant"), ("eval", "tenant")]
    assert (engine.train_mode().mode, engine.eval_mode(disable_auto_offload=True).disable_auto_offload) == ("train", True)
    with made(ValueModelEngine).disable_adapter():
        pass


@pytest.mark.parametrize(
    ("name", "device", "where"), [("cpu", "cpu", "device"), ("cuda", "cuda", "device"), ("cuda", "cpu", "cpu")]
)
def test_parts_that_verl_moves_by_hand_go_where_they_are_wanted(
    monkeypatch: pytest.MonkeyPatch, name: str, device: str, where: str
) -> None:
    monkeypatch.setattr(module, "get_device_name", lambda: name)
    monkeypatch.setattr("verl.workers.engine.base.get_device_name", lambda: name)
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)
    engine = made()
    engine.to(device, model=False, optimizer=True, grad=False)
    engine.to(device, model=True, optimizer=False, grad=True)
    engine.to(device)
    assert engine.calls == [(where, "optimizer"), (where, "model", "grad"), (where, "model", "optimizer", "grad")]


def test_exports_bring_the_model_to_the_device_first() -> None:
    engine = made()
    for done in (None, True, False):
        assert engine.get_per_tensor_param(layered_summon=True, base_sync_done=done) == ("rollout", torch.bfloat16, done)
    shards, config = engine.get_per_tensor_param_shard(anything=1)
    assert list(shards) == [] and config is None
    changes, config = engine.get_per_tensor_param_delta_shard()
    assert list(changes) == [] and config is None
    assert engine.calls == [
        *[("device", "model")] * 4,
        ("shards", torch.bfloat16),
        ("device", "model"),
        ("shards", torch.bfloat16),
    ]


@pytest.mark.parametrize("mode", [None, "train"])
def test_a_save_and_a_load_bring_what_they_need_and_put_it_back_unless_a_mode_is_on(mode: str | None) -> None:
    rest = [] if mode else [("cpu", "model", "grad")]
    engine = made()
    engine.mode = mode
    engine.save_checkpoint("/a", None, 3, 2, more=1)
    assert engine.calls == [("device", "model", "optimizer"), ("save", "tenant", "/a", None, 2, ("step", 3)), *rest]
    engine.calls.clear()
    engine.load_checkpoint("/a", None, del_local_after_load=True)
    assert engine.calls == [("look", "/a", None), ("device", "model", "optimizer"), ("load", "tenant", "/a", None), *rest]
    engine.calls.clear()
    engine.load_checkpoint(None)
    assert engine.calls == [("finish", "tenant")]
    adapter = made(weights=Path("/a/lora_adapter"))
    adapter.mode = mode
    adapter.load_checkpoint("/a")
    assert adapter.calls == [
        ("look", "/a", None),
        ("device", "model", "optimizer"),
        ("finish", "tenant"),
        ("renew", "/a/lora_adapter"),
        *rest,
    ]


@pytest.mark.parametrize("forward_only", [False, True])
def test_weights_alone_are_loaded_into_a_model_that_is_built_anew(
    monkeypatch: pytest.MonkeyPatch, forward_only: bool
) -> None:
    engine = made(weights=Path("/a/huggingface"), lora=None, forward_only=forward_only)
    built: list[Any] = []

    def build(runtime: Any, settings: Any, optimizer: Any, hf_path: str | None) -> Any:
        built.append((runtime, settings is engine.settings, optimizer, hf_path))
        return Model(engine.calls)

    monkeypatch.setattr(module, "create_runtime", lambda given: "another")
    monkeypatch.setattr(module, "optimizer_settings", lambda given: f"settings of {given}")
    monkeypatch.setattr(module, "EngineModel", build)
    engine.load_checkpoint("/a")
    optimizer = None if forward_only else "settings of optim"
    assert built == [("another", True, optimizer, "/a/huggingface")]
    assert engine.calls == [("look", "/a", None), ("finish", "tenant"), "close", ("cpu", "model", "grad")]
    first = made(lora=None)
    first._model = None
    engine = first
    first.initialize()
    assert built[-1][0] is first._runtime and built[-1][3] is None and first.calls == [("cpu", "model", "grad")]


@pytest.mark.parametrize(
    ("mode", "at_base", "forward_only", "asked", "replay"),
    [
        ("disabled", False, False, True, "off"),
        ("R2", False, True, True, "record"),
        ("R2", False, True, False, "off"),
        ("R2", True, True, True, "off"),
    ],
)
def test_a_batch_runs_on_what_is_at_work_and_a_reference_never_replays(
    mode: str, at_base: bool, forward_only: bool, asked: bool, replay: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = made(router_replay=mode)
    at_work = TENANT if not at_base else BASE
    for name, value in (("micro_batch_multiple", 1), ("routed_layers", SimpleNamespace(sparse=(True, False)))):
        monkeypatch.setattr(at_work, name, value, raising=False)
    engine._model.at_work = at_work
    engine._runtime.place = RankPlace(torch.device("cpu"), 0, 1, None, True)  # type: ignore[arg-type]
    batch = make_batch(rows(), "full", micro_batch_size_per_gpu=4, enable_routing_replay=asked)
    found = engine.forward_backward_batch(batch, None if forward_only else (lambda **_: None), forward_only)
    assert engine.calls == [
        ("poll", "tenant"),
        ("run", at_work.name, 2, not forward_only, ("forward_only", forward_only), ("router_replay", replay)),
    ]
    assert found["loss"] == [1.0] and len(found["model_output"]["log_probs"].unbind()) == 8
    engine._runtime.place = RankPlace(torch.device("cpu"), 0, 1, None, False)  # type: ignore[arg-type]
    assert engine.forward_backward_batch(batch, None, True) == {}


def test_routes_of_a_replay_are_required_of_the_batch() -> None:
    engine = made(router_replay="R3")
    for name, value in (("micro_batch_multiple", 1), ("routed_layers", SimpleNamespace(sparse=(True, False)))):
        setattr(TENANT, name, value)
    engine._model.at_work = TENANT
    engine._runtime.place = RankPlace(torch.device("cpu"), 0, 1, None, True)  # type: ignore[arg-type]
    with pytest.raises(Exception, match=r"router_replay\.mode='R3': the batch has no 'routed_experts'"):
        engine.forward_backward_batch(make_batch(rows(), "full", enable_routing_replay=True), None, True)


@pytest.mark.parametrize(
    ("settings", "moved"),
    [
        ({"param_offload": False, "optimizer_offload": True}, ("cpu", "optimizer")),
        ({"param_offload": True, "optimizer_offload": True}, ("cpu", "model", "optimizer", "grad")),
        ({"param_offload": False, "optimizer_offload": False}, ("cpu",)),
    ],
    ids=str,
)
def test_a_new_model_rests_where_it_is_told_to(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, bool], moved: tuple[str, ...]
) -> None:
    engine = made(lora=None, **settings)
    engine._model = None
    monkeypatch.setattr(module, "optimizer_settings", lambda given: given)
    monkeypatch.setattr(module, "EngineModel", lambda *_: Model(engine.calls))
    engine.initialize()
    assert engine.calls == [moved]
