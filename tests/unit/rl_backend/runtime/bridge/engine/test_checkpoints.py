"""What a checkpoint of the bridge has of random state and steps, and Megatron on a CPU inside of its context only."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_backend.contracts import CheckpointError, UnsupportedError
from rl_backend.runtime.bridge import installed
from rl_backend.runtime.bridge.engine import engine as checkpoints
from rl_backend.runtime.bridge.megatron import cpu as megatron_cpu
from rl_backend.runtime.bridge.megatron.cpu import PATCHES, iterate_on_cpu, on_cpu

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Tracker:
    def __init__(self, states: dict[str, Any]) -> None:
        self.states = states

    def get_states(self) -> dict[str, Any]:
        return dict(self.states)

    def set_states(self, states: dict[str, Any]) -> None:
        self.states = states


def test_streams_of_megatron_are_saved_and_restored_by_device_name_and_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    handle: Any = SimpleNamespace(groups=SimpleNamespace(device=CPU))
    generator = torch.Generator().manual_seed(3)
    plain = torch.arange(4, dtype=torch.uint8)
    tracker = Tracker({"model-parallel-rng": plain, "graph": generator, "new": torch.zeros(1)})
    monkeypatch.setattr(checkpoints.streams, "get_cuda_rng_tracker", lambda: tracker)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda *_: 2)
    found = checkpoints._random_state(handle)
    names = {"random.megatron.cpu.model-parallel-rng.2", "random.megatron.cpu.graph.2", "random.megatron.cpu.new.2"}
    assert found.keys() == {"random.cpu.2", *names}
    saved = found["random.megatron.cpu.model-parallel-rng.2"]
    assert torch.equal(saved, plain) and saved.data_ptr() != plain.data_ptr()
    assert torch.equal(found["random.megatron.cpu.graph.2"], generator.get_state())
    expected = torch.rand(2, generator=generator)
    plain += 7
    torch.rand(3)
    before = torch.get_rng_state()
    given: dict[str, Any] = {name: value for name, value in found.items() if not name.endswith("new.2")}
    checkpoints._restore_random_state(handle, given)
    assert tracker.states["model-parallel-rng"].tolist() == [0, 1, 2, 3] and torch.equal(
        tracker.states["new"], torch.zeros(1)
    )
    assert torch.equal(torch.rand(2, generator=tracker.states["graph"]), expected)
    assert torch.equal(torch.get_rng_state(), found["random.cpu.2"]) and not torch.equal(before, found["random.cpu.2"])


def test_a_stream_differs_between_the_ranks_that_megatron_seeds_differently() -> None:
    prefix, names = "random.megatron.cpu.", checkpoints.streams
    assert checkpoints._differs("random.cpu") == "replicas"
    assert checkpoints._differs(prefix + names.get_data_parallel_rng_tracker_name()) == "nowhere"
    assert checkpoints._differs(prefix + names.get_expert_parallel_rng_tracker_name()) == "expert_ranks"
    assert checkpoints._differs(f"{prefix}model-parallel-rng") == "tensor_ranks"


@pytest.mark.parametrize("trained", [True, False])
def test_uneven_steps_are_refused_by_an_optimizer_that_counts_them_for_all(
    monkeypatch: pytest.MonkeyPatch, trained: bool
) -> None:
    asked: dict[str, Any] = {}

    def load_state(handle: Any, path: Path, tensors: Any, **options: Any) -> tuple[Any, Any]:
        asked.update(options, tensors=tensors)
        return "manifest", {}

    told: list[Any] = []
    for name in ("set_num_steps", "_restore_random_state"):
        monkeypatch.setattr(checkpoints, name, lambda *args, name=name: told.append((name, args[1:])))
    weight = torch.nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))
    master = torch.arange(4.0)
    exact = torch.nn.Parameter(torch.ones(2))
    states = [
        SimpleNamespace(parameter=weight, start=1, end=5, tensors={"param": master}),
        SimpleNamespace(parameter=exact, start=0, end=2, tensors={"param": torch.zeros(2)}),
    ]
    monkeypatch.setattr(checkpoints, "parameter_states", lambda megatron: iter(states))
    optimizer = SimpleNamespace(megatron="megatron", restore_schedule=lambda steps: told.append(("schedule", steps)))
    chunks = [SimpleNamespace(start_param_sync=lambda **options: told.append(("sync", options))) for _ in range(2)]
    handle: Any = SimpleNamespace(
        optimizer=optimizer if trained else None, groups=SimpleNamespace(device=CPU), chunks=chunks
    )
    manifest = SimpleNamespace(optimizer_steps=7, schedule_steps=9, fewer_steps={})
    monkeypatch.setattr(
        checkpoints.checkpoints, "load_state", lambda *args, **options: (load_state(*args, **options), (manifest, {}))[1]
    )
    assert checkpoints.load_training_checkpoint(handle, Path("saved")) is manifest
    if trained:
        # Masters are rounded to the weights of other dtypes; in float32 they are views.
        assert weight.flatten().tolist() == [0, 0, 1, 2, 3, 0] and exact.tolist() == [1, 1]
        assert told == [
            ("sync", {"force_sync": True}),
            ("sync", {"force_sync": True}),
            ("set_num_steps", (7,)),
            ("schedule", 9),
            ("_restore_random_state", ({},)),
        ]
    else:
        assert told == [] and not weight.any()
    asked["check"](manifest)
    uneven = SimpleNamespace(optimizer_steps=7, fewer_steps={"router": 3})
    if trained:
        with pytest.raises(CheckpointError, match=r"counts 3 optimizer steps for router and 7 for most others"):
            asked["check"](uneven)
    else:
        asked["check"](uneven)
    assert asked["earlier"]("random.megatron.cpu.stream.4") == "random.megatron.stream.4"
    assert asked["earlier"]("random.cpu.4") == "random.cpu.4"


def test_a_cuda_device_is_the_cpu_inside_and_everything_is_as_before_outside() -> None:
    before = [
        getattr(patch.owner if not isinstance(patch.owner, str) else sys.modules[patch.owner], patch.attribute)
        for patch in PATCHES
        if not isinstance(patch.owner, str)
    ]
    with on_cpu(CPU):
        assert torch.zeros(2, device="cuda").device == CPU and torch.zeros(2, device=CUDA).device == CPU
        assert torch.zeros(2, device="meta").device.type == "meta" and torch.zeros(1).to("meta").device.type == "meta"
        assert torch.zeros(1).to("cuda:1").device == CPU and torch.zeros(1).to(torch.float64).dtype == torch.float64
        assert torch.zeros(1).to("cuda", torch.float64).dtype == torch.float64
        assert torch.zeros(1).type() == "torch.cuda.FloatTensor" and torch.zeros(1).int().type() == "torch.cuda.IntTensor"
        assert torch.zeros(1).type(torch.float64).dtype == torch.float64
        assert torch.cuda.current_device() == CPU and torch.zeros(1).cuda().device == CPU
        with on_cpu(CPU):
            assert torch.cuda.current_device() == CPU
        assert torch.cuda.current_device() == CPU, "the inner one leaves it to the outer"
        stream = torch.cuda.current_stream()
        assert stream.record_event() is stream and stream.synchronize() is None  # type: ignore[comparison-overlap]
    after = [getattr(patch.owner, patch.attribute) for patch in PATCHES if not isinstance(patch.owner, str)]
    assert all(first == second for first, second in zip(before, after, strict=True))
    assert torch.zeros(1).type() == "torch.FloatTensor"
    with pytest.raises(KeyError), on_cpu(CPU):
        raise KeyError
    assert megatron_cpu._users == 0 and torch.zeros(1).type() == "torch.FloatTensor"
    with on_cpu(torch.device("meta")):
        assert megatron_cpu._users == 0


def test_items_are_made_inside_and_used_outside() -> None:
    inside: list[str] = []

    def items() -> Iterator[int]:
        try:
            for number in (1, 2, 3):
                inside.append(torch.zeros(1).type())
                yield number
        finally:
            inside.append(f"closed {torch.zeros(1).type()}")

    found = iterate_on_cpu(CPU, items())  # type: ignore[arg-type]
    assert next(found) == 1 and torch.zeros(1).type() == "torch.FloatTensor"
    found.close()
    assert inside == ["torch.cuda.FloatTensor", "closed torch.cuda.FloatTensor"]
    inside.clear()
    assert list(iterate_on_cpu(CPU, items())) == [1, 2, 3] and len(inside) == 4  # type: ignore[arg-type]


def test_a_quiet_build_changes_no_logger_and_hides_what_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    handlers, level, disabled = root.handlers[:], root.level, root.manager.disable
    extra = logging.NullHandler()

    @installed.quiet()
    def build() -> None:
        root.addHandler(extra)
        root.setLevel(logging.DEBUG)
        sys.stdout.write("noise")
        warnings.warn("noise", stacklevel=1)
        assert not root.isEnabledFor(logging.WARNING) and root.isEnabledFor(logging.ERROR)
        raise KeyError

    with pytest.raises(KeyError):
        build()
    assert (root.handlers, root.level, root.manager.disable) == (handlers, level, disabled)
    assert capsys.readouterr().out == ""


def test_what_megatron_imports_in_vain_can_be_subclassed_and_never_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed.importlib.util, "find_spec", lambda name: None)
    for name in (*installed.NAMES, installed.REMOVED):
        monkeypatch.delitem(sys.modules, name, raising=False)

    @installed.placeholders()
    def load() -> None:
        engine: Any = sys.modules["transformer_engine"]
        assert engine.__version__ == "0.0.0" and engine.pytorch is sys.modules["transformer_engine.pytorch"]
        assert engine.pytorch.ops is sys.modules["transformer_engine.pytorch.ops"]
        linear = engine.pytorch.Linear
        assert issubclass(linear, torch.nn.Module) and engine.pytorch.Linear is linear
        with pytest.raises(ModuleNotFoundError, match=r"^Linear needs transformer_engine, which is not installed$"):
            linear(1, 2)
        masks: Any = sys.modules[installed.REMOVED]
        with pytest.raises(ModuleNotFoundError, match=r"^_mask needs transformers\.modeling_attn_mask_utils, which"):
            masks._mask()
        with pytest.raises(AttributeError):
            _ = engine.pytorch.attention
        raise KeyError

    with pytest.raises(KeyError):
        load()
    assert not any(name in sys.modules for name in (*installed.NAMES, installed.REMOVED))
    assert not installed.has_transformer_engine()
    monkeypatch.setattr(installed.importlib.util, "find_spec", lambda name: name)
    with installed.placeholders():
        assert "transformer_engine" not in sys.modules and installed.has_transformer_engine()


@pytest.mark.parametrize("missing", ["megatron.core.optimizer", "megatron.bridge"])
def test_a_package_that_megatron_lacks_is_named_and_pickles_of_torch_stay_its_own(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    load: Any = torch.storage._load_from_bytes  # type: ignore[attr-defined]
    asked: list[str] = []

    def import_module(name: str) -> None:
        asked.append(name)
        torch.storage._load_from_bytes = None  # type: ignore[attr-defined]
        assert sys.modules.get("wandb", "imported before") in (None, "imported before")
        if name == missing:
            raise ModuleNotFoundError("No module named 'multi_storage_client'", name="multi_storage_client")

    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(installed, "require_installed", lambda: asked.append("versions"))
    monkeypatch.setattr(installed.importlib, "import_module", import_module)
    with pytest.raises(UnsupportedError, match="the package 'multi_storage_client' is missing; the bridge") as failure:
        installed.import_megatron()
    assert failure.value.details == {"package": "multi_storage_client"} and "wandb" not in sys.modules
    assert torch.storage._load_from_bytes is load  # type: ignore[attr-defined]
    every = [
        "versions",
        *(f"megatron.core.{name}" for name in ("models.gpt", "distributed", "optimizer", "pipeline_parallel")),
    ]
    assert asked == [*every, "megatron.bridge"][: len(asked)] and asked[-1] == missing
