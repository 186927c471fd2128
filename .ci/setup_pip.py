"""Runs pip with progress that a person can follow, and says in plain words what went wrong."""

from __future__ import annotations

import os
import queue
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = os.environ.get("LOCK", "")
"""Of an environment beside .venv: ``next/engines`` is .venv-next/engines, by .ci/pins/next/engines.txt. Empty for .venv."""
VENV = ROOT / (f".venv-{LOCK}" if LOCK else ".venv")
PYTHON = VENV / "bin" / "python"
LOG = VENV / "setup.log"
GIB = 2**30

NO_SPACE = ("No space left on device", "Disk quota exceeded", "[Errno 28]", "[Errno 122]")
NO_NETWORK = (
    "NewConnectionError",
    "NameResolutionError",
    "Temporary failure in name resolution",
    "Name or service not known",
    "ConnectTimeoutError",
    "ReadTimeoutError",
    "Connection refused",
    "Connection reset",
    "Connection broken",
    "Network is unreachable",
    "ProxyError",
    "RemoteDisconnected",
)
BAD_CERTIFICATE = ("SSLError", "CERTIFICATE_VERIFY_FAILED")


class SetupError(Exception):
    """What is wrong and what to do, in one message."""


INSTALL = ("install", "--no-deps", "--no-build-isolation")
"""Without dependency resolution: the pins are the whole environment."""
UNINSTALL = ("uninstall", "--yes")


def run_pip(step: str, arguments: list[str], *, verb: tuple[str, ...] = INSTALL, total: int = 0) -> None:
    """Runs pip in the environment; raises SetupError."""
    command = [str(PYTHON), "-Iu", "-m", "pip", *verb, "--no-input", *arguments]
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_USER": "0"}
    for variable in ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT"):
        environment.pop(variable, None)
    output: list[str] = []
    with Step(step, total) as progress, LOG.open("a") as log:
        log.write(f"$ {' '.join(command)}\n")
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        try:
            for line in lines_of(process, progress):
                output.append(line)
                log.write(line)
                log.flush()
                progress.read(line)
        finally:
            if process.poll() is None:
                process.terminate()
            code = process.wait()
        if code != 0:
            text = "".join(output)
            raise SetupError(
                explain(text) or f"pip failed; the whole log is {LOG}, its last lines are:\n{last_lines(text, 6)}"
            )


def lines_of(process: subprocess.Popen[str], progress: Step) -> Iterator[str]:
    """The lines a process prints; while it is silent the progress is shown again each second."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=1.0)
        except queue.Empty:
            progress.show()
            continue
        if line is None:
            return
        yield line


class Step:
    """One step's name, what it is doing and its seconds: redrawn in place on a terminal, a line now and then elsewhere."""

    SECONDS_BETWEEN_LINES = 20.0

    def __init__(self, name: str, total: int = 0) -> None:
        self.name = name
        self.total = total
        self.collected = 0
        self.doing = ""
        self.in_place = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"

    def __enter__(self) -> Step:
        self.started = self.shown = time.monotonic()
        self.show(always=True)
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        self.doing = "failed" if failure else "done"
        self.show(always=True)
        if self.in_place:
            print(flush=True)

    def read(self, line: str) -> None:
        """Takes the news out of one line of pip's output."""
        if line.startswith("Collecting "):
            self.collected += 1
            self.doing = f"{self.collected}/{self.total} {line.split()[1]}"
        elif line.startswith("Building wheels"):
            self.doing = "building"
        elif line.startswith("Installing collected packages"):
            self.doing = "unpacking"
        elif "Retrying (Retry(" in line and "after connection broken" in line:
            self.doing = "the package index does not answer, trying again"
        self.show()

    def show(self, *, always: bool = False) -> None:
        now = time.monotonic()
        if not always and now - self.shown < (0.2 if self.in_place else self.SECONDS_BETWEEN_LINES):
            return
        self.shown = now
        seconds = now - self.started
        text = (
            f"  {self.name}" + (f": {self.doing}" if self.doing else "") + (f" ({seconds:.0f} s)" if self.doing else " ...")
        )
        if self.in_place:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\033[K{text[:width]}", end="", flush=True)
        else:
            print(text, flush=True)


def explain(text: str) -> str | None:
    """The plain message for a failure that is the machine's, or None."""
    if any(sign in text for sign in NO_SPACE):
        free = shutil.disk_usage(ROOT).free / GIB
        return (
            f"the disk is full or a quota is used up ({free:.1f} GiB free on the disk of {ROOT}). Free some space, or "
            "set TMPDIR to a larger disk if it is pip's temporary files that do not fit, then run the same command again."
        )
    if any(sign in text for sign in BAD_CERTIFICATE):
        return (
            "pip does not trust the certificate of the package index. Set PIP_CERT to your organisation's certificate file, "
            f"then run the same command again; see {LOG}."
        )
    if any(sign in text for sign in NO_NETWORK):
        return (
            "the package index cannot be reached. Check the network, or the index and proxy in pip's settings "
            f"(pip config list), then run the same command again; see {LOG}."
        )
    missing = re.search(r"No matching distribution found for (\S+)", text)
    if missing and "(from versions: none)" in text:
        return (
            f"the package index cannot be reached, or does not have {missing.group(1).partition('==')[0]} at all. Check the "
            f"network, or the index in pip's settings (pip config list), then run the same command again; see {LOG}."
        )
    if missing:
        return (
            f"the package index that pip is configured for has no {missing.group(1)} for this machine. Use one that "
            f"has it (pip config list shows the settings); see {LOG}."
        )
    return None


def last_lines(text: str, count: int) -> str:
    lines = [line.rstrip() for line in text.splitlines() if line.strip() and "[notice]" not in line]
    return "\n".join(lines[-count:])
