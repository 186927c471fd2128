"""What runs in vLLM's processes: the stepper, the receiving end of weights, and what workers say of their model."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.config import LoadConfig
from vllm.distributed.weight_transfer.base import WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.v1.engine import FinishReason

from actors.rollout.config import SamplingConfig
from actors.rollout.engine.step_loop import Completion
from actors.rollout.engine.stepper import VllmStepper
from actors.rollout.messages import AdapterVersion, Request
from actors.rollout.vllm.streaming import CheckedIpcWeightTransferEngine, CheckedLoad, ChecksumInfo
from actors.rollout.vllm.worker import ReaderFilesLoader
from actors.wire.segment import SharedSegment
from rl_backend.contracts import TensorInfo, WeightManifest, WeightSyncError
from rl_backend.weights.inspection import device_checksum
from rl_backend.weights.staging import plan_layout, write_tensors


class Engine:
    """vLLM's engine: makes ids of its own, and keeps what it is asked."""

    def __init__(self) -> None:
        self.asked: Any = []
        self.outputs: list[Any] = []
        self.output_processor = SimpleNamespace(request_states={})
        self.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=12))

    def add_request(self, request_id: str, prompt: Any, params: Any, *, lora_request: Any) -> str:
        self.asked.append(("add", request_id, prompt["prompt_token_ids"], params.seed, params.max_tokens, lora_request))
        own = f"{request_id}-of-vllm"
        state = SimpleNamespace(
            detokenizer=SimpleNamespace(num_output_tokens=lambda: 10 + int(request_id)),
            make_request_output=lambda *args: self.asked.append(("make", own, *args)) or output(request_id, "partial"),
        )
        self.output_processor.request_states[own] = state
        return own

    def step(self) -> list[Any]:
        return self.outputs

    def abort_request(self, ids: list[str], *, internal: bool) -> None:
        self.asked.append(("abort", ids, internal))

    def reset_prefix_cache(self, *, reset_running_requests: bool) -> None:
        self.asked.append(("reset", reset_running_requests))


def output(request_id: str, completion: str, *, finished: bool = True, cached: int | None = None) -> Any:
    return SimpleNamespace(request_id=request_id, outputs=[completion], finished=finished, num_cached_tokens=cached)


def test_vllm_is_stepped_by_hand_with_keys_of_the_caller() -> None:
    engine = Engine()
    llm = SimpleNamespace(llm_engine=engine, collective_rpc=lambda method: engine.asked.append(("rpc", method)))
    stepper = VllmStepper(llm)
    assert stepper.room == 12
    adapter = AdapterVersion("poet", 3, 9, 8)
    for key, seed in ((4, 7), (5, None), (6, 8)):
        chosen = adapter if key == 5 else None
        stepper.add(key, Request((1, 2, key), SamplingConfig(max_new_tokens=20 + key), seed, chosen))
    added = [each[:5] for each in engine.asked]
    assert added == [
        ("add", "4", [1, 2, 4], 7, 24),
        ("add", "5", [1, 2, 5], None, 25),
        ("add", "6", [1, 2, 6], 8, 26),
    ]
    loras = [each[5] for each in engine.asked]
    assert loras[0] is loras[2] is None
    assert (loras[1].lora_name, loras[1].lora_int_id, loras[1].lora_path) == ("poet@3#9", 9, "memory://poet@3#9")
    assert [stepper.sampled(key) for key in (4, 6)] == [14, 16]
    engine.outputs = [output("6", "last", cached=3), output("4", "not yet", finished=False), output("5", "middle")]
    assert stepper.step() == [(6, Completion("last", 3)), (5, Completion("middle", 0))]
    engine.outputs = []
    assert stepper.step() == []
    engine.asked.clear()
    assert stepper.give_up(4) == Completion("partial", 0)
    assert engine.asked == [("make", "4-of-vllm", [], None, FinishReason.ABORT, None), ("abort", ["4-of-vllm"], True)]
    for key in (4, 5, 6):
        with pytest.raises(KeyError):
            stepper.sampled(key)
    engine.asked.clear()
    stepper.forget()
    assert engine.asked == [("reset", True), ("rpc", "synchronize_device")]


def test_an_engine_reads_the_files_that_the_trainer_reads(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for name in ("model", "other", "consolidated"):
        save_file({name: torch.ones(1)}, tmp_path / f"{name}.safetensors")
    # By the function of vLLM that asks for the files, which versions do differently.
    source = ReaderFilesLoader.Source(str(tmp_path), revision=None)
    found = dict(ReaderFilesLoader(LoadConfig(use_tqdm_on_load=False))._get_weights_iterator(source))
    assert found == {"model": torch.ones(1)}


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    # As if an engine's process had imported it: what that changes in vLLM and torch is not for this process.
    monkeypatch.setitem(WeightTransferEngineFactory._registry, "rl_backend", None)
    from actors.rollout.vllm import worker as module

    return module


@pytest.fixture
def segment() -> Iterator[SharedSegment]:
    made = SharedSegment(1024)
    yield made
    made.close()


def test_staged_weights_go_into_vllms_loaders_between_packings(
    worker: Any, segment: SharedSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Any] = []

    class Packing:
        def __init__(self, what: str) -> None:
            self.what = what

        def __enter__(self) -> None:
            done.append(f"begin {self.what}")

        def __exit__(self, *_: object) -> None:
            done.append(f"end {self.what}")

    for what in ("experts", "embeddings"):
        monkeypatch.setattr(worker, f"packing_{what}_again", lambda model, what=what: Packing(f"{what} of {model.name}"))
    monkeypatch.setattr(worker, "initialize_layerwise_reload", lambda model: done.append("initialize"))
    monkeypatch.setattr(worker, "finalize_layerwise_reload", lambda model, config: done.append(f"finalize {config}"))
    weights = {"b": torch.arange(6.0).view(2, 3), "a": torch.ones(3).bfloat16()}
    layout, _ = plan_layout([TensorInfo.of(name, tuple(each.shape), each.dtype) for name, each in weights.items()])
    manifest = WeightManifest(version=1, tensors=write_tensors(segment.buffer, layout, weights.items()))
    loaded: list[tuple[str, Tensor]] = []

    def load(given: Any) -> None:
        done.append("load")
        loaded.extend(given)

    model = SimpleNamespace(name="model", load_weights=load)
    engine: Any = worker.StagedWeightTransferEngine.__new__(worker.StagedWeightTransferEngine)
    engine.model, engine.model_config = model, "config"
    update = worker.StagedUpdateInfo(manifest=manifest.model_dump_json())
    engine.init_transfer_engine(worker.StagedInitInfo(path=str(segment.path), nbytes=segment.nbytes))
    for _ in range(2):
        done.clear()
        engine.start_weight_update()
        assert done == ["begin embeddings of model", "begin experts of model", "initialize"]
        engine.receive_weights(update)
        engine.finish_weight_update()
        assert done[3:] == ["load", "finalize config", "end experts of model", "end embeddings of model"]
    assert [name for name, _ in loaded] == ["b", "a"] * 2
    assert all(torch.equal(each, weights[name]) and each.dtype == weights[name].dtype for name, each in loaded)
    engine.shutdown()
    assert engine._buffer is None


def test_the_receiver_that_was_chosen_does_all_of_an_update(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    done: Any = []
    names = ("start_weight_update", "finish_weight_update", "parse_update_info", "receive_weights", "shutdown")
    active = SimpleNamespace(**{name: lambda *args, name=name: done.append((name, *args)) or "parsed" for name in names})
    monkeypatch.setattr(worker, "name_weight_loaders", lambda model: done.append(("name", model)))
    engine: Any = worker.SwitchingWeightTransferEngine.__new__(worker.SwitchingWeightTransferEngine)
    engine._active, engine.model = active, "model"
    engine.start_weight_update()
    assert engine.parse_update_info({"a": 1}) == "parsed"
    engine.receive_weights("info")
    engine.finish_weight_update()
    engine.shutdown()
    assert done == [
        ("name", "model"),
        ("start_weight_update",),
        ("parse_update_info", {"a": 1}),
        ("receive_weights", "info"),
        ("finish_weight_update",),
        ("shutdown",),
    ]


class Model(nn.Module):
    """Two parameters under vLLM's names; those of a checkpoint begin otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.packed_modules_mapping = {"qkv_proj": ["q_proj"]}
        self.a, self.b = nn.Parameter(torch.ones(1, dtype=torch.bfloat16)), nn.Parameter(torch.ones(2))


class Mapper:
    def get_rename_mapper(self) -> Mapper:
        return self

    def _map_name(self, name: str) -> str | None:
        return None if name.startswith("mtp") else name.replace("hf.", "")


@pytest.mark.parametrize("renames", [True, False])
def test_a_worker_says_what_its_model_has_and_what_vllm_calls_it(worker: Any, renames: bool) -> None:
    model: Any = Model()
    if renames:
        model.hf_to_vllm_mapper = Mapper()
    extension: Any = worker.WorkerExtension()
    extension.model_runner = SimpleNamespace(get_model=lambda: model)
    found = extension.describe_parameters(["hf.a.weight", "mtp.fc.weight"])
    assert found.dtypes == {"a": "bfloat16", "b": "float32"} and found.packed_modules == {"qkv_proj": ["q_proj"]}
    names = ("a.weight", None) if renames else ("hf.a.weight", "mtp.fc.weight")
    assert found.renamed == dict(zip(("hf.a.weight", "mtp.fc.weight"), names, strict=True))
    own = {"a": "hf.a", None: "mtp.fc"} if renames else {"hf.a": "hf.a", "mtp.fc": "mtp.fc"}
    # A checkpoint with tied embeddings has no weight of the head, whose adapter vLLM serves all the same.
    assert extension.adapter_slots._modules_of_checkpoint == own | {"lm_head": "lm_head"}
    extension.model_runner = SimpleNamespace(get_model=lambda: nn.Linear(1, 1))
    assert extension.describe_parameters([]).packed_modules == {}


def test_a_worker_gives_back_keys_and_values_and_takes_them_again_empty(worker: Any) -> None:
    extension: Any = worker.WorkerExtension()
    both, state = torch.ones(2, 8, 4), torch.ones(3)
    # Views of one storage, and a layer with several states.
    extension.model_runner = SimpleNamespace(kv_caches=[both[0], both[1], [state]])
    for _ in range(2):
        extension.free_cache()
        assert both.untyped_storage().nbytes() == state.untyped_storage().nbytes() == 0
        extension.take_cache()
        assert torch.equal(both, torch.zeros(2, 8, 4)) and torch.equal(state, torch.zeros(3))
    both[0] = 1.0
    extension.take_cache()
    assert both[0].all(), "what was not freed is left alone"


def test_keys_and_values_that_are_cleared_take_no_memory_until_they_are_written(worker: Any) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    extension: Any = worker.WorkerExtension()
    cache, small = torch.ones(2**26), torch.ones(3)
    extension.model_runner = SimpleNamespace(kv_caches=[cache, small])
    before = resident()
    extension.clear_cache()
    assert before - resident() > 0.9 * cache.nbytes
    assert not cache.any() and not small.any()
    extension.free_cache()
    before = resident()
    extension.take_cache()
    assert resident() - before < 0.1 * cache.nbytes and not cache.any()


def test_a_worker_names_the_layers_with_experts_and_the_dtypes_of_its_states(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Part(nn.Module):
        def __init__(self, layer: int) -> None:
            super().__init__()
            self.layer_id = layer
            self.kv_cache = (torch.zeros(1, dtype=torch.float16), torch.zeros(1, dtype=DTYPES[layer]))

    class Routed(Part): ...

    class Captured(Part): ...

    class Mixer(Part): ...

    for name, kind in (("MoERunner", Routed), ("RoutedExpertsCaptureSource", Captured), ("GatedDeltaNetAttention", Mixer)):
        monkeypatch.setattr(worker, name, kind)
    parts = [Routed(7), Mixer(0), Captured(2), Routed(2), Part(5), Mixer(3), Captured(10)]
    extension: Any = worker.WorkerExtension()
    extension.model_runner = SimpleNamespace(get_model=lambda: nn.ModuleList(parts))
    assert extension.moe_layers() == [2, 7, 10]
    assert extension.state_dtypes() == ["bfloat16", "float32"]
    done: list[str] = []
    extension.weight_transfer_engine = SimpleNamespace(shutdown=lambda: done.append("shutdown"))
    extension.forget_staged()
    assert done == ["shutdown"]


DTYPES = {0: torch.bfloat16, 3: torch.float32, 7: torch.int64, 2: torch.int64, 5: torch.int64, 10: torch.int64}


class Loader:
    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.error: Exception | None = None

    def load_weights(self, weights: list[tuple[str, Tensor]]) -> None:
        if self.error:
            raise self.error
        self.loaded += [name for name, _ in weights]


SENT = {name: torch.full((3,), float(number)) for number, name in enumerate("abcd", 1)}
CHECKSUMS = {name: int(device_checksum(tensor)) for name, tensor in SENT.items()}


def test_what_is_not_finite_is_not_loaded_nor_anything_after_it() -> None:
    model = Loader()
    load = CheckedLoad(model)
    load.load_weights([("a", SENT["a"])])
    load.load_weights([("b", SENT["b"]), ("c", SENT["c"] * torch.inf), ("x", SENT["a"] * torch.nan)])
    load.load_weights([("d", SENT["d"])])
    assert model.loaded == ["a"]
    with pytest.raises(WeightSyncError, match=r"weights hold NaN or infinity: c, x$"):
        load.confirm(CHECKSUMS)


def test_the_first_refusal_of_a_loader_is_told_and_nothing_is_loaded_after_it() -> None:
    model = Loader()
    load = CheckedLoad(model)
    first = model.error = ValueError("no such tensor")
    load.load_weights([("a", SENT["a"])])
    model.error = None
    load.load_weights([("b", SENT["b"] * torch.nan)])
    load.load_weights([("c", SENT["c"])])
    assert not model.loaded
    with pytest.raises(WeightSyncError, match="vLLM could not load them: ValueError: no such tensor") as refused:
        load.confirm(CHECKSUMS)
    assert refused.value.__cause__ is first


def test_all_that_was_sent_must_have_arrived_and_nothing_else() -> None:
    def received(*names: str) -> CheckedLoad:
        load = CheckedLoad(Loader())
        for name in names:
            load.load_weights([(name, SENT.get(name, SENT["a"]))])
        return load

    received(*"abcd").confirm(CHECKSUMS)
    for names, named in ((("a", "b"), "c, d"), ((*"abcd", "e"), "e")):
        with pytest.raises(WeightSyncError, match=f"received bytes differ from those sent: {named}$"):
            received(*names).confirm(CHECKSUMS)


def test_a_receiver_of_vllms_loads_through_the_checks_and_has_its_model_again(monkeypatch: pytest.MonkeyPatch) -> None:
    base: Any = CheckedIpcWeightTransferEngine.__mro__[2]
    seen: list[Any] = []

    def receive(engine: Any, info: Any) -> None:
        seen.append(type(engine.model))
        engine.model.load_weights([(info, SENT[info])])
        if info == "b":
            raise ZeroDivisionError

    monkeypatch.setattr(base, "start_weight_update", lambda engine: seen.append("start"), raising=False)
    monkeypatch.setattr(base, "parse_update_info", lambda engine, given: ("parsed", given))
    monkeypatch.setattr(base, "receive_weights", receive)
    engine: Any = CheckedIpcWeightTransferEngine.__new__(CheckedIpcWeightTransferEngine)
    engine.model = model = Loader()
    engine.start_weight_update()
    engine.receive_weights("a")
    with pytest.raises(ZeroDivisionError):
        engine.receive_weights("b")
    assert engine.model is model and model.loaded == ["a", "b"] and seen == ["start", CheckedLoad, CheckedLoad]
    last = engine.parse_update_info({"checksums": {"a": CHECKSUMS["a"], "b": 0}})
    assert isinstance(last, ChecksumInfo) and isinstance(last, WeightTransferUpdateInfo)
    with pytest.raises(WeightSyncError, match=r"differ from those sent: b$"):
        engine.receive_weights(last)
    assert engine.parse_update_info({"names": []}) == ("parsed", {"names": []})
    engine.start_weight_update()
    engine.receive_weights(engine.parse_update_info({"checksums": {}}))
    assert len(seen) == 4, "of the update before nothing counts"
