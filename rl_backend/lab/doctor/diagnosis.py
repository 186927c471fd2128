"""The diagnosis: problems, remarks and capabilities that follow from the facts, as JSON and as text."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rl_backend.lab.doctor import probes
from rl_backend.lab.doctor.machine import (
    BRIDGE,
    FLA,
    VERL,
    Machine,
    Package,
    foreign_packages,
    installed_version,
    outside_supported_range,
    read_machine,
    read_packages,
)
from rl_backend.lab.text import count, table

DEMO_MEMORY_GIB = 8.0
DEMO_SHARED_MEMORY_GIB = 1.0
_TARGET = "adapters.verl.engine_config.RLBackendEngineConfig"


@dataclass(frozen=True)
class Facts:
    """The machine, the installation, and what the probes found; None stands for a probe that was not tried."""

    machine: Machine
    packages: tuple[Package, ...]
    torch: probes.TorchProbe
    ray: probes.RayProbe | None = None
    megatron: probes.MegatronProbe | None = None
    ray_authentication: str | None = None
    verl: probes.VerlProbe | None = None
    fla: str | None = None

    def installed(self, name: str) -> str | None:
        return next(package.installed for package in self.packages if package.tested.name == name)

    @property
    def missing_for_bridge(self) -> list[str]:
        return [name for name in ("megatron-core", "megatron-bridge") if self.installed(name) is None]

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
    """All that the command says. ``problems`` must be repaired before anything trains; ``remarks`` need no action."""

    problems: tuple[str, ...]
    remarks: tuple[str, ...]
    capabilities: tuple[Capability, ...]
    facts: Facts

    def as_json(self) -> dict[str, Any]:
        report = asdict(self)
        facts: dict[str, Any] = report.pop("facts")
        return report | facts


def examine(*, trials: bool, verl: bool = False, waiting: Callable[[str], None] = lambda _: None) -> Report:
    """Reads the machine and the installation."""

    def tried[P: probes.Probe](probe: type[P]) -> P:
        waiting(probe.TRIES)
        return probe.run()

    facts = Facts(read_machine(), read_packages(), tried(probes.TorchProbe), fla=installed_version(FLA))
    if facts.installed("ray") is not None:
        ray = tried(probes.RayProbe) if trials else None
        facts = replace(facts, ray=ray, ray_authentication=probes.ray_authentication())
    if trials and not facts.missing_for_bridge:
        facts = replace(facts, megatron=tried(probes.MegatronProbe))
    return judge(replace(facts, verl=tried(probes.VerlProbe)) if verl else facts)


def judge(facts: Facts) -> Report:
    machine, torch, ray = facts.machine, facts.torch, facts.ray
    problems, remarks = list(foreign_packages()), []
    if not machine.python.startswith("3.12."):
        problems.append(f"this is Python {machine.python}; rl-backend needs 3.12")
    for package in facts.packages:
        tested = package.tested
        if package.installed is None:
            if tested.need == "required":
                problems.append(f"{tested.name} is missing ({tested.purpose}): {tested.install}")
        elif supported := outside_supported_range(tested.name, package.installed):
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
    return Report(tuple(problems), tuple(remarks), tuple(_capabilities(facts)), facts)


def _capabilities(facts: Facts) -> list[Capability]:
    trains, gpus, verl = facts.trains, facts.torch.devices, facts.installed("verl")
    several = len(gpus) > 1
    on_gpu = f"{len(gpus)} x {gpus[0]}" if gpus else "no GPU that torch can use"
    if facts.torch.error is not None:
        on_gpu = "torch does not import"
    inexact = facts.torch.inexact
    rows = f"rows of {' and '.join(inexact)} products depend on others: equal to rounding" if inexact else "tried"
    ask_verl = f"verl is missing; {VERL}" if verl is None else "its engine: rl-backend doctor --verl"
    return [
        Capability("native training on CPU", trains, "gloo between ranks" if trains else "see the problems"),
        Capability("native training on a GPU", trains and bool(gpus), on_gpu),
        Capability("NCCL between GPUs", trains and several, f"{len(gpus)} GPUs" if several else "needs two GPUs"),
        Capability("LoRA tenants equal to the last bit beside others (CPU)", trains and not inexact, rows),
        Capability("kernels for gated DeltaNet (Qwen3.5, Qwen3-Next)", *_fla(facts)),
        Capability("vLLM rollouts", *_rollouts(facts)),
        Capability("GRPO with Ray and vLLM (make demo)", *_demo(facts)),
        Capability("bridge runtime (Megatron)", *_bridge(facts)),
        Capability("verl on this backend", trains and verl is not None, ask_verl),
    ]


def _fla(facts: Facts) -> tuple[bool, str]:
    if not facts.torch.devices:
        return False, "they need a GPU; delta_kernel='torch' runs everywhere"
    if facts.fla is None:
        return False, f"{FLA} is missing (pip install {FLA}); delta_kernel='torch' runs without"
    return facts.trains, f"{FLA} {facts.fla}, not tested with this project: delta_kernel='fla'"


def _rollouts(facts: Facts) -> tuple[bool, str]:
    machine, gpus = facts.machine, len(facts.torch.devices)
    vllm = next(package for package in facts.packages if package.tested.name == "vllm")
    if vllm.installed is None:
        return False, f"vLLM is missing; {vllm.tested.install}"
    if vllm.distribution == "vllm":
        unusable = "this is the GPU build of vLLM and torch can use no GPU; make setup DEVICE=cpu"
        return gpus > 0, "on the GPU" if gpus else unusable
    if machine.architecture == "x86_64" and "avx2" not in machine.cpu_features:
        return False, "the CPU build of vLLM needs AVX2, which this processor lacks"
    if "avx512f" in machine.cpu_features or machine.architecture != "x86_64":
        return True, "on CPU"
    return True, "on CPU; faster on a processor with AVX512"


def _demo(facts: Facts) -> tuple[bool, str]:
    machine, shared = facts.machine, facts.machine.shared_memory_gib
    # Memory is named first, because nothing else that is missing helps without it.
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
    if facts.missing_for_bridge:
        return False, f"{' and '.join(facts.missing_for_bridge)} missing: {BRIDGE}"
    if facts.megatron is None:
        return True, "installed, not tried"
    if facts.megatron.error is not None:
        return False, facts.megatron.error
    version = facts.megatron.transformer_engine if facts.torch.devices else None
    layers = "Megatron's own layers" if version is None else f"Transformer Engine {version}"
    return True, f"{'on the GPU' if facts.torch.devices else 'on CPU'}, with {layers}"


def as_text(report: Report) -> str:
    width = max(len(capability.name) for capability in report.capabilities)
    capabilities = [(("no", "yes")[each.available], each.name, each.reason) for each in report.capabilities]
    packages = report.facts.packages
    missing = [package for package in packages if package.installed is None and package.tested.need != "required"]
    installed = [
        (p.distribution, p.installed, "tested" if p.is_tested else f"not tested; {p.tested.version} is")
        for p in packages
        if p.installed is not None
    ]
    sections: dict[str, Sequence[str]] = {
        "Broken, to be repaired first": report.problems,
        "What this machine can run": table(f"{{:3}}  {{:{width}}}  {{}}", capabilities),
        "Not installed": [f"{p.tested.name}: for {p.tested.purpose}. {p.tested.install}" for p in missing],
        "Worth knowing": report.remarks,
        "verl": verl_lines(report.facts.verl) if report.facts.verl is not None else (),
        "Machine": _machine_lines(report.facts),
        "Packages": table("{:14}  {:12}  {}", installed),
    }
    texts = ["\n".join([f"\n{title}", *(f"  {line}" for line in lines)]) for title, lines in sections.items() if lines]
    return "\n".join([verdict(report), *texts])


def verdict(report: Report) -> str:
    if report.problems:
        return f"Something is broken: {count(len(report.problems), 'problem')}, listed below with what to do."
    available = {capability.name for capability in report.capabilities if capability.available}
    where = "on the GPU" if "native training on a GPU" in available else "on CPU"
    if any(name.startswith("GRPO") for name in available):
        return f"All is well: this machine trains and runs GRPO with Ray and vLLM {where}."
    if "native training on CPU" in available:
        return f"Training works {where}. GRPO with Ray and vLLM does not run here; the reason stands below."
    return "This machine cannot train; the reasons stand below."


def verl_lines(probe: probes.VerlProbe) -> list[str]:
    if probe.error is not None:
        return [f"does not import: {probe.error}"]
    return [
        f"version        {probe.version}, on the device {probe.device}",
        f"entry point    {probe.entry_point}",
        f"_target_={_TARGET}: {probe.override_error or "rl_backend's engine"}",
        *(f"{model:15}{_engine(probe, engine)}" for model, engine in (probe.engines or {}).items()),
    ]


def _engine(probe: probes.VerlProbe, engine: str) -> str:
    asked = probe.verl_engine_vendor
    vendor = f"with {probes.VENDOR_VARIABLE}={asked}" if asked else f"without {probes.VENDOR_VARIABLE}"
    if engine in probes.VENDORS.values():
        return f"rl_backend's, backend {engine}, {vendor}"
    choice = "" if asked in probes.VENDORS else f"; {' or '.join(probes.VENDORS)} chooses rl_backend's"
    return f"{"verl's own" if engine == 'of verl' else engine} {vendor}{choice}"


def _machine_lines(facts: Facts) -> list[str]:
    machine = facts.machine
    shared = "none" if machine.shared_memory_gib is None else f"{machine.shared_memory_gib:.1f} GiB free"
    lines = [
        f"Python         {machine.python} ({machine.executable})",
        f"system         {machine.system} {machine.architecture}",
        f"cores          {machine.cores:g} ({', '.join(machine.cpu_features) or 'features unknown'})",
        f"memory         {machine.memory_gib:.1f} GiB, {machine.free_memory_gib:.1f} GiB free",
        f"/dev/shm       {shared}",
        f"disk           {machine.free_disk_gib:.1f} GiB free here",
        f"C++ compiler   {machine.compiler or 'none: torch.compile, which vLLM uses, needs one (apt install g++)'}",
    ]
    lines += [f"GPU            {gpu.name}, {gpu.memory_gib:.0f} GiB" for gpu in machine.gpus] or ["GPU            none"]
    if machine.gpus:
        lines.append(f"NVIDIA driver  {machine.driver}")
    if facts.ray is not None:
        lines.append(f"Ray            {'starts and runs a task' if facts.ray.error is None else facts.ray.error}")
    if facts.ray_authentication is not None:
        lines.append(f"Ray tokens     {facts.ray_authentication}")
    return lines
