"""``rl-backend gpu-check``: runs the tests in tests/gpu, stage by stage, and writes what came of each as JSON."""

import argparse
import dataclasses
import datetime
import importlib.util
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import rl_backend
from rl_backend.lab.doctor.machine import read_machine, read_packages
from rl_backend.lab.doctor.probes import TorchProbe
from rl_backend.options.parser import CommandError

ROOT = Path(rl_backend.__file__).resolve().parent.parent
EXIT_FAILED = 1
EXIT_NO_GPU = 3
DEFAULT_RESULT = Path("runs/gpu-check.json")


class Stage(NamedTuple):
    """Files of tests/gpu that run together, and the seconds that they may take."""

    name: str
    files: tuple[str, ...]
    seconds: float


STAGES = (
    Stage("functions and log-probs", ("test_log_probs_on_cuda.py",), 600),
    Stage("one rank: steps, checkpoints, offload", ("test_training_on_cuda.py", "test_offload_on_cuda.py"), 900),
    Stage(
        "mixtures, recurrent layers, the trace",
        ("test_moe_on_cuda.py", "test_deltanet_on_cuda.py", "test_trace_on_cuda.py"),
        900,
    ),
    Stage("compiled layers", ("test_compiled_on_cuda.py",), 900),
    Stage("bridge", ("test_bridge_on_cuda.py",), 900),
    Stage("ranks as actors", ("test_train_group_on_cuda.py",), 600),
    Stage("engines and pushes", ("test_weight_sync_on_cuda.py",), 1800),
    Stage("two GPUs", ("test_nccl_ranks.py",), 900),
    Stage("speed", ("test_speed_on_cuda.py",), 1200),
)
"""In this order: what a later one needs, one before it has shown."""

PUBLISHED = (
    ("supervised training, tokens/s", ("sft_tokens_per_second", "sft_tokens_per_second_compiled"), 26_000),
    ("RL steps, tokens/s", ("rl_tokens_per_second",), 11_900),
)
"""Of a model of 0.6 billion parameters: what is measured here, its names in ``measured``, and what prime-rl has published of
one H100."""

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
    status, outcomes = run_stages(tests, arguments.pytest_arguments)
    result = _result(torch, status, outcomes)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    _summarise(result, arguments.json)
    return EXIT_FAILED if status != 0 or result["counts"].get("passed", 0) == 0 else 0


def _present(module: str) -> bool:
    top = module.partition(".")[0]
    return importlib.util.find_spec(top) is not None and importlib.util.find_spec(module) is not None


def _command(tests: Sequence[Path], *arguments: str) -> list[str]:
    # A file that cannot be collected is one error; the others run.
    paths = map(str, tests)
    return [sys.executable, "-m", "pytest", *paths, "-m", "gpu", "--continue-on-collection-errors", *arguments]


def _say_what_would_run(tests: Path, torch: TorchProbe) -> None:
    why = "this torch is built without CUDA" if torch.cuda_build is None else "torch finds no CUDA device"
    print(f"No GPU: {why}. Nothing was run and no result was written. On a machine with a GPU these would run:")
    print("\n".join(f"  {name}" for name in _collected(tests, stages_of(tests))))


def _collected(tests: Path, stages: Sequence[Stage]) -> list[str]:
    """The names of their tests, or what pytest says where there are none."""
    command = _command(_paths(tests, stages) or [tests], "--collect-only", "-q", "--no-header")
    listing = subprocess.run(command, cwd=tests.parent.parent, capture_output=True, text=True, check=False)
    return [line for line in listing.stdout.splitlines() if "::" in line] or [listing.stdout + listing.stderr]


def _paths(tests: Path, stages: Sequence[Stage]) -> list[Path]:
    return [tests / name for stage in stages for name in stage.files]


def stages_of(tests: Path) -> list[Stage]:
    """Those of :data:`STAGES` whose files are there, and one of all other files."""
    there = [path.name for path in sorted(tests.glob("test_*.py"))]
    found = [stage._replace(files=tuple(name for name in stage.files if name in there)) for stage in STAGES]
    known = {name for stage in STAGES for name in stage.files}
    found.append(Stage("others", tuple(name for name in there if name not in known), 900))
    return [stage for stage in found if stage.files]


def run_stages(tests: Path, arguments: Sequence[str]) -> tuple[int, list[dict[str, Any]]]:
    """Runs the tests of a folder stage by stage, as :func:`run_tests` does; the worst status of all stages."""
    worst, outcomes = 0, list[dict[str, Any]]()
    for stage in stages_of(tests):
        print(f"\n{stage.name}, at most {stage.seconds:.0f} s", flush=True)
        status, found = run_tests(tests, arguments, stage)
        # Arguments may choose none of a stage.
        worst = max(worst, 0 if status == _NONE_COLLECTED else status)
        outcomes += found
    return worst, outcomes


_NONE_COLLECTED, _STOPPED = 5, 2


def run_tests(tests: Path, arguments: Sequence[str], stage: Stage) -> tuple[int, list[dict[str, Any]]]:
    """Runs the tests marked ``gpu`` in the stage's files with pytest, two levels above their folder.

    Returns:
        pytest's exit status, and per test its name, outcome, seconds, what it measured (``record_property``) and, unless it
        passed, the reason. A stage that takes too long is ended: then all of its tests are errors.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        command = _command(_paths(tests, [stage]), f"--junitxml={report}", "-o", "junit_family=xunit1", "-v", *arguments)
        # Machines with GPUs often have no way out, and a hub that is asked answers late.
        environment = {"HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0", **os.environ}
        # A session of its own: ranks and engines end with the stage that started them.
        process = subprocess.Popen(command, cwd=tests.parent.parent, env=environment, start_new_session=True)
        try:
            status = process.wait(stage.seconds)
        except subprocess.TimeoutExpired:
            reason = f"the stage {stage.name!r} was ended after {stage.seconds:.0f} s; run its files alone"
            names = _collected(tests, [stage])
            return _STOPPED, [{"test": name, "outcome": "error", "reason": reason, "details": ""} for name in names]
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
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
    print("\n".join(_table(result)))
    print(f"result: {path.resolve()}")


def _table(result: dict[str, Any]) -> list[str]:
    measured = {name: value for outcome in result["tests"] for name, value in outcome.get("measured", {}).items()}
    rows = [("0.6B, one GPU", result["torch"]["devices"][0], "prime-rl, H100")]
    for what, names, published in PUBLISHED:
        best = max((float(measured[name]) for name in names if name in measured), default=None)
        rows.append((what, "not measured" if best is None else f"{best:,.0f}", f"{published:,}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
