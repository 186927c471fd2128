"""The diagnosis: problems, remarks and capabilities that follow from the facts."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import asdict, dataclass
from typing import Any

from rl_backend.lab.doctor.machine import Machine, read_machine
from rl_backend.lab.doctor.packages import BRIDGE, VERL, Package, foreign_packages, read_packages
from rl_backend.lab.doctor.probes import MegatronProbe, RayProbe, TorchProbe, VerlProbe, ray_authentication

DEMO_MEMORY_GIB = 8.0
DEMO_SHARED_MEMORY_GIB = 1.0


@dataclass(frozen=True)
class Facts:
    """The machine, the installation, and what probes found; a probe is None that was not tried."""

    machine: Machine
    packages: tuple[Package, ...]
    torch: TorchProbe
    ray: RayProbe | None = None
    megatron: MegatronProbe | None = None
    ray_authentication: str | None = None
    verl: VerlProbe | None = None

    def installed(self, name: str) -> str | None:
        """The version of a tested package."""
        return installed(self.packages, name)

    @property
    def trains(self) -> bool:
        return self.torch.error is None and all(p.installed for p in self.packages if p.tested.need == "required")


@dataclass(frozen=True)
class Capability:
    """One thing that a user may want to run here, whether it can run, and why (not)."""

    name: str
    available: bool
    reason: str


@dataclass(frozen=True)
class Report:
    """All that the command says. ``problems`` are what is broken of the required; ``remarks`` can be lived with."""

    problems: tuple[str, ...]
    remarks: tuple[str, ...]
    capabilities: tuple[Capability, ...]
    facts: Facts

    def as_json(self) -> dict[str, Any]:
        """Conclusions first, facts beside them."""
        report = asdict(self)
        facts: dict[str, Any] = report.pop("facts")
        return report | facts


def examine(*, trials: bool, verl: bool = False) -> Report:
    """Reads the machine and the installation.

    Args:
        trials: whether to start a local Ray cluster and to import Megatron, where they are installed.
        verl: whether to ask verl's registry of engines.
    """
    packages = read_packages()
    has_ray = installed(packages, "ray") is not None
    return judge(
        Facts(
            read_machine(),
            packages,
            TorchProbe.run(),
            RayProbe.run() if trials and has_ray else None,
            MegatronProbe.run() if trials and not _missing_for_bridge(packages) else None,
            ray_authentication() if has_ray else None,
            VerlProbe.run() if verl else None,
        )
    )


def judge(facts: Facts) -> Report:
    """What follows from these facts."""
    problems, remarks = _problems_and_remarks(facts)
    return Report(tuple(problems), tuple(remarks), tuple(_capabilities(facts)), facts)


def installed(packages: tuple[Package, ...], name: str) -> str | None:
    """The version of one of ``packages``."""
    return next(package.installed for package in packages if package.tested.name == name)


def _problems_and_remarks(facts: Facts) -> tuple[list[str], list[str]]:
    machine, torch, ray = facts.machine, facts.torch, facts.ray
    problems, remarks = list(foreign_packages()), []
    if not machine.python.startswith("3.12."):
        problems.append(f"this is Python {machine.python}; rl-backend needs 3.12")
    for package in facts.packages:
        tested = package.tested
        if package.installed is None:
            if tested.need == "required":
                problems.append(f"{tested.name} is missing ({tested.purpose}): {tested.install}")
        elif supported := _outside_supported_range(tested.name, package.installed):
            problems.append(
                f"{tested.name} {package.installed} is outside the supported range {supported}: "
                f"pip install '{tested.name}=={tested.version}'"
            )
        elif not package.is_tested:
            remarks.append(f"{package.distribution} {package.installed} is not the tested version {tested.version}")
    if torch.error is not None and facts.installed("torch") is not None:
        problems.append(f"torch is installed but does not import: {torch.error}")
    if ray is not None and ray.error is not None:
        problems.append(f"Ray is installed but a local cluster does not start: {ray.error}")
    if machine.gpus and torch.error is None and not torch.devices:
        build = f"built for CUDA {torch.cuda_build}" if torch.cuda_build else "a build without CUDA"
        problems.append(f"the driver ({machine.driver}) shows {len(machine.gpus)} GPUs but torch, {build}, can use none")
    if not machine.gpus and machine.driver:
        remarks.append(f"no GPU is listed: {machine.driver}")
    if facts.verl is not None:
        problems += facts.verl.problems
    return problems, remarks


def _capabilities(facts: Facts) -> list[Capability]:
    trains, gpus = facts.trains, len(facts.torch.devices)
    first_gpu = f"{gpus} x {facts.torch.devices[0]}" if gpus else "no GPU that torch can use"
    verl = facts.installed("verl")
    return [
        Capability("native training on CPU", trains, "gloo between ranks" if trains else "see the problems"),
        Capability(
            "native training on a GPU",
            trains and gpus > 0,
            first_gpu if facts.torch.error is None else "torch does not import",
        ),
        Capability("NCCL between GPUs", trains and gpus > 1, f"{gpus} GPUs" if gpus > 1 else "needs two GPUs"),
        Capability("vLLM rollouts", *_rollouts(facts)),
        Capability("GRPO with Ray and vLLM (make demo)", *_demo(facts)),
        Capability("bridge runtime (Megatron)", *_bridge(facts)),
        Capability(
            "verl on this backend",
            trains and verl is not None,
            f"verl is missing; {VERL}" if verl is None else "its engine: rl-backend doctor --verl",
        ),
    ]


def _rollouts(facts: Facts) -> tuple[bool, str]:
    machine, gpus = facts.machine, len(facts.torch.devices)
    vllm = next(package for package in facts.packages if package.tested.name == "vllm")
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


def _demo(facts: Facts) -> tuple[bool, str]:
    """Whether the whole loop runs; memory is named first."""
    machine, shared = facts.machine, facts.machine.shared_memory_gib
    if machine.memory_gib < DEMO_MEMORY_GIB:
        return False, f"needs about {DEMO_MEMORY_GIB:.0f} GiB of memory, this machine has {machine.memory_gib:.1f}"
    if shared is None or shared < DEMO_SHARED_MEMORY_GIB:
        free = f"{shared:.2f} GiB" if shared is not None else "none"
        needed = f"needs {DEMO_SHARED_MEMORY_GIB:.0f} GiB free in /dev/shm"
        return False, f"{needed}, {free} there; in a container: --shm-size=4g"
    rollouts, why_not = _rollouts(facts)
    if not facts.trains:
        return False, "training does not work"
    if not rollouts:
        return False, why_not
    if facts.installed("ray") is None or (facts.ray is not None and facts.ray.error is not None):
        return False, "Ray is missing or does not start"
    return True, f"on {'GPU' if facts.torch.devices else 'CPU'}"


def _bridge(facts: Facts) -> tuple[bool, str]:
    if not facts.trains:
        return False, "training does not work"
    if missing := _missing_for_bridge(facts.packages):
        return False, f"{' and '.join(missing)} missing: {BRIDGE}"
    if facts.megatron is None:
        return True, "installed, not tried"
    if facts.megatron.error is not None:
        return False, facts.megatron.error
    if not facts.torch.devices:
        return True, "on CPU, with Megatron's own layers"
    if facts.megatron.transformer_engine is None:
        return True, "on the GPU, with Megatron's own layers"
    return True, f"on the GPU, with Transformer Engine {facts.megatron.transformer_engine}"


def _missing_for_bridge(packages: tuple[Package, ...]) -> list[str]:
    return [name for name in ("megatron-core", "megatron-bridge") if installed(packages, name) is None]


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
