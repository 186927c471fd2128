"""What keeps Ray from starting engines with the Python of another environment is said before it is tried."""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path

import pytest
import ray

from actors.cluster.environments import why_not_for_engines


def test_an_environment_with_the_same_python_and_ray_will_do() -> None:
    assert why_not_for_engines(sys.executable) == ""


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    assert "it cannot be run: [Errno 2] No such file" in why_not_for_engines(str(tmp_path / "python"))
    bare = Path(sys.base_prefix, "bin", "python3.12")
    assert why_not_for_engines(str(bare)).startswith(f"it has Python {platform.python_version()} and no Ray; all processes")
    assert why_not_for_engines("/bin/false") == "it is not a Python that runs: it says nothing"


@pytest.mark.parametrize(
    ("told", "problem"),
    [
        (["3.12.99", ray.__version__, True], "it has Python 3.12.99 and Ray"),
        ([platform.python_version(), "2.0.1", True], "and Ray 2.0.1; all processes of a cluster need the same"),
        ([platform.python_version(), ray.__version__, False], "vllm is not installed there"),
    ],
)
def test_other_versions_are_refused(tmp_path: Path, told: list[object], problem: str) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '{json.dumps(told)}'\n")
    python.chmod(0o755)
    assert problem in why_not_for_engines(str(python))
