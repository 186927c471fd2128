"""A diagnosis as text: verdict first, facts after."""

from __future__ import annotations

from collections.abc import Sequence

from rl_backend.lab.doctor.diagnosis import Facts, Report
from rl_backend.lab.doctor.probes import VENDOR_VARIABLE, VENDORS, VerlProbe
from rl_backend.lab.text import count, table

_TARGET = "adapters.verl.engine_config.RLBackendEngineConfig"


def as_text(report: Report) -> str:
    """The verdict, then a section for each kind of fact that there is."""
    width = max(len(capability.name) for capability in report.capabilities)
    capabilities = [(("no", "yes")[each.available], each.name, each.reason) for each in report.capabilities]
    packages = report.facts.packages
    missing = [package for package in packages if package.installed is None and package.tested.need != "required"]
    installed = [
        (
            package.distribution,
            package.installed,
            "tested" if package.is_tested else f"not tested; {package.tested.version} is",
        )
        for package in packages
        if package.installed is not None
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
    """One line: whether something is broken and what works."""
    if report.problems:
        return f"Something is broken: {count(len(report.problems), 'problem')}, listed below with what to do."
    available = {capability.name for capability in report.capabilities if capability.available}
    where = "on the GPU" if "native training on a GPU" in available else "on CPU"
    if any(name.startswith("GRPO") for name in available):
        return f"All is well: this machine trains and runs GRPO with Ray and vLLM {where}."
    if "native training on CPU" in available:
        return f"Training works {where}. GRPO with Ray and vLLM does not run here; the reason stands below."
    return "This machine cannot train; the reasons stand below."


def verl_lines(probe: VerlProbe) -> list[str]:
    """The section on verl."""
    if probe.error is not None:
        return [f"does not import: {probe.error}"]
    return [
        f"version        {probe.version}, on the device {probe.device}",
        f"entry point    {probe.entry_point}",
        f"_target_={_TARGET}: {probe.override_error or "rl_backend's engine"}",
        *(f"{model:15}{_engine(probe, engine)}" for model, engine in (probe.engines or {}).items()),
    ]


def _engine(probe: VerlProbe, engine: str) -> str:
    asked = probe.verl_engine_vendor
    vendor = f"with {VENDOR_VARIABLE}={asked}" if asked else f"without {VENDOR_VARIABLE}"
    if engine in VENDORS.values():
        return f"rl_backend's, backend {engine}, {vendor}"
    choice = "" if asked in VENDORS else f"; {' or '.join(VENDORS)} chooses rl_backend's"
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
