"""The demo as its command runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.clusters import ROOT


def run_demo(folder: Path, *options: str) -> dict[str, Any]:
    """``python -m examples.demo`` in a process of its own; what it writes to ``summary.json``."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    command = (sys.executable, "-m", "examples.demo", "--run-dir", str(folder), *options)
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary
