"""``rl-backend doctor``: the verdict on this machine and installation, then the facts behind it."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import json
import sys

from rl_backend.cli import doctor_text
from rl_backend.cli.machine import Machine, read_machine
from rl_backend.cli.packages import BRIDGE, VERL, Package, foreign_packages, read_packages
from rl_backend.cli.probes import (
    MegatronProbe,
    RayProbe,
    TorchProbe,
    probe_megatron,
    probe_ray,
    probe_torch,
    ray_authentication,
)
from rl_backend.cli.verl_probe import VerlProbe, probe_verl, verl_problems

EXIT_BROKEN = 1
DEMO_MEMORY_GIB = 8.0
DEMO_SHARED_MEMORY_GIB = 1.0


@dataclasses.dataclass(frozen=True)
class Capability:
    """One thing that a user may want to run here, whether it can run, and why (not)."""

    name: str
    available: bool
    reason: str


@dataclasses.dataclass(frozen=True)
class Report:
    """All that the command says. ``problems`` are what is broken of the required; ``remarks`` can be lived with."""

    problems: tuple[str, ...]
    remarks: tuple[str, ...]
    capabilities: tuple[Capability, ...]
    machine: Machine
    packages: tuple[Package, ...]
    torch: TorchProbe
    ray: RayProbe | None
    megatron: MegatronProbe | None
    ray_authentication: str | None
    verl: VerlProbe | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the whole report as JSON")
    parser.add_argument("--quick", action="store_true", help="do not try Ray and Megatron (saves about 15 seconds)")
    parser.add_argument("--verl", action="store_true", help="also say which engine verl would build (about 15 seconds)")


def run(arguments: argparse.Namespace) -> int:
    """Prints the report; 0 when nothing required is broken, else 1."""
    report = examine(trials=not arguments.quick, verl=arguments.verl)
    if arguments.json:
        json.dump(dataclasses.asdict(report), sys.stdout, indent=1)
        print()
    else:
        doctor_text.show(report)
    return EXIT_BROKEN if report.problems else 0


def examine(*, trials: bool, verl: bool = False) -> Report:
    """Reads the machine and the installation.

    Args:
        trials: whether to start a local Ray cluster and to import Megatron, where they are installed.
        verl: whether to ask verl's registry of engines.
    """
    packages = read_packages()
    return judge(
        read_machine(),
        packages,
        probe_torch(),
        probe_ray() if trials and _installed(packages, "ray") is not None else None,
        probe_megatron() if trials and not _missing_for_bridge(packages) else None,
        probe_verl() if verl else None,
    )


def judge(
    machine: Machine,
    packages: tuple[Package, ...],
    torch: TorchProbe,
    ray: RayProbe | None,
    megatron: MegatronProbe | None = None,
    verl: VerlProbe | None = None,
) -> Report:
    """What follows from these facts; ``ray``, ``megatron`` or ``verl`` is None when it was not tried."""
    problems, remarks = _problems_and_remarks(machine, packages, torch, ray)
    if verl is not None:
        problems += verl_problems(verl)
    return Report(
        problems=tuple(problems),
        remarks=tuple(remarks),
        capabilities=tuple(_capabilities(machine, packages, torch, ray, megatron)),
        machine=machine,
        packages=packages,
        torch=torch,
        ray=ray,
        megatron=megatron,
        ray_authentication=ray_authentication() if _installed(packages, "ray") is not None else None,
        verl=verl,
    )


def _problems_and_remarks(
    machine: Machine, packages: tuple[Package, ...], torch: TorchProbe, ray: RayProbe | None
) -> tuple[list[str], list[str]]:
    problems, remarks = list(foreign_packages()), []
    if not machine.python.startswith("3.12."):
        problems.append(f"this is Python {machine.python}; rl-backend needs 3.12")
    for package in packages:
        tested = package.tested
        if package.installed is None:
            if tested.need == "required":
                problems.append(f"{tested.name} is missing ({tested.purpose}): {tested.install}")
        elif supported := _outside_supported_range(tested.name, package.installed):
            problems.append(
                f"{tested.name} {package.installed} is outside the supported range {supported}: "
                f"pip install '{tested.name}=={tested.version}'"
            )
        elif package.installed.partition("+")[0] != tested.version:
            remarks.append(f"{package.distribution} {package.installed} is not the tested version {tested.version}")
    if torch.error is not None and _installed(packages, "torch") is not None:
        problems.append(f"torch is installed but does not import: {torch.error}")
    if ray is not None and ray.error is not None:
        problems.append(f"Ray is installed but a local cluster does not start: {ray.error}")
    if machine.gpus and torch.error is None and not torch.devices:
        build = f"built for CUDA {torch.cuda_build}" if torch.cuda_build else "a build without CUDA"
        problems.append(f"the driver ({machine.driver}) shows {len(machine.gpus)} GPUs but torch, {build}, can use none")
    if not machine.gpus and machine.driver:
        remarks.append(f"no GPU is listed: {machine.driver}")
    return problems, remarks


def _capabilities(
    machine: Machine,
    packages: tuple[Package, ...],
    torch: TorchProbe,
    ray: RayProbe | None,
    megatron: MegatronProbe | None,
) -> list[Capability]:
    trains = torch.error is None and all(p.installed for p in packages if p.tested.need == "required")
    gpus = len(torch.devices)
    no_gpu = "no GPU that torch can use" if torch.error is None else "torch does not import"
    rollouts, why_rollouts = _rollouts(machine, packages, gpus)
    has_ray = _installed(packages, "ray") is not None and (ray is None or ray.error is None)
    tight = _too_small_for_demo(machine)
    loop = trains and rollouts and has_ray and not tight
    why_not_loop = (
        "training does not work" if not trains else why_rollouts if not rollouts else "Ray is missing or does not start"
    )
    verl = _installed(packages, "verl")
    return [
        Capability("native training on CPU", trains, "gloo between ranks" if trains else "see the problems"),
        Capability("native training on a GPU", trains and gpus > 0, f"{gpus} x {torch.devices[0]}" if gpus else no_gpu),
        Capability("NCCL between GPUs", trains and gpus > 1, f"{gpus} GPUs" if gpus > 1 else "needs two GPUs"),
        Capability("vLLM rollouts", rollouts, why_rollouts),
        Capability(
            "GRPO with Ray and vLLM (make demo)",
            loop,
            tight if tight else f"on {'GPU' if gpus else 'CPU'}" if loop else why_not_loop,
        ),
        Capability("bridge runtime (Megatron)", *_bridge(packages, gpus if trains else None, megatron)),
        Capability(
            "verl on this backend",
            trains and verl is not None,
            f"verl is missing; {VERL}" if verl is None else "its engine: rl-backend doctor --verl",
        ),
    ]


def _rollouts(machine: Machine, packages: tuple[Package, ...], gpus: int) -> tuple[bool, str]:
    vllm = next(package for package in packages if package.tested.name == "vllm")
    if vllm.installed is None:
        return False, f"vLLM is missing; {vllm.tested.install}"
    if vllm.distribution == "vllm":
        return (
            gpus > 0,
            "on the GPU" if gpus else "this is the GPU build of vLLM and torch can use no GPU; make setup DEVICE=cpu",
        )
    if machine.architecture == "x86_64" and "avx2" not in machine.cpu_features:
        return False, "the CPU build of vLLM needs AVX2, which this processor lacks"
    if "avx512f" in machine.cpu_features or machine.architecture != "x86_64":
        return True, "on CPU"
    return True, "on CPU; faster on a processor with AVX512"


def _bridge(packages: tuple[Package, ...], gpus: int | None, megatron: MegatronProbe | None) -> tuple[bool, str]:
    """Whether the bridge runtime can train on ``gpus`` GPUs, or on the CPU without; None where training does not work."""
    if gpus is None:
        return False, "training does not work"
    if missing := _missing_for_bridge(packages):
        return False, f"{' and '.join(missing)} missing: {BRIDGE}"
    if megatron is None:
        return True, "installed, not tried"
    if megatron.error is not None:
        return False, megatron.error
    if not gpus:
        return True, "on CPU, with Megatron's own layers"
    if megatron.transformer_engine is None:
        return True, "on the GPU, with Megatron's own layers"
    return True, f"on the GPU, with Transformer Engine {megatron.transformer_engine}"


def _missing_for_bridge(packages: tuple[Package, ...]) -> list[str]:
    return [name for name in ("megatron-core", "megatron-bridge") if _installed(packages, name) is None]


def _too_small_for_demo(machine: Machine) -> str:
    """Why the demo does not fit in this machine's memory, or an empty string."""
    if machine.memory_gib < DEMO_MEMORY_GIB:
        return f"needs about {DEMO_MEMORY_GIB:.0f} GiB of memory, this machine has {machine.memory_gib:.1f}"
    if machine.shared_memory_gib is None or machine.shared_memory_gib < DEMO_SHARED_MEMORY_GIB:
        free = f"{machine.shared_memory_gib:.2f} GiB" if machine.shared_memory_gib is not None else "none"
        return f"needs {DEMO_SHARED_MEMORY_GIB:.0f} GiB free in /dev/shm, {free} there; in a container: --shm-size=4g"
    return ""


def _outside_supported_range(name: str, version: str) -> str | None:
    """The range that rl-backend declares for a package, if ``version`` is outside; None also when it is not installed."""
    if importlib.util.find_spec("packaging") is None:
        return None
    from packaging.requirements import Requirement

    try:
        declared = importlib.metadata.requires("rl-backend") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for requirement in map(Requirement, declared):
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": "ray"})
        if applies and requirement.name == name and not requirement.specifier.contains(version, prereleases=True):
            return str(requirement.specifier)
    return None


def _installed(packages: tuple[Package, ...], name: str) -> str | None:
    return next(package.installed for package in packages if package.tested.name == name)
