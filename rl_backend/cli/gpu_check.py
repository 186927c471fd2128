"""``rl-backend gpu-check``: runs the tests in tests/gpu and writes what came of each as JSON."""

import argparse
import dataclasses
import datetime
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

import rl_backend
from rl_backend.lab.doctor.machine import read_machine, read_packages
from rl_backend.lab.doctor.probes import TorchProbe
from rl_backend.options.parser import CommandError

ROOT = Path(rl_backend.__file__).resolve().parent.parent
EXIT_FAILED = 1
EXIT_NO_GPU = 3
DEFAULT_RESULT = Path("runs/gpu-check.json")
OPTIONAL = ("ray", "vllm", "tensordict", "megatron.core", "megatron.bridge", "transformer_engine")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Exit status: 0 every test that ran passed, 1 a test failed, 2 the tests could not be run, "
        "3 there is no GPU that torch can use (nothing is run or written)."
    )
    result = f"where the result goes (default {DEFAULT_RESULT})"
    parser.add_argument("--json", type=Path, default=DEFAULT_RESULT, metavar="FILE", help=result)
    further = "after --: for pytest, for example -- -k nccl"
    parser.add_argument("pytest_arguments", nargs="*", metavar="ARGUMENT", help=further)


def run(arguments: argparse.Namespace) -> int:
    tests = ROOT / "tests" / "gpu"
    if not tests.is_dir():
        raise CommandError(f"{tests} is not there: gpu-check runs from a checkout of the project, not an installed package")
    torch = TorchProbe.run()
    if torch.error is not None:
        raise CommandError(f"torch does not import with {sys.executable}: {torch.error}")
    if not torch.devices:
        _say_what_would_run(tests, torch)
        return EXIT_NO_GPU
    for name in itertools.filterfalse(_present, OPTIONAL):
        print(f"{name} is not installed: the tests that need it are skipped and named")
    status, outcomes = run_tests(tests, arguments.pytest_arguments)
    result = _result(torch, status, outcomes)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    _summarise(result, arguments.json)
    return EXIT_FAILED if status != 0 or result["counts"].get("passed", 0) == 0 else 0


def _present(module: str) -> bool:
    top = module.partition(".")[0]
    return importlib.util.find_spec(top) is not None and importlib.util.find_spec(module) is not None


def _command(tests: Path, *arguments: str) -> list[str]:
    # A file that cannot be collected is one error; the others run.
    return [sys.executable, "-m", "pytest", str(tests), "-m", "gpu", "--continue-on-collection-errors", *arguments]


def _say_what_would_run(tests: Path, torch: TorchProbe) -> None:
    why = "this torch is built without CUDA" if torch.cuda_build is None else "torch finds no CUDA device"
    print(f"No GPU: {why}. Nothing was run and no result was written. On a machine with a GPU these would run:")
    command = _command(tests, "--collect-only", "-q", "--no-header")
    listing = subprocess.run(command, cwd=tests.parent.parent, capture_output=True, text=True, check=False)
    names = [line for line in listing.stdout.splitlines() if "::" in line]
    print("\n".join(f"  {name}" for name in names or [listing.stdout + listing.stderr]))


def run_tests(tests: Path, arguments: list[str]) -> tuple[int, list[dict[str, Any]]]:
    """Runs the tests marked ``gpu`` in a folder with pytest, two levels above it.

    Returns:
        pytest's exit status, and per test its name, outcome, seconds, what it measured (``record_property``) and, unless it
        passed, the reason.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        command = _command(tests, f"--junitxml={report}", "-o", "junit_family=xunit1", "-v", *arguments)
        # Machines with GPUs often have no way out, and a hub that is asked answers late.
        environment = {"HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0", **os.environ}
        status = subprocess.run(command, cwd=tests.parent.parent, env=environment, check=False).returncode
        if not report.is_file():
            raise CommandError(f"pytest ended with status {status} before it ran a test; its output stands above")
        return status, [_outcome(case) for case in ElementTree.parse(report).iter("testcase")]


def _outcome(case: ElementTree.Element) -> dict[str, Any]:
    outcome: dict[str, Any] = {"test": f"{case.get('file')}::{case.get('name')}", "outcome": "passed"}
    outcome["seconds"] = float(case.get("time", "0"))
    if measured := {each.get("name"): each.get("value") for each in case.iter("property")}:
        outcome["measured"] = measured
    for kind, name in (("skipped", "skipped"), ("failure", "failed"), ("error", "error")):
        element = case.find(kind)
        if element is not None:
            outcome |= {"outcome": name, "reason": element.get("message", "")}
            if name != "skipped":
                outcome["details"] = (element.text or "")[-4000:]
    return outcome


def _result(torch: TorchProbe, status: int, outcomes: list[dict[str, Any]]) -> dict[str, Any]:
    commit = None
    # Without this, git would name the commit of a repository that the checkout lies in.
    if (ROOT / ".git").exists():
        command = ["git", "rev-parse", "--verify", "HEAD"]
        commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip() or None
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "rl_backend": rl_backend.__version__,
        "commit": commit,
        "machine": dataclasses.asdict(read_machine()),
        "torch": dataclasses.asdict(torch),
        "packages": {package.distribution: package.installed for package in read_packages()},
        "pytest_status": status,
        "counts": dict(Counter(outcome["outcome"] for outcome in outcomes)),
        "tests": outcomes,
    }


def _summarise(result: dict[str, Any], path: Path) -> None:
    counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(result["counts"].items()))
    print(f"\n{counts or 'no tests'} on {', '.join(result['torch']['devices'])}")
    for outcome in result["tests"]:
        if outcome["outcome"] != "passed":
            reason = (outcome["reason"].splitlines() or ["no reason given"])[0]
            print(f"  {outcome['outcome']}: {outcome['test']}: {reason}")
    print(f"result: {path.resolve()}")
