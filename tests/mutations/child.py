"""One pytest in a process of its own, forked from one that has imported what others wrote: it starts within a second.

Importing torch, transformers and Megatron takes longer than most tests. What this repository has is imported after the fork,
from the copy with the fault.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

_OURS = ("rl_backend", "actors", "adapters", "examples", "benchmarks", "tests")
_PRELOADED = (
    "pytest",
    "numpy",
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.nested",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "safetensors.torch",
    "pydantic",
    "xxhash",
    "tensordict",
)
_PRELOADED_IF_THERE = ("megatron.core.distributed", "megatron.core.models.gpt", "megatron.core.optimizer")


def preload() -> None:
    """Imports what takes long; nothing of this repository, whose faulty copy would then not be imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in _PRELOADED:
            importlib.import_module(name)
        for name in _PRELOADED_IF_THERE:
            with suppress(ImportError):
                importlib.import_module(name)
    ours = [name for name in sys.modules if name.partition(".")[0] in _OURS and not name.startswith("tests")]
    if ours:
        raise RuntimeError(f"a package that is preloaded has imported {ours[0]}, so faults in it would not be imported")


@dataclass
class Outcome:
    """How a pytest ended.

    Attributes:
        kind: ``passed``; ``failed`` in a test or its fixtures; ``time-out`` after the time limit; ``broken`` when no test
            ran to an end: an import failed, a test does not exist, or all were skipped.
        failed: the ids of the tests that failed.
        seconds: of the whole process.
        of_tests: seconds of each test that passed.
    """

    kind: Literal["passed", "failed", "time-out", "broken"]
    failed: list[str]
    seconds: float
    of_tests: dict[str, float]


class Child:
    """Runs ``tests`` in ``copy``; its output goes to ``log``.

    Args:
        limit: seconds, after which the process and its descendants are killed.
        stop: after the first failure.
    """

    def __init__(self, copy: Path, tests: Sequence[str], log: Path, *, limit: float, stop: bool) -> None:
        self._report = log.with_suffix(".json")
        self._report.unlink(missing_ok=True)
        self._began = time.monotonic()
        self._deadline = self._began + limit
        self._pid = os.fork()
        if self._pid == 0:
            _run(copy, tests, log, self._report, stop)

    def outcome(self) -> Outcome | None:
        """None while it runs."""
        ended, _ = os.waitpid(self._pid, os.WNOHANG)
        timed_out = not ended and time.monotonic() > self._deadline
        if not ended and not timed_out:
            return None
        self._kill()
        if not ended:
            os.waitpid(self._pid, 0)
        seconds = round(time.monotonic() - self._began, 1)
        if timed_out:
            return Outcome("time-out", [], seconds, {})
        try:
            found = json.loads(self._report.read_text())
        except (OSError, ValueError):
            return Outcome("broken", [], seconds, {})
        return Outcome(found["kind"], found["failed"], seconds, found["of_tests"])

    def end(self) -> None:
        """Kills what still runs."""
        self._kill()
        os.waitpid(self._pid, 0)

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)


@dataclass(eq=False)
class _Recorder:
    """A pytest plugin. A test that raises KeyboardInterrupt has failed: nobody else interrupts this process."""

    failed: list[str] = field(default_factory=list)
    of_tests: dict[str, float] = field(default_factory=dict)
    running: str = ""

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.running = nodeid

    def pytest_keyboard_interrupt(self) -> None:
        if self.running:
            self.failed.append(self.running)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and report.nodeid not in self.failed:
            self.failed.append(report.nodeid)
        elif report.when == "call" and report.passed:
            self.of_tests[report.nodeid] = round(report.duration, 2)


def _run(copy: Path, tests: Sequence[str], log: Path, report: Path, stop: bool) -> None:
    """Never returns."""
    status = 1
    try:
        os.setsid()
        output = os.open(log, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o644)
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        report.write_text(json.dumps(_pytest(copy, tests, stop)))
        status = 0
    except BaseException:  # noqa: BLE001 - told by the log, and by the report that is missing
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _pytest(copy: Path, tests: Sequence[str], stop: bool) -> dict[str, Any]:
    import pytest

    os.chdir(copy)
    os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    # Ranks are forked as well: they have imported what the test has.
    os.environ["RANK_POOL_START_METHOD"] = "fork"
    sys.dont_write_bytecode = True
    sys.path[:] = [str(copy), *(entry for entry in sys.path if entry and not Path(entry, "tests", "mutations").is_dir())]
    for name in [name for name in sys.modules if name.partition(".")[0] in _OURS]:
        del sys.modules[name]
    importlib.invalidate_caches()
    recorder = _Recorder()
    options = ["-q", "-p", "no:cacheprovider", "--tb=short", f"--rootdir={copy}", "-m", "long or not long"]
    code = pytest.main([*options, *(["-x"] if stop else []), *tests], plugins=[recorder])
    imported = [module for name, module in sys.modules.items() if name.partition(".")[0] in _OURS]
    files = {file for module in imported if (file := getattr(module, "__file__", None))}
    if elsewhere := sorted(file for file in files if not Path(file).is_relative_to(copy)):
        raise RuntimeError(f"{elsewhere[0]} was imported, which is not in the copy with the fault")
    kind = "broken"
    if recorder.failed:
        kind = "failed"
    elif code == pytest.ExitCode.OK and recorder.of_tests:
        kind = "passed"
    return {"kind": kind, "failed": recorder.failed, "of_tests": recorder.of_tests}
