"""The report of ``rl-backend doctor`` as text: verdict first, facts after."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_backend.cli.verl_probe import verl_lines

if TYPE_CHECKING:
    from rl_backend.cli.doctor import Report
    from rl_backend.cli.packages import Package


def show(report: Report) -> None:
    """Prints the report."""
    print(verdict(report))
    _section("Broken, to be repaired first", report.problems)
    print("\nWhat this machine can run")
    width = max(len(capability.name) for capability in report.capabilities)
    for capability in report.capabilities:
        print(f"  {'yes' if capability.available else 'no ':3}  {capability.name:{width}}  {capability.reason}")
    missing = [package for package in report.packages if package.installed is None and package.tested.need != "required"]
    _section("Not installed", [f"{p.tested.name}: for {p.tested.purpose}. {p.tested.install}" for p in missing])
    _section("Worth knowing", report.remarks)
    _section("verl", verl_lines(report.verl) if report.verl is not None else ())
    _section("Machine", _machine_lines(report))
    print("\nPackages")
    for package in report.packages:
        if package.installed is not None:
            print(f"  {package.distribution:14}  {package.installed:12}  {_tested(package)}")


def verdict(report: Report) -> str:
    """One line: whether something is broken and what works."""
    if report.problems:
        count = len(report.problems)
        return f"Something is broken: {count} {'problem' if count == 1 else 'problems'}, listed below with what to do."
    available = {capability.name for capability in report.capabilities if capability.available}
    where = "on the GPU" if "native training on a GPU" in available else "on CPU"
    if any(name.startswith("GRPO") for name in available):
        return f"All is well: this machine trains and runs GRPO with Ray and vLLM {where}."
    if "native training on CPU" in available:
        return f"Training works {where}. GRPO with Ray and vLLM does not run here; the reason stands below."
    return "This machine cannot train; the reasons stand below."


def _section(title: str, lines: list[str] | tuple[str, ...]) -> None:
    if lines:
        print(f"\n{title}")
        for line in lines:
            print(f"  {line}")


def _machine_lines(report: Report) -> list[str]:
    machine = report.machine
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
    if report.ray is not None:
        lines.append(f"Ray            {'starts and runs a task' if report.ray.error is None else report.ray.error}")
    if report.ray_authentication is not None:
        lines.append(f"Ray tokens     {report.ray_authentication}")
    return lines


def _tested(package: Package) -> str:
    assert package.installed is not None
    if package.installed.partition("+")[0] == package.tested.version:
        return "tested"
    return f"not tested; {package.tested.version} is"
